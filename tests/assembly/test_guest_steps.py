"""What a task does for good in a worker within another program, and its children, through the app as users have it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from everbeat import App, Context, PayloadError


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    opened.close()


async def test_a_task_that_steps_waits_and_begets(app: App) -> None:
    called: list[int] = []

    def double(n: int) -> int:
        called.append(n)
        return 2 * n

    @app.task(queue="small", priority=5, timeout="7s", flags=["f"])
    def measure(n: int) -> int:
        return n + 1

    @app.task
    def whole(ctx: Context, n: int) -> list[int]:
        doubled = ctx.step(double, n)
        child = ctx.send(measure.with_options(serial="a").call(n))
        said = ctx.wait_event("go", type=int)
        return [doubled, said, child.result(timeout=20)]

    working = asyncio.ensure_future(app.arun_worker(process_concurrency=0))
    handle = await whole.asend(4)
    while (await handle.ainfo()).waits_for != "go":
        await asyncio.sleep(0.02)  # what is awaited shows in the database only
    await app.asignal(handle, "go", 3)
    assert await handle.aresult(timeout=30) == [8, 3, 5]
    assert called == [4]
    (child,) = await app.alist_tasks(parent=handle.id)
    assert (child.name, child.queue, child.priority, child.serial) == ("measure", "small", 5, "key:a")
    info = await app.ainfo(child.id)
    assert (info.arguments, info.policy.timeout_ms, dict(info.flags)) == ({"n": 4}, 7_000, {"f": True})
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await app.aclose()


async def test_a_call_that_belongs_elsewhere_is_no_child(app: App) -> None:
    @app.task
    def measure(n: int) -> int:
        return n

    @app.task
    def parent(ctx: Context) -> str:
        try:
            ctx.send(measure.with_options(connection=object()).call(1))
        except PayloadError as refusal:
            return refusal.message
        return "sent"

    working = asyncio.ensure_future(app.arun_worker(process_concurrency=0))
    refused = await (await parent.asend()).aresult(timeout=30)
    assert (
        refused
        == "The call of 'measure' belongs to the transaction of a connection, and a child is sent by the worker."
    )
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await app.aclose()
