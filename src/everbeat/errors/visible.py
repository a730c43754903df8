"""Text made harmless for a terminal: control and format characters become visible escapes such as `\\x1b`.

A terminal obeys control characters: they set its title, write the clipboard and move the cursor. Format characters
reorder or hide text. JSON keeps its exact data: in it the same characters are written as `\\uXXXX`.
"""

from __future__ import annotations

import re
from typing import Final

# The categories Cc, Cf, Cs, Zl and Zp, without newline, tab and the visible Arabic, Syriac and Kaithi number signs.
_HARMFUL: Final = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff"
    r"\ufff9-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_IN_PARAGRAPHS: Final = re.compile(f"[{_HARMFUL}]")
_IN_LINES: Final = re.compile(f"[\\n\\t{_HARMFUL}]")
_SHORT: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def visible(text: str) -> str:
    """Return the text with control and format characters as escapes; newlines and tabs stay."""
    return _IN_PARAGRAPHS.sub(_escape, text)


def on_one_line(text: str) -> str:
    """Return the text as `visible` does, with newlines and tabs as escapes too: data cannot forge a second line."""
    return _IN_LINES.sub(_escape, text)


def visible_json(document: str) -> str:
    """Return the same JSON document with control and format characters inside its strings as JSON escapes."""
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
