"""Tasks with limits start beside an endless stream of fast tasks of the same executor, and the other way round."""

from __future__ import annotations

import asyncio

import pytest

from everbeat import App, Limit

pytestmark = pytest.mark.story


async def test_a_stream_of_fast_tasks_does_not_keep_tasks_with_limits_waiting(
    database_url: str, schema: str
) -> None:  # K7
    app = App(database_url, schema=schema, limits=[Limit("narrow", concurrency=2)])
    ran: list[str] = []

    @app.task(name="fast")
    async def fast() -> None:
        ran.append("fast")

    @app.task(name="narrow", limits=["narrow"])
    async def narrow() -> None:
        ran.append("narrow")

    await app.asend_many([fast.call() for _ in range(20_000)])
    async with asyncio.TaskGroup() as group:
        group.create_task(app.arun_worker(async_concurrency=4))
        async with asyncio.timeout(60):
            while len(ran) < 500:
                await asyncio.sleep(0.01)  # the durations of the fast tasks are known by then
            handles = await app.asend_many([narrow.call() for _ in range(20)])
            await asyncio.gather(*(handle.aresult(timeout=60) for handle in handles))
        before = len(ran)
        app.stop_worker()
    assert ran[:before].count("narrow") == 20
    assert before < 19_000, "the stream was over before"
    await app.aclose()
