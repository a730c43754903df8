"""Injectable clocks, and exponential backoff between retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from random import Random
from typing import Final, Protocol

from msgspec import Struct


class Clock(Protocol):
    """A source of time: `SystemClock` in production, `everbeat.testing.clock` in tests."""

    def monotonic(self) -> float:
        """Return the seconds since a fixed point in time. The value never decreases, and includes time while the machine is suspended."""
        ...

    def wall(self) -> datetime:
        """Return the current date and time in UTC, for people and logs. This clock can jump, so no decision depends on it."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds` on this clock."""
        ...

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Return True once `event` is set, or False if it is not set within `timeout_s` seconds. The event is not cleared."""
        ...


_seconds_since_boot: Final[Callable[[], float]] = (
    partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
)


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    monotonic = staticmethod(_seconds_since_boot)
    """Seconds since boot, from CLOCK_BOOTTIME. Leases must age while the machine is suspended.

    The system function is not wrapped in a Python function, because it is called several times per task.
    """

    def wall(self) -> datetime:
        """Return the current date and time in UTC."""
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        await asyncio.sleep(seconds)

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Return True once `event` is set, or False if it is not set within `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            pass  # The event might have been set in the loop iteration in which the timeout expired.
        return event.is_set()


_MOST_DOUBLINGS: Final = 64
"""The largest exponent of a delay. 2.0 ** 1100 raises OverflowError, and an outage of several hours causes more failures than that."""


class Backoff(Struct, kw_only=True):
    """Exponential backoff. The first delay is `first_s` seconds, and each further delay is `factor` times the previous one, up to `longest_s`.

    Each delay is multiplied by a random number between the two values of `spread`, so that processes that failed together do not retry
    together. `failures` counts the calls of `next` since the last `reset`.
    """

    first_s: float
    longest_s: float
    factor: float = 2.0
    spread: tuple[float, float] = (1.0, 1.0)
    random: Random | None = None
    failures: int = 0

    def delay(self, failures: int) -> float:
        """Return the delay after the given number of consecutive failures, counted from 1."""
        grown = self.first_s * self.factor ** min(failures - 1, _MOST_DOUBLINGS)
        share = 1.0 if self.random is None else self.random.uniform(*self.spread)
        return min(grown, self.longest_s) * share

    def next(self) -> float:
        """Count a failure and return the delay that follows it."""
        self.failures += 1
        return self.delay(self.failures)

    def reset(self) -> None:
        """Start again with the first delay."""
        self.failures = 0
