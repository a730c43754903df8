"""How often hints may make their receiver query the database in vain.

Every role that can connect can send hints without end. A hint is followed at once as long as one in `BURST` leads to something.
"""

from __future__ import annotations

from typing import Final

BURST: Final = 100
"""Hints that are followed at once although none of them led to anything."""
PER_S: Final = 50.0
"""How often hints are followed after that, until one of them leads to something."""


class HintRate:
    """One per receiver. Times are seconds of any clock that only moves forward."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._asked_at = 0.0

    def pause_s(self, now: float) -> float:
        """Return how long to wait before the next query that a hint causes, and count that query."""
        self._left = min(BURST, self._left + (now - self._asked_at) * PER_S) - 1.0
        self._asked_at = now
        return max(0.0, -self._left / PER_S)

    def paid_off(self) -> None:
        """The query found something to do: hints are worth following."""
        self._left = float(BURST)
