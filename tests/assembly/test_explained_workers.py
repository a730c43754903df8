"""What a real worker tells of itself is enough to say why a task waits, or what it does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from everbeat import App, Explanation


@pytest.fixture
async def app(database_url: str, schema: str) -> AsyncIterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    await opened.aclose()


async def test_a_task_waits_for_a_slot_of_its_kind_while_others_are_free(app: App) -> None:
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
        assert "1 live worker that could run it: 1 slot, all busy" in busy.reasons[0].text
        assert await (await quick.asend()).aresult(timeout=30) == 1  # its own kind has slots
        held: Explanation = await app.aexplain(running.id)
        assert [reason.code for reason in held.reasons] == ["RUNNING"]
    finally:
        release.set()
        app.stop_worker()
        await working
