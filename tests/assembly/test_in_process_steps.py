"""Test steps and child tasks in an in-process worker, through the public app."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from everbeat import App, Completed, Context, Failed
from everbeat.errors import PayloadError

pytestmark = pytest.mark.usefixtures("migrated")


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    opened = App(database_url, schema=schema)
    yield opened
    opened.close()


async def test_a_task_runs_steps_waits_for_an_event_and_sends_a_child(app: App) -> None:
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
        await asyncio.sleep(0.02)  # only the database shows the awaited change
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


async def test_a_call_with_its_own_connection_cannot_be_sent_as_a_child(app: App) -> None:
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


async def test_a_retried_workflow_does_not_repeat_recorded_steps(app: App) -> None:  # J5
    called: list[int] = []
    is_open: list[bool] = []

    def charge(n: int) -> int:
        called.append(n)
        return n

    @app.task
    def pay(ctx: Context, n: int) -> int:
        paid = ctx.step(charge, n)
        if not is_open:
            raise RuntimeError("the till is closed")
        return paid

    flow = app.workflow("sale")
    flow.add(pay, 5)
    working = asyncio.ensure_future(app.arun_worker(process_concurrency=0))
    workflow = await flow.astart()
    assert isinstance(await workflow.aoutcome(timeout=30), Failed)
    is_open.append(True)
    await workflow.aretry()
    assert await workflow.aoutcome(timeout=30) == Completed(None)
    assert called == [5]
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    await app.aclose()
