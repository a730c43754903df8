"""The table of labels: the trigger that fills it, and what retention deletes from it."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID, uuid4

from everbeat.config import RecoveryConfig
from everbeat.maintenance.cleanup import prune
from everbeat.runtime.clock import SystemClock
from everbeat.store import history, inspection, retention
from everbeat.store.history import HistoryPart
from everbeat.store.session import Session
from tests.maintenance.moving import ids_in, move
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, task

LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
TENANT = '{"tenant": "42"}'
ENDED = "update {schema}.tasks set completed_at = now() - interval '2 days' where state = 'COMPLETED'"


def labelled(db: StoreHarness) -> list[tuple[str, str, UUID]]:
    return sorted(db.table("labels", "key, value, id"))


def found(db: StoreHarness, *, latest: bool = False) -> list[UUID]:
    query = inspection.TaskQuery(labels={"tenant": "42"}, rarest=("tenant", "42"), latest=latest)
    return [each.id for each in db.run(inspection.list_tasks(query, limit=50))]


def done(db: StoreHarness, labels: str = TENANT) -> UUID:
    running = db.running(labels=labels)
    assert db.complete(running)
    db.connection.execute(db.plain(ENDED))
    return running.id


def execute(db: StoreHarness, text: str, *values: Any) -> None:
    db.connection.execute(db.plain(text), values)


def prune_all(db: StoreHarness) -> None:
    """Run a whole pass of retention. Random ids of tests sort after all ids of today, like ids from the future."""

    async def run() -> None:
        session = Session(db.target, "everbeat test retention")
        try:
            await prune(session, RecoveryConfig(), clock=SystemClock())
        finally:
            await session.drop()

    asyncio.run(run())


def prune_strays(db: StoreHarness, *, limit: int = 2) -> int:
    """Delete the labels that belong to nothing, and return how many steps it took."""
    after: UUID | None = LOWEST
    steps = 0
    while after is not None:
        after = db.run(retention.prune_stray_labels(limit=limit, after=after, until=HIGHEST)).next_after
        steps += 1
    return steps


def test_a_task_without_labels_adds_no_row(db: StoreHarness) -> None:
    db.send()
    assert labelled(db) == []


def test_a_repeated_send_adds_its_labels_once(db: StoreHarness) -> None:
    task_id = uuid4()
    for _ in range(2):
        execute(
            db,
            "insert into {schema}.tasks (id, name, queue, args, labels) values (%s, 'work', 'default', '{{}}', %s)"
            " on conflict do nothing",
            task_id,
            '{"a": "1", "b": "2"}',
        )
    assert labelled(db) == [("a", "1", task_id), ("b", "2", task_id)]


def test_labels_follow_a_task_to_the_history_and_back(db: StoreHarness) -> None:
    running = db.running(labels=TENANT)
    db.settle(running, "FAILED", error=b'{"code": "BROKEN", "message": "no"}')
    execute(db, "update {schema}.tasks set failed_at = now() - interval '2 h'")
    before = labelled(db)
    assert before == [("tenant", "42", running.id)]
    assert move(db) == 1
    assert ids_in(db, "history") == {running.id}
    assert labelled(db) == before
    prune_strays(db)  # the task is in the history, so its labels stay
    assert labelled(db) == before
    assert found(db) == [running.id]
    (summary,) = db.run(inspection.tasks(limit=5))
    assert summary.labels == {"tenant": "42"}
    assert db.database.transact(lambda run: run(history.recall_task(running.id))) == 1
    assert labelled(db) == before
    assert db.row(running.id, "labels") == {"tenant": "42"}


def test_pruning_a_task_deletes_its_labels(db: StoreHarness) -> None:
    gone, kept = done(db), db.send(labels=TENANT)
    assert {row[2] for row in labelled(db)} == {kept, gone}
    step = db.run(retention.prune_tasks(hours=24, limit=10, after=LOWEST, until=HIGHEST))
    assert step.deleted["tasks"] == 1
    assert labelled(db) == [("tenant", "42", kept)]


def test_pruning_a_workflow_deletes_its_labels_and_later_those_of_its_tasks(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("a")], labels=TENANT)
    flow.play(lambda _: 1)
    assert len(labelled(db)) == 2
    execute(db, ENDED)
    execute(db, "update {schema}.workflows set ended_at = now() - interval '2 days'")
    bounds = {"hours": 24, "limit": 10, "after": LOWEST, "until": HIGHEST}
    assert db.run(retention.prune_workflows(**bounds)).deleted["workflows"] == 1  # type: ignore[arg-type]
    assert [row[2] for row in labelled(db)] == sorted(ids_in(db, "tasks"))
    assert db.run(retention.prune_tasks(**bounds)).deleted["tasks"] == 1  # type: ignore[arg-type]
    assert labelled(db) == []


def parts(db: StoreHarness) -> list[HistoryPart]:
    return [HistoryPart(*row) for row in db.table("history_parts", "name, since, until")]


def test_pruning_a_partition_task_by_task_deletes_the_labels(db: StoreHarness) -> None:
    gone, kept = done(db), db.send(labels=TENANT)
    assert move(db) == 1
    (part,) = [each for each in parts(db) if ids_in(db, each.name)]
    assert {row[2] for row in labelled(db)} == {gone, kept}
    assert db.run(history.prune_part(part, limit=10, after=LOWEST)).deleted["tasks"] == 1
    assert labelled(db) == [("tenant", "42", kept)]


def test_labels_of_a_dropped_partition_are_not_found_and_are_deleted_in_steps(db: StoreHarness) -> None:
    gone = [done(db) for _ in range(5)]
    kept = db.send(labels=TENANT)
    flow = Flow.start(db, [task("a")], labels=TENANT)
    execute(
        db,
        "update {schema}.tasks set completed_at = now() - interval '3 days' where completed_at is not null",
    )
    assert move(db) == 5
    (part,) = [each for each in parts(db) if ids_in(db, each.name)]
    assert db.run(history.drop_part(part.name, hours=24)) == "dropped"
    assert {row[2] for row in labelled(db)} == {*gone, kept, flow.id}
    assert found(db) == [kept]
    assert found(db, latest=True) == [kept]
    # Of the rows with a smaller id, a step examines two.
    assert prune_strays(db, limit=2) == 4
    assert {row[2] for row in labelled(db)} == {kept, flow.id}


def test_labels_that_code_of_an_earlier_version_leaves_behind_are_deleted(db: StoreHarness) -> None:
    kept, gone = db.send(labels=TENANT), db.send(labels='{"a": "1", "b": "2", "tenant": "42"}')
    execute(db, "delete from {schema}.tasks where id = %s", gone)
    assert prune_strays(db, limit=10) == 1
    assert labelled(db) == [("tenant", "42", kept)]


def test_a_retention_pass_deletes_the_labels_that_belong_to_nothing(db: StoreHarness) -> None:
    done(db)
    execute(db, "delete from {schema}.tasks")
    prune_all(db)
    assert labelled(db) == []


def test_a_foreign_row_with_unusual_labels_can_be_inserted_and_read(db: StoreHarness) -> None:
    long = "k" * 3000
    for value in ("[1, 2]", '"text"', '{"a": 1, "b": null, "c": {"d": 2}}', f'{{"{long}": "1"}}', "null"):
        execute(
            db,
            "insert into {schema}.tasks (id, name, queue, args, labels) values (%s, 'work', 'default', '{{}}', %s)",
            uuid4(),
            value,
        )
    read = [dict(each.labels) for each in db.run(inspection.tasks(limit=10))]
    assert sorted(read, key=len) == [{}] * 4 + [{long: "1"}]
    assert {(key, value) for key, value, _ in labelled(db)} == {("a", "1"), ("c", '{"d": 2}')}
    execute(db, "delete from {schema}.tasks")  # they break the invariant of labels
