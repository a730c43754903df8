"""Test `ctx.start`, by which a task starts a workflow that belongs to it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from everbeat import App, Context, Node, RetryPolicy, TaskFailed, Workflow
from everbeat.client.workflow import sender
from everbeat.errors import OutsideWorker, PayloadError
from everbeat.workflows import WorkflowCall, WorkflowState
from tests.client.working import working

pytestmark = pytest.mark.usefixtures("migrated")
AGAIN = RetryPolicy(max_retries=3, intervals=["1s"], jitter=0, auto_retry_for=["UNHANDLED_EXCEPTION"])


@pytest.fixture
def app(database_url: str, schema: str) -> Iterator[App]:
    app = App(database_url, schema=schema)
    yield app
    app.close()


def parcel_of(app: App) -> Any:
    @app.task
    async def wrap(number: int) -> str:
        return f"parcel {number}"

    @app.define_workflow("parcel")
    def parcel(wf: Workflow, number: int) -> Node[str]:
        return wf.add(wrap, number)

    return parcel


async def test_a_task_starts_each_of_its_workflows_once_in_all_attempts(app: App) -> None:
    parcel = parcel_of(app)

    @app.task
    async def count(text: str) -> int:
        return len(text)

    @app.task(retry=AGAIN)
    async def ship(ctx: Context, number: int) -> list[str]:
        handle = await ctx.astart(parcel.call(number))
        wf = app.workflow("counted")
        counted = await ctx.named("count").astart(wf.call(output=wf.add(count, "four")))
        alone = app.workflow("alone")
        alone.add(count, "x")
        ids = [str(each.id) for each in (handle, counted, await ctx.astart(alone))]
        if ctx.attempt == 1:
            raise RuntimeError("once")
        assert await handle.aresult(timeout="30s") == f"parcel {number}"
        assert await counted.aresult(timeout="30s") == 4
        return ids

    async with working(app):
        handle = await ship.asend(7)
        ids = await handle.aresult(timeout="60s")
        started = await app.alist_workflows(parent=handle.id)
    assert {str(each.id) for each in started} == {*ids}
    assert {each.name for each in started} == {"parcel", "counted", "alone"}
    assert {each.parent_task_id for each in started} == {handle.id}
    assert {each.parent_id for each in started} == {None}


async def test_a_sync_task_starts_a_workflow(app: App) -> None:
    parcel = parcel_of(app)

    @app.task
    def ship(ctx: Context, number: int) -> str:
        return ctx.start(parcel.call(number)).result(timeout="30s")

    async with working(app):
        assert await (await ship.asend(7)).aresult(timeout="60s") == "parcel 7"


async def test_a_task_that_starts_a_workflow_with_a_live_key_gets_the_live_one(app: App) -> None:
    parcel = parcel_of(app)

    @app.task
    async def endless() -> None:
        await asyncio.sleep(3600)  # until it is cancelled

    @app.define_workflow("long")
    def long(wf: Workflow) -> None:
        wf.add(endless)

    @app.task
    async def ship(ctx: Context) -> str:
        return str((await ctx.astart(long.with_options(key="k").call())).id)

    assert parcel is not None
    async with working(app):
        known = await long.with_options(key="k").astart()
        assert await (await ship.asend()).aresult(timeout="60s") == str(known.id)
        await known.acancel()


async def test_a_workflow_start_with_other_arguments_fails_the_next_attempt(app: App) -> None:
    parcel = parcel_of(app)

    @app.task(retry=AGAIN)
    async def ship(ctx: Context) -> None:
        await ctx.named("the parcel").astart(parcel.call(ctx.attempt))
        raise RuntimeError("once")

    async with working(app):
        handle = await ship.asend()
        with pytest.raises(TaskFailed, match=r"NON_DETERMINISTIC.*'the parcel'"):
            await handle.aresult(timeout="60s")
    assert len(await app.alist_workflows(parent=handle.id)) == 1


async def test_a_workflow_start_with_another_draft_fails_the_next_attempt(app: App) -> None:
    @app.task
    async def note(text: str) -> str:
        return text

    @app.task(retry=AGAIN)
    async def ship(ctx: Context) -> None:
        wf = app.workflow("noted")
        wf.add(note, f"attempt {ctx.attempt}")
        await ctx.astart(wf)
        raise RuntimeError("once")

    async with working(app):
        with pytest.raises(TaskFailed, match=r"NON_DETERMINISTIC.*'noted'"):
            await (await ship.asend()).aresult(timeout="60s")


async def test_a_cancel_of_a_task_cancels_the_workflows_that_it_started(app: App) -> None:
    begun = asyncio.Event()

    @app.task
    async def endless() -> None:
        begun.set()
        await asyncio.sleep(3600)  # until it is cancelled

    @app.define_workflow("long")
    def long(wf: Workflow) -> None:
        wf.add(endless)

    @app.task
    async def ship(ctx: Context) -> str:
        handle = await ctx.astart(long.call())
        await asyncio.sleep(3600)  # until it is cancelled
        return str(handle.id)

    async with working(app):
        handle = await ship.asend()
        async with asyncio.timeout(60):
            await begun.wait()
        await handle.acancel()
        (started,) = await app.alist_workflows(parent=handle.id)
        await app.workflow_handle(started.id).aoutcome(timeout="60s")
        assert await app.workflow_handle(started.id).astatus() == WorkflowState.CANCELLED


class TestRefusals:
    def test_a_direct_call_cannot_start_a_workflow(self, app: App) -> None:
        parcel = parcel_of(app)

        @app.task
        def ship(ctx: Context) -> UUID:
            return ctx.start(parcel.call(1)).id

        with pytest.raises(OutsideWorker, match=r"Context\.start needs a task that a worker runs"):
            ship()

    @pytest.mark.parametrize(
        ("what", "message"),
        [
            ("definition", r"it is a definition without its arguments\. Fix: pass definition\.call"),
            ("handle", r"it was started already\. Fix: use its handle"),
            ("call", r"it is of type Call, not a workflow\. Fix: send a task with ctx\.send"),
            ("graph", r"it is of type Graph, not a workflow"),
            ("connection", r"it belongs to the transaction of a connection"),
            ("stranger", r"it belongs to another App, which does not have this task"),
            ("large", r"it has 3 nodes, and a task can start at most 2 in one workflow"),
        ],
    )
    def test_start_refuses_an_object_that_is_not_a_workflow_of_the_app(
        self, app: App, database_url: str, monkeypatch: pytest.MonkeyPatch, what: str, message: str
    ) -> None:
        parcel = parcel_of(app)

        @app.task
        def ship(ctx: Context, given: Any) -> None:
            ctx.start(given)

        stranger = App(database_url, schema="elsewhere")
        with psycopg.connect(database_url) as connection:
            match what:
                case "definition":
                    given = parcel
                case "handle":
                    given = app.workflow_handle(UUID(int=1))
                case "call":
                    given = ship.call(1)
                case "graph":
                    given = parcel.build(1)
                case "connection":
                    given = parcel.with_options(connection=connection).call(1)
                case "stranger":
                    given = parcel_of(stranger).call(1)
                case _:
                    monkeypatch.setattr(sender, "MOST_NODES_OF_TASK", 2)
                    given = app.workflow("large")
                    for _ in range(3):
                        given.add(ship, None)
            with pytest.raises(PayloadError, match=message):
                ship(given)

    def test_start_refuses_the_timeout_and_retry_of_a_step(self, app: App) -> None:
        parcel = parcel_of(app)

        @app.task
        def ship(ctx: Context) -> None:
            ctx.with_options(timeout="1s").start(parcel.call(1))

        with pytest.raises(
            PayloadError, match=r"Context\.start of task .*ship' takes neither a retry nor a timeout"
        ):
            ship()

    def test_the_repr_of_a_workflow_call_names_the_workflow(self, app: App) -> None:
        call = parcel_of(app).call(1)
        assert isinstance(call, WorkflowCall)
        assert repr(call) == "<WorkflowCall 'parcel', 1 node>"
