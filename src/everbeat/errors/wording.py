"""What messages need: the nearest right name, a short list."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was most likely meant to be, or None when nothing is close."""
    by_lowered = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), by_lowered, n=1, cutoff=0.6)
    return by_lowered[matches[0]] if matches else None


def some(names: Sequence[str], *, limit: int = 10) -> str:
    """The first names of a list, and how many more there are."""
    if not names:
        return "none"
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
