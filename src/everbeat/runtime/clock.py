"""Time as an argument: the `Clock` that everything above asks, and the system's own.

What lives here: reading the machine's clocks and waiting by them. What may not: stored times, which are the
database's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from typing import Final, Protocol


class Clock(Protocol):
    """A source of time; production passes `SystemClock`, tests pass a clock they turn by hand."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment: never steps back, and counts the time of a suspended machine."""
        ...

    def wall(self) -> datetime:
        """The date and time in UTC, for people and logs; it may jump and decides nothing."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds` of this clock."""
        ...

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Return True once `event` is set, False after `timeout_s` seconds without it. Clears nothing."""
        ...


_seconds_since_boot: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    monotonic = staticmethod(_seconds_since_boot)
    """Seconds since boot; a suspended machine's lease must be old when it wakes, hence CLOCK_BOOTTIME.

    Asked several times for every task: no function of Python's stands before the system's.
    """

    def wall(self) -> datetime:
        """The date and time in UTC."""
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        """Return after `seconds`."""
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Return True once `event` is set, False after `timeout_s` seconds without it."""
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass  # The event may have been set in the very turn in which the time was up: ask it.
        return event.is_set()
