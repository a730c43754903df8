"""When a worker process that ended is replaced, and when there is no sense in trying."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Final

_FIRST_S: Final = 0.5
_LONGEST_S: Final = 30.0
_SOUND_S: Final = 60.0
"""A process that lived so long was sound: its end starts the count anew."""
_MOST_EARLY_DEATHS: Final = 5
_EARLY_WINDOW_S: Final = 60.0


class Pace:
    """The pause before each replacement in one place: none, then 0.5 s doubling to 30 s, up to a quarter added by chance."""

    def __init__(self, *, random: Random) -> None:
        self._random = random
        self._in_a_row = 0

    def pause_after(self, lived_s: float) -> float:
        """Seconds to wait after a process that lived for `lived_s`."""
        self._in_a_row = 1 if lived_s >= _SOUND_S else self._in_a_row + 1
        if self._in_a_row == 1:
            return 0.0
        doubled = _FIRST_S * 2.0 ** min(self._in_a_row - 2, 16)
        return min(_LONGEST_S, doubled * (1.0 + 0.25 * self._random.random()))


class EarlyDeaths:
    """Counts the processes that ended before they were ready."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=_MOST_EARLY_DEATHS)

    def count(self, at: float) -> bool:
        """One more; whether these are too many in too short a time to be chance."""
        self._at.append(at)
        return len(self._at) == _MOST_EARLY_DEATHS and at - self._at[0] <= _EARLY_WINDOW_S
