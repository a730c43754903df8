"""A clock that only moves when told to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any


class ManualClock:
    """Time by hand: `await clock.advance(5)` lets everything run that becomes due within those 5 seconds."""

    def __init__(self, *, wall: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._now = 0.0
        self._started = wall
        self._waiting: dict[asyncio.Future[None], float] = {}

    def monotonic(self) -> float:
        """Seconds advanced so far."""
        return self._now

    def wall(self) -> datetime:
        """The starting date plus what was advanced."""
        return self._started + timedelta(seconds=self._now)

    @property
    def waiting(self) -> int:
        """How many sleep on this clock now."""
        return len(self._waiting)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock was advanced by `seconds`."""
        await self.wait(asyncio.Event(), timeout_s=seconds)

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Return True once `event` is set, False once the clock was advanced by `timeout_s` without it."""
        if event.is_set() or timeout_s <= 0:
            await asyncio.sleep(0)
            return event.is_set()
        loop = asyncio.get_running_loop()
        due: asyncio.Future[None] = loop.create_future()
        self._waiting[due] = self._now + timeout_s
        setting = loop.create_task(event.wait(), name="manual-clock-event")
        try:
            either: tuple[asyncio.Future[Any], ...] = (due, setting)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._waiting.pop(due, None)
            setting.cancel()
        return event.is_set()

    async def advance(self, seconds: float) -> None:
        """Move on by `seconds`, stopping whenever something is due, and let the loop settle each time."""
        end = self._now + seconds
        await settle()
        while self._waiting and (moment := min(self._waiting.values())) <= end:
            self._now = max(self._now, moment)
            for due, at in list(self._waiting.items()):
                if at <= self._now and not due.done():
                    due.set_result(None)
            await settle()
        self._now = end


async def settle(turns: int = 50) -> None:
    """Let the loop turn until what is ready has run; real I/O is not waited for."""
    for _ in range(turns):
        await asyncio.sleep(0)
