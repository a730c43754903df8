"""The rule by which a silence counts as a mass silence, and that by which a worker process counts as unresponsive."""

from __future__ import annotations

from typing import Final

UNRESPONSIVE_S: Final = 10.0
"""A worker process that has told its supervisor nothing for so long is reported: it reports every second."""
_LEAST_KNOWN: Final = 3
_LEAST_SILENT: Final = 2


def is_mass(*, silent: int, known: int) -> bool:
    """Whether so many of the known supervisors are silent that they are not the ones to blame."""
    return known >= _LEAST_KNOWN and silent >= _LEAST_SILENT and 2 * silent >= known
