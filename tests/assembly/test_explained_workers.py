"""Test that the state that a real worker reports is enough to explain why a task waits or what it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from everbeat import App
from everbeat.inspection import Explanation


@pytest.fixture
async def app(database_url: str, schema: str) -> AsyncIterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    await opened.aclose()


async def test_explain_reports_busy_slots_of_the_lane_while_other_lanes_are_free(app: App) -> None:
    started, release = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @app.task
    def slow() -> None:
        loop.call_soon_threadsafe(started.set)
        assert release.wait(60)

    @app.task
    async def quick() -> int:
        return 1

    working = asyncio.ensure_future(
        app.arun_worker(process_concurrency=0, thread_concurrency=1, prefetch=0, grace="30s")
    )
    try:
        running = await slow.asend()
        async with asyncio.timeout(30):
            await started.wait()
        waiting = await slow.asend()
        busy = await app.aexplain(waiting.id)
        assert [reason.code for reason in busy.reasons] == ["SLOTS_BUSY"]
        assert "1 live worker that can run it: 1 slot, all busy" in busy.reasons[0].text
        assert await (await quick.asend()).aresult(timeout=30) == 1  # its own lane has slots
        held: Explanation = await app.aexplain(running.id)
        assert [reason.code for reason in held.reasons] == ["RUNNING"]
    finally:
        release.set()
        app.stop_worker()
        await working
