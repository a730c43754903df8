"""Helpers for messages: name suggestions, short lists, counts with nouns, and text that is safe for terminals and PostgreSQL."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that is most similar to `name`, or None if no choice is similar enough."""
    by_lowered = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lowered, n=1, cutoff=0.6)
    return by_lowered[matches[0]] if matches else None


def some(names: Sequence[str], *, limit: int = 10) -> str:
    """Return up to `limit` names separated by commas, followed by the number of remaining names, if any."""
    if not names:
        return "none"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def amount(number: int, noun: str, *, plural: str | None = None) -> str:
    """Return a number with its noun in the singular or plural: 0 tasks, 1 task, 1,000 tasks."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


# The Unicode categories Cc, Cf, Cs, Zl and Zp, except newline, tab and the visible Arabic, Syriac and Kaithi number signs.
_HARMFUL: Final = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_IN_PARAGRAPHS: Final = re.compile(f"[{_HARMFUL}]")
_IN_LINES: Final = re.compile(f"[\\n\\t{_HARMFUL}]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """Return the text with control and format characters escaped. Newlines and tabs are kept."""
    return _IN_PARAGRAPHS.sub(_escape, text)


def on_one_line(text: str) -> str:
    """Return the text with control and format characters, newlines and tabs escaped, so that data cannot forge a second line."""
    return _IN_LINES.sub(_escape, text)


def visible_json(document: str) -> str:
    """Return the JSON document with the control and format characters in its strings written as JSON escapes. Its value is unchanged."""
    return _IN_PARAGRAPHS.sub(_json_escape, document)


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    if number > 0xFFFF:
        return f"\\U{number:08x}"
    return _SHORT.get(character) or (f"\\x{number:02x}" if number <= 0xFF else f"\\u{number:04x}")


def _json_escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


_NUL = "\x00"
CUT = " characters cut]"
"""The end of the marker that `storable` inserts in place of removed text."""


def storable(text: str, *, limit: int, tail: int = 0) -> str:
    """Return the text in a form that PostgreSQL can store: at most `limit` bytes of UTF-8, plus a marker if text was removed.

    If the text is too long, up to `tail` bytes are taken from its end, and the others from its start. NUL and lone surrogates
    become backslash escapes.
    """
    if len(text) <= limit:
        whole = _clean(text)
        if len(whole) <= limit:
            return whole.decode()
    head = _clean(text[:limit])[: limit - tail].decode(errors="ignore")
    end = _clean(text[-limit:])[-tail:].decode(errors="ignore") if tail else ""
    cut = max(len(text) - len(head) - len(end), 1)
    return f"{head}… [{cut:,}{CUT} …{end}" if tail else f"{head}… [{cut:,}{CUT}"


def is_storable(text: str) -> bool:
    """Return whether PostgreSQL can store the text: it contains no NUL characters and no lone surrogates."""
    return "\0" not in text and not any("\ud800" <= each <= "\udfff" for each in text)


def safe_text(value: object, *, limit: int, render: Callable[[object], str] = str) -> str:
    """Return `render(value)` as storable text, or a note if `render` raises an exception or does not return text. Never raises."""
    try:
        text = render(value)
        return storable(str.__str__(text), limit=limit)
    except RecursionError:
        return f"<{render.__name__}() of a {class_name(type(value))} is endless>"
    except BaseException as problem:  # noqa: BLE001 - user code can raise any exception, even SystemExit
        return f"<{render.__name__}() of a {class_name(type(value))} raised {class_name(type(problem))}>"


def class_name(cls: type) -> str:
    """Return the qualified name of a class, without the prefix `builtins`."""
    qualified = type.__dict__["__qualname__"].__get__(cls)  # a metaclass can override `cls.__qualname__`
    module = cls.__dict__.get("__module__", "builtins")
    if not isinstance(module, str) or module == "builtins":
        return str(qualified)
    return f"{module}.{qualified}"


def _clean(text: str) -> bytes:
    return text.replace(_NUL, "\\x00").encode("utf-8", errors="backslashreplace")


def brief_duration(seconds: float) -> str:
    """Return a measured duration for people, such as "96 ms", "2.1 s", "46 s", "1 m 8 s" or "2 h 5 m".

    The value of a setting has its own form, that of `spelled_duration`, in which it can be written again.
    """
    seconds = max(0.0, seconds)
    if seconds < 0.0995:
        return f"{seconds * 1_000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, size_of_rest, rest in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            left = whole % size // size_of_rest
            return f"{whole // size} {unit} {left} {rest}" if left else f"{whole // size} {unit}"
    return f"{whole} s"


def spoken_way(noticed_by: str) -> str:
    """Return how a death was noticed, as words: `child_exit` is "child exit"."""
    return noticed_by.replace("_", " ")
