"""Values of events as text of one line."""

from __future__ import annotations

import re
from datetime import datetime
from enum import Enum

_VALUE_LIMIT = 2000


def value_text(value: object) -> str:
    """Return the value in one line of bounded length, quoted where it needs it."""
    match value:
        case float():
            return f"{value:.3f}"
        case BaseException():
            return _quoted(f"{type(value).__name__}: {_safe_text(value)}")
        case Enum():
            return _quoted(str(value.value))
        case datetime():
            return value.isoformat()
        case tuple():
            shown = ",".join(value_text(item) for item in value[:20])
            return shown + (f",(+{len(value) - 20})" if len(value) > 20 else "")
        case _:
            return _quoted(_safe_text(value))


def _safe_text(value: object) -> str:
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 - the text of a foreign object runs foreign code, which may even exit
        return "(its text cannot be made)"


def _quoted(text: str) -> str:
    text = text if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}…"
    if text and not re.search(r'[\s"=,]', text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
