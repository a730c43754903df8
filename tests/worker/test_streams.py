"""Items that code emits reach the database: through outages, lost replies, retries, sleeps and commits, and up to the limit."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from everbeat.domain.task import streams
from tests.worker import sample_streams
from tests.worker.harness import WorkerHarness
from tests.worker.proxy import Proxy, statement_marker
from tests.worker.sample_tasks import gate

assert sample_streams.AGAIN


def stored(harness: WorkerHarness, task_id: UUID, columns: str = "number, value") -> list[tuple[Any, ...]]:
    query = f"select {columns} from {{schema}}.stream_items where task_id = %s order by name, number"
    return [tuple(row.values()) for row in harness.query(query, task_id)]


async def test_code_waits_while_the_database_is_away_and_all_items_are_stored_after_it(
    harness: WorkerHarness,
) -> None:
    async with Proxy.before(harness.target) as proxy:
        straight, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send("emit_when_told", items=3_000)
                await running.until(lambda: gate.journal == ["waits"] and bool(stored(harness, task_id)))
                proxy.cut()
                gate.opened.set()
                await running.until(lambda: len(gate.journal) >= 990)
                await asyncio.sleep(1.5)  # longer than the patience of one call
                assert len(gate.journal) <= streams.UNSTORED_ITEMS, "the code waits for the database"
                proxy.mend()
                row = await running.finished(task_id)
        finally:
            harness.target = straight
    assert (row["state"], row["attempt"]) == ("COMPLETED", 1)
    assert stored(harness, task_id) == [(n + 1, n) for n in range(3_000)]


async def test_a_portion_whose_reply_is_lost_is_stored_once(harness: WorkerHarness) -> None:
    async with Proxy.before(harness.target) as proxy:
        straight, harness.target = harness.target, proxy.target
        try:
            async with harness.worker() as running:
                task_id = harness.send("emit_when_told", items=20)
                await running.until(lambda: gate.journal == ["waits"] and bool(stored(harness, task_id)))
                proxy.lose_reply(statement_marker("stream/insert_items"))
                gate.opened.set()
                row = await running.finished(task_id)
                assert proxy.lost == 1
        finally:
            harness.target = straight
    assert row["state"] == "COMPLETED"
    assert stored(harness, task_id) == [(n + 1, n) for n in range(20)]


async def test_later_attempts_continue_the_numbers(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("emit_in_three_attempts")
        await running.until(lambda: harness.task(task_id)["state"] == "COMPLETED")
    assert harness.task(task_id)["result"] == 10
    found = stored(harness, task_id, "name, number, value, attempt")
    assert found == [
        *(("attempts", n + 1, n // 3 + 1, n // 3 + 1) for n in range(9)),
        ("attempts", 10, "last", 3),
        *((f"only {n}", 1, None, n) for n in (1, 2, 3)),
    ]


async def test_a_suspended_task_has_its_items_and_continues_them(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("emit_and_sleep")
        await running.until(lambda: harness.task(task_id)["wake_at"] is not None)
        await running.until(lambda: harness.task(task_id)["state"] == "PENDING")
        assert stored(harness, task_id) == [(1, 1)]
        await running.until(lambda: harness.task(task_id)["state"] == "COMPLETED")
    assert stored(harness, task_id, "number, value, attempt") == [(1, 1, 1), (2, 2, 2), (3, 2, 2)]


@pytest.mark.parametrize("level", ["READ_COMMITTED", "SERIALIZABLE"])
async def test_items_are_stored_beside_a_transaction_of_the_code_and_before_its_commit(
    harness: WorkerHarness, level: str
) -> None:
    async with harness.worker() as running:
        task_id = harness.send("emit_and_commit", url=harness.target.url, level=level)
        row = await running.finished(task_id)
    assert (row["state"], row["result"]) == ("COMPLETED", "committed")
    assert stored(harness, task_id) == [(1, "before"), (2, "inside"), (3, "at the end")]


async def test_a_task_with_an_item_that_the_database_refuses_fails_and_its_neighbours_complete(
    harness: WorkerHarness,
) -> None:
    table = f'"{harness.target.schema}".stream_items'
    harness.connection.execute(
        f"alter table {table} add constraint no_bad check (1 / (value::text <> '\"bad\"')::integer = 1)"  # type: ignore[arg-type]
    )
    gate.opened.set()
    async with harness.worker() as running:
        bad, good = harness.send("emit_bad"), harness.send("emit_when_told", items=600)
        await running.until(
            lambda: {harness.task(each)["state"] for each in (bad, good)} <= {"FAILED", "COMPLETED"}
        )
    assert harness.task(good)["state"] == "COMPLETED"
    assert len(stored(harness, good)) == 600
    row = harness.task(bad)
    assert (row["state"], row["error"]["code"]) == ("FAILED", "RESULT_UNSERIALISABLE")
    assert "PostgreSQL cannot store an item of its streams" in row["error"]["message"]


async def test_wrong_names_and_values_are_refused_with_a_reason(harness: WorkerHarness) -> None:
    async with harness.worker() as running:
        task_id = harness.send("emit_wrongly")
        row = await running.finished(task_id)
    name, changed, large, blocking = row["result"]
    assert "The name 'a/b' of a stream of task 'emit_wrongly'" in name
    assert "The item of stream 'values' of task 'emit_wrongly'" in changed
    assert "takes 1,048,579 bytes of JSON; at most 1,048,576 are stored" in large
    assert "await Context.aemit(...)" in blocking
    assert stored(harness, task_id) == []


async def test_a_task_that_emits_too_many_items_gets_an_error(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "MOST_STREAM_ITEMS", 5)
    async with harness.worker() as running:
        task_id = harness.send("emit_until_full")
        row = await running.finished(task_id)
    assert row["result"][:2] == [5, "StreamFull"]
    assert "the task has emitted 5 items, the most that one task can" in row["result"][2]
    assert len(stored(harness, task_id)) == 5
