"""Text that PostgreSQL and JSON can hold, made from any object, however broken its `str` is.

What lives here: cleaning and shortening. What may not: deciding what the text means.
"""

from __future__ import annotations

from collections.abc import Callable

_NUL = "\x00"
CUT = " characters cut]"
"""Ends the mark that stands where text was left out."""


def storable(text: str, *, limit: int, tail: int = 0) -> str:
    """The text without NUL and lone surrogates, at most `limit` bytes of UTF-8 plus a mark that says what
    was cut.

    The last `tail` bytes of the limit are taken from the end of the text, the rest from its start. What
    cannot be stored is shown as a backslash escape.
    """
    if len(text) <= limit:
        whole = _clean(text)
        if len(whole) <= limit:
            return whole.decode()
    head = _clean(text[:limit])[: limit - tail].decode(errors="ignore")
    end = _clean(text[-limit:])[-tail:].decode(errors="ignore") if tail else ""
    cut = max(len(text) - len(head) - len(end), 1)
    return f"{head}… [{cut:,}{CUT} …{end}" if tail else f"{head}… [{cut:,}{CUT}"


def safe_text(value: object, *, limit: int, render: Callable[[object], str] = str) -> str:
    """`render(value)` as storable text; says so when that raises or gives no text. Never raises."""
    try:
        text = render(value)
        return storable(str.__str__(text), limit=limit)
    except RecursionError:
        return f"<{render.__name__}() of a {class_name(type(value))} is endless>"
    except BaseException as problem:  # noqa: BLE001 - user code renders itself, and may raise anything, even SystemExit
        return f"<{render.__name__}() of a {class_name(type(value))} raised {class_name(type(problem))}>"


def class_name(cls: type) -> str:
    """The qualified name of a class, without `builtins`."""
    qualified = type.__dict__["__qualname__"].__get__(cls)  # not the attribute: a metaclass may break it
    module = cls.__dict__.get("__module__", "builtins")
    if not isinstance(module, str) or module == "builtins":
        return str(qualified)
    return f"{module}.{qualified}"


def _clean(text: str) -> bytes:
    return text.replace(_NUL, "\\x00").encode("utf-8", errors="backslashreplace")
