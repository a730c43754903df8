"""The rule by which a silence counts as a mass silence."""

from __future__ import annotations

from typing import Final

_LEAST_KNOWN: Final = 3
_LEAST_SILENT: Final = 2


def is_mass(*, silent: int, known: int) -> bool:
    """Whether so many of the known supervisors are silent that they are not the ones to blame."""
    return known >= _LEAST_KNOWN and silent >= _LEAST_SILENT and 2 * silent >= known
