"""Test batches through the app: both forms of each method, mistakes, and the stored rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest

from everbeat import App, Call, WaitTimeout
from everbeat.client import batches
from everbeat.errors import BatchNotFound, BatchSealed, ConfigurationError, PayloadError
from everbeat.runtime.clock import SystemClock
from tests.client.conftest import app, db
from tests.store.conftest import StoreHarness

__all__ = ["app", "db"]


async def test_the_async_methods_of_a_batch_do_the_same_as_the_others(app: App) -> None:
    @app.task
    async def load(row: int) -> int:
        return row

    async with app.batch("import", on_end=load.call(9)) as batch:
        first = await batch.asend(load.call(1))
        more = await batch.asend_many(load.call(row) for row in range(2_500))
        assert len({first.id, *(each.id for each in more)}) == 2_501
        assert (await batch.astatus()).total == 2_501
    found = await batch.astatus()
    assert (found.sealed, found.ended, found.state) == (True, False, "SEALED")
    assert [each.id for each in await app.alist_batches(live=True)] == [batch.id]
    with pytest.raises(BatchSealed):
        await batch.asend(load.call(1))
    with pytest.raises(WaitTimeout, match="Batch"):
        await batch.await_end(timeout=0.2)
    assert (await app.open_batch(str(batch.id)).acancel()).cancelled == 2_501
    await batch.aseal()


def test_the_tasks_of_a_batch_are_listed_and_know_their_batch(app: App) -> None:
    @app.task(labels={"team": "data"})
    async def load(row: int) -> int:
        return row

    with app.batch("import") as batch:
        sent = batch.send_many(load.call(row) for row in range(5))
    other = load.send(9)
    assert [each.info().batch_id for each in (sent[0], other)] == [batch.id, None]
    for filters in ({}, {"labels": {"team": "data"}}, {"state": "PENDING"}):
        for order in ("sent", "happened"):
            found = app.list_tasks(batch=batch.id, order=order, **filters)  # type: ignore[arg-type]
            assert {each.id for each in found} == {each.id for each in sent}
            assert found.unindexed == (("batch",) if "labels" in filters else ())
    assert app.cancel_all(batch=str(batch.id), dry_run=True).info.done == 5
    assert app.list_tasks(batch=uuid4()) == []
    with pytest.raises(ConfigurationError, match="batch = 'import'"):
        app.list_tasks(batch="import")


def test_lists_are_pages_of_batches_newest_first(app: App) -> None:
    made = [app.batch(f"number {number}").open() for number in range(3)]
    newest = app.list_batches(limit=2)
    assert [each.name for each in newest] == ["number 2", "number 1"]
    assert [each.id for each in app.list_batches(before=newest[-1].id)] == [made[0].id]


def test_unknown_batches_and_invalid_arguments_are_refused(app: App) -> None:
    @app.task
    async def load(row: int) -> int:
        return row

    unknown = app.open_batch(uuid4())
    for call in (unknown.status, unknown.seal, unknown.cancel, lambda: unknown.send(load.call(1))):
        with pytest.raises(BatchNotFound, match="never opened"):
            call()
    with pytest.raises(ConfigurationError, match=r"batch\.name"):
        app.batch("")
    with pytest.raises(PayloadError, match="has a key"):
        app.batch("import", on_end=load.with_options(key="k").call(1))
    with pytest.raises(PayloadError, match="cannot be the on_success of a batch: it is not a call of a task"):
        app.batch("import", on_success=load)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="a task of a batch"), app.batch("import") as batch:
        batch.send(load.with_options(key="k", unique_for="kept").call(1))
    with pytest.raises(PayloadError, match="transaction of a connection"), app.batch("import") as batch:
        batch.send(load.with_options(connection=object()).call(1))


async def test_an_error_names_the_position_of_a_wrong_entry_beyond_the_first_statement(app: App) -> None:
    @app.task
    async def load(row: int) -> int:
        return row

    calls = [*(load.call(row) for row in range(1_500)), 5]
    batch = await app.batch("import").aopen()
    with pytest.raises(PayloadError, match="Entry 1500 of the calls"):
        await asyncio.to_thread(batch.send_many, calls)  # type: ignore[arg-type]
    with pytest.raises(PayloadError, match="Entry 1500 of the calls"):
        await batch.asend_many(calls)  # type: ignore[arg-type]

    async def arriving() -> AsyncIterator[Any]:
        for call in calls:
            yield call

    with pytest.raises(PayloadError, match="Entry 1500 of the calls"):
        await batch.asend_many(arriving())
    assert (await batch.astatus()).total == 3_000, "the earlier statements are stored"


def test_a_call_whose_key_is_taken_adds_nothing_to_the_batch(app: App) -> None:
    @app.task
    async def load(row: int) -> int:
        return row

    known = load.with_options(key="k").send(1)
    with app.batch("import") as batch:
        handle = batch.send(load.with_options(key="k").call(1))
    assert (handle.id, handle.existed) == (known.id, True)
    assert batch.status().total == 0


def test_many_tasks_are_stored_fast(app: App) -> None:
    """A batch of 100,000 tasks should be cheap; a tenth of it is enough to see a cost for each task."""

    @app.task
    async def load(row: int) -> int:
        return row

    began = SystemClock().monotonic()
    with app.batch("import") as batch:
        batch.send_many(load.call(row) for row in range(10_000))
    took_s = SystemClock().monotonic() - began
    print(f"10,000 tasks of a batch in {took_s:.2f} s")
    assert batch.status().total == 10_000
    assert took_s < 20


async def test_calls_with_large_arguments_are_stored_by_several_statements(
    app: App, db: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first 1,000 calls can take a gigabyte of arguments, which no statement can store."""

    @app.task
    async def load(text: str) -> None: ...

    monkeypatch.setattr(batches, "SENT_BYTES", 1_000)
    calls = [load.call("x" * 400) for _ in range(8)]
    by_thread, by_loop = app.batch("import"), app.batch("import")
    assert len(await asyncio.to_thread(lambda: by_thread.open().send_many(each for each in calls))) == 8
    await by_loop.aopen()
    assert len(await by_loop.asend_many(calls)) == 8

    async def later() -> AsyncIterator[Call[None]]:
        for each in calls:
            yield each

    assert len(await by_loop.asend_many(later())) == 8
    noted = db.table("batch_events", "batch_id, number")
    assert sorted(number for batch_id, number in noted if batch_id == by_thread.id) == [2, 3, 3]
    assert sorted(number for batch_id, number in noted if batch_id == by_loop.id) == [2, 2, 3, 3, 3, 3]
