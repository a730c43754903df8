"""Writes a progress report as stored text."""

from __future__ import annotations

from typing import Final

import msgspec

from everbeat.errors.wording import storable

_TEXT_BYTES: Final = 8_192


def progress_json(*, stage: str, fraction: float | None, message: str) -> bytes:
    """Return a progress report as stored JSON. Text that JSON cannot represent is escaped, and long text is truncated to 8 kB."""
    clean = (storable(text, limit=_TEXT_BYTES) for text in (stage, message))
    return msgspec.json.encode({"stage": next(clean), "fraction": fraction, "message": next(clean)})
