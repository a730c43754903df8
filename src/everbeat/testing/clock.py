"""A manual clock for tests."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any


class ManualClock:
    """A clock that moves only when a test advances it. `await clock.advance(5)` ends all waits that are due within 5 seconds."""

    def __init__(self, *, wall: datetime = datetime(2030, 1, 1, tzinfo=UTC)) -> None:
        self._now = 0.0
        self._started = wall
        self._waiting: dict[asyncio.Future[None], float] = {}

    def monotonic(self) -> float:
        """Return the number of seconds by which the clock has been advanced so far."""
        return self._now

    def wall(self) -> datetime:
        """Return the start time plus the time by which the clock has been advanced so far."""
        return self._started + timedelta(seconds=self._now)

    @property
    def waiting(self) -> int:
        """Return the number of sleeps and waits that are pending on this clock."""
        return len(self._waiting)

    async def sleep(self, seconds: float) -> None:
        """Return once the clock has advanced by `seconds`."""
        await self.wait(asyncio.Event(), timeout_s=seconds)

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        """Return True once `event` is set, or False if the clock advances by `timeout_s` seconds first."""
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
        """Advance the clock by `seconds`. At each time when a sleep or wait is due, pause until the event loop has settled."""
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
    """Run `turns` iterations of the event loop, so that ready callbacks and tasks can run. Do not wait for real I/O."""
    for _ in range(turns):
        await asyncio.sleep(0)
