from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from everbeat.runtime.clock import Clock, SystemClock
from everbeat.testing.clock import ManualClock, settle


async def test_the_system_clock_waits_for_an_event_or_a_timeout() -> None:
    clock: Clock = SystemClock()
    event = asyncio.Event()
    started = clock.monotonic()
    assert not await clock.wait(event, timeout_s=0.05)
    assert clock.monotonic() - started >= 0.05
    event.set()
    assert await clock.wait(event, timeout_s=60)
    assert await clock.wait(event, timeout_s=0)
    await clock.sleep(0)  # what is tested
    assert abs(clock.wall() - datetime.now(UTC)) < timedelta(seconds=5)


async def test_a_manual_clock_advances_only_on_request_and_stops_at_each_due_time() -> None:
    clock = ManualClock()
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)  # by hand
        woken.append((name, clock.monotonic()))
        await clock.sleep(1)  # by hand
        woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("late", 5)), asyncio.create_task(sleeper("early", 2))]
    await settle()
    assert (woken, clock.waiting) == ([], 2)
    await clock.advance(5.5)
    assert woken == [("early", 2), ("early", 3), ("late", 5)]
    await clock.advance(0.5)
    assert woken[-1] == ("late", 6)
    assert (clock.monotonic(), clock.wall()) == (6, datetime(2030, 1, 1, 0, 0, 6, tzinfo=UTC))
    await asyncio.gather(*tasks)


async def test_an_event_ends_a_wait_on_a_manual_clock() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waiting = asyncio.create_task(clock.wait(event, timeout_s=10))
    await settle()
    event.set()
    assert await waiting
    assert clock.waiting == 0
