"""When to look for work without a hint: when the next task becomes due, and at the latest after the poll interval.

What lives here: these two moments, by the worker's own clock. What may not: the statement that asks for the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from everbeat.runtime.clock import Clock

DEAF_POLL_S: Final = 1.0
_SLACK_S: Final = 0.001


class Lookout:
    """`is_deaf()`: hints do not arrive, there is only the poll."""

    def __init__(self, *, poll_interval_s: float, is_deaf: Callable[[], bool], clock: Clock) -> None:
        self._poll_interval_s = poll_interval_s
        self._is_deaf = is_deaf
        self._clock = clock
        self.is_poll = False
        """Whether the poll had come at the last `is_time`."""
        self._due_at = math.inf
        self._poll_at = 0.0

    @property
    def interval_s(self) -> float:
        """The poll floor."""
        return min(self._poll_interval_s, DEAF_POLL_S) if self._is_deaf() else self._poll_interval_s

    def is_time(self) -> bool:
        """Whether one of the two has come; each counts once."""
        now = self._clock.monotonic()
        is_due, is_poll = now >= self._due_at, now >= self._poll_at
        self.is_poll = is_poll
        if is_due:
            self._due_at = math.inf
        if is_poll or self._poll_at - now > self.interval_s:
            self._poll_at = now + self.interval_s
        return is_due or is_poll

    def expect(self, due_in_ms: float) -> None:
        """A task becomes due in so many milliseconds, by the database's clock; negative: it just did."""
        self._due_at = min(self._due_at, self._clock.monotonic() + max(0.0, due_in_ms) / 1_000 + _SLACK_S)

    @property
    def next_at(self) -> float:
        """The earlier of the two."""
        return min(self._due_at, self._poll_at)
