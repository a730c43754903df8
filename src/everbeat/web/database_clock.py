"""The time of the database, as pages show it: the clock of the machine that serves the dashboard can be wrong by minutes."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.store.inspection import read_clock
from everbeat.store.reading import ReadingDatabase

_FRESH_S: Final = 60.0


class PageClock:
    """Measures how far the database's clock is ahead of this machine's, at most once a minute, for all viewers."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self._ahead = timedelta(0)
        self._until = float("-inf")

    def now(self) -> datetime:
        """Return the database's time by the last measurement."""
        return self._clock.wall() + self._ahead

    async def measure(self, reading: ReadingDatabase) -> None:
        """Compare the clocks if the last measurement is old. Never raises DatabaseError: the parts of the page say what cannot be read."""
        if self._clock.monotonic() < self._until:
            return
        self._until = self._clock.monotonic() + _FRESH_S
        began = self._clock.wall()
        with suppress(DatabaseError):
            found = await reading.arun(read_clock())
            self._ahead = found - (began + (self._clock.wall() - began) / 2)
