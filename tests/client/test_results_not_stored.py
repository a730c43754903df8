"""Test `ignore_result` and `keep_result_for`: the stored value, the error of a reader, and the workflows that are rejected."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from psycopg import sql

from everbeat import App, Completed, Context, Failed, TaskError
from everbeat.errors import ConfigurationError, ResultNotStored
from everbeat.store import retention
from tests.client.working import working
from tests.store.conftest import StoreHarness


def stored(db: StoreHarness, column: str = "result::text") -> list[Any]:
    query = sql.SQL("select {} from {}.tasks").format(sql.SQL(column), sql.Identifier(db.target.schema))  # type: ignore[arg-type]
    return [row[0] for row in db.connection.execute(query)]


def make_older(db: StoreHarness, hours: float) -> None:
    query = sql.SQL("update {}.tasks set completed_at = completed_at - %s * interval '1 hour'")
    db.connection.execute(query.format(sql.Identifier(db.target.schema)), [hours])


async def test_an_ignored_result_is_not_stored_and_reading_it_raises_the_reason(
    app: App, db: StoreHarness
) -> None:
    @app.task(ignore_result=True)
    async def notify(text: str) -> object:
        return object()  # a value that JSON cannot represent

    @app.task(ignore_result=True)
    async def fail() -> None:
        raise TaskError("NO_MAIL")

    async with working(app):
        handle = await notify.asend("hello")
        assert await handle.aoutcome(timeout=30) == Completed(None)
        with pytest.raises(ResultNotStored, match=r"ignore_result=True, so the result was not stored"):
            await handle.aresult()
        with pytest.raises(ResultNotStored):
            await app.handle(handle.id).aresult(timeout=5)
        assert isinstance(await (await fail.asend()).aoutcome(timeout=30), Failed)
    assert set(stored(db)) == {"null", None}


async def test_a_committed_result_is_not_stored_either(app: App, db: StoreHarness, database_url: str) -> None:
    @app.task(ignore_result=True)
    async def settle(ctx: Context) -> int:
        async with (
            await psycopg.AsyncConnection.connect(database_url) as connection,
            ctx.commit(connection) as completion,
        ):
            completion.result = 7
        return 7

    async with working(app):
        assert await (await settle.asend()).aoutcome(timeout=30) == Completed(None)
    assert stored(db) == ["null"]


async def test_a_result_is_removed_after_its_time_and_its_task_stays(app: App, db: StoreHarness) -> None:
    @app.task(keep_result_for="1h")
    async def measure(n: int) -> int:
        return n

    @app.task(keep_result_for="2h")
    async def weigh(n: int) -> int:
        return n

    @app.task
    async def keep(n: int) -> int:
        return n

    async with working(app):
        sent = [await each.asend(number) for number, each in enumerate((measure, weigh, keep))]
        assert [await each.aresult(timeout=30) for each in sent] == [0, 1, 2]
    assert db.run(retention.prune_results(limit=10, after=True)).deleted == {"results": 0}
    make_older(db, 1.5)
    step = db.run(retention.prune_results(limit=10, after=True))
    assert (step.deleted, step.next_after) == ({"results": 1}, None)
    first, second, third = (app.handle(each.id) for each in sent)
    for read in (first.aresult, first.aoutcome):
        with pytest.raises(ResultNotStored, match=r"removed after the keep_result_for of its function"):
            await read(timeout=5)
    assert (await second.aresult(timeout=5), await third.aresult(timeout=5)) == (1, 2)
    info = await first.ainfo()
    assert (info.state, info.result) == ("COMPLETED", None)
    make_older(db, 1)
    assert db.run(retention.prune_results(limit=1, after=True)).next_after is True
    assert db.run(retention.prune_results(limit=1, after=True)).deleted == {"results": 0}
    assert sorted(stored(db), key=str) == ["2", None, None]


async def test_a_result_that_is_not_stored_hides_no_other_outcome_and_no_other_result(
    app: App, db: StoreHarness
) -> None:
    @app.task(keep_result_for="1h")
    async def measure(n: int) -> int:
        return n

    @app.task
    async def keep(n: int) -> int:
        return n

    @app.task(ignore_result=True)
    async def notify() -> None: ...

    async with working(app):
        sent = [await measure.asend(1), await keep.asend(2), await notify.asend()]
        await app.aoutcomes(sent, timeout=30)
    make_older(db, 2)
    db.run(retention.prune_results(limit=10, after=True))
    again = [app.handle(each.id) for each in sent]
    removed, kept, ignored = await app.aoutcomes(again, timeout=5)
    assert isinstance(removed, Failed)
    assert removed.error.code == "RESULT_NOT_STORED"
    assert removed.error.message.startswith(f"Task {sent[0].id} completed, but its result was removed")
    assert (kept, ignored) == (Completed(2), Completed(None))
    assert await asyncio.to_thread(app.outcomes, again, timeout=5) == [removed, kept, ignored]

    again = [app.handle(each.id) for each in sent]
    with pytest.raises(ResultNotStored, match=str(sent[0].id)):
        await app.aresults(again, timeout=5)
    with pytest.raises(ResultNotStored, match=str(sent[2].id)):
        await asyncio.to_thread(app.results, again[1:], timeout=5)
    assert again[1]._seen == Completed(2)


async def test_a_node_of_a_workflow_keeps_its_result(app: App, db: StoreHarness) -> None:
    @app.task(keep_result_for="1h")
    async def measure(n: int) -> int:
        return n

    wf = app.workflow("sizes")
    node = wf.add(measure, 5)
    async with working(app):
        handle = await wf.astart(output=node)
        assert await handle.aresult(timeout=30) == 5
    make_older(db, 2)
    assert db.run(retention.prune_results(limit=10, after=True)).deleted == {"results": 0}


def test_an_invalid_stored_time_removes_nothing(app: App, db: StoreHarness) -> None:
    @app.task(keep_result_for="1h")
    def work() -> int:
        return 1

    handle = work.send()
    (claimed,) = db.claim("w1")
    db.start(claimed)
    query = sql.SQL("update {}.tasks set policy = %s").format(sql.Identifier(db.target.schema))
    db.connection.execute(query, ['{"keep_result_ms": "soon"}'])
    db.settle(claimed, result=b"1")
    make_older(db, 2)
    assert db.run(retention.prune_results(limit=10, after=True)).deleted == {"results": 0}
    assert handle.result(timeout=5) == 1


def test_a_workflow_that_uses_an_ignored_result_is_rejected_when_it_is_built(app: App) -> None:
    @app.task(ignore_result=True)
    def notify(n: int) -> int:
        return n

    @app.task(ignore_result=True)
    def check() -> bool:
        return True

    @app.task
    def add(n: int) -> int:
        return n

    @app.task
    def report(outcome: Completed[int] | Failed) -> None: ...

    @app.task
    def alert(outcome: Completed[None] | Failed) -> None: ...

    wf = app.workflow("order")
    notified = wf.add(notify, 1)
    wf.add(add, notified.result)
    wf.add(add, 1).when(wf.add(check).result)
    wf.map(add, wf.map(notify, [1, 2]).results)
    wf.add(report, notified.outcome)
    with pytest.raises(ConfigurationError) as caught:
        wf.graph(notified)
    codes = [each.code for each in caught.value.problems]
    assert codes.count("RESULT_IGNORED") == 4  # an argument, a condition, the items of a map and the output
    assert (
        codes.count("WRONG_TYPE") >= 1
    )  # the outcome of a node without a result is Completed[None] | Failed
    assert "is used by node 'add'" in str(caught.value)

    wf = app.workflow("order")
    notified = wf.add(notify, 1)
    wf.add(alert, notified.outcome)
    wf.add(add, 2).after(notified)
    assert len(wf.graph().nodes) == 3


def test_ignore_result_contradicts_keep_result_for(app: App) -> None:
    with pytest.raises(ConfigurationError, match=r"keep_result_for .*ignore_result=True stores none"):
        app.task(ignore_result=True, keep_result_for="1h")
