"""Retention deletes idle lines and gates, and no task is lost by it."""

from __future__ import annotations

from everbeat.store import lines
from tests.maintenance.pruning import a_pruner
from tests.recovering.conftest import ManualObserver, StoreHarness

NOTHING = {
    "heartbeat_retention_hours": None,
    "worker_state_retention_hours": None,
    "terminal_record_retention_hours": None,
}
AGE = "update {schema}.lines set turn = now() - interval '2 hours'"
AGE_GATES = "update {schema}.gates set used_at = now() - interval '2 days'"


def send(db: StoreHarness, gate: str) -> None:
    text = "insert into {schema}.tasks (id, name, queue, args, gates) values (gen_random_uuid(), 'work', 'default', '{{}}', array[%s])"
    db.connection.execute(db.plain(text), [gate])


def counts(db: StoreHarness) -> tuple[int, int]:
    return len(db.table("lines", "line")), len(db.table("gates", "gate"))


def age(db: StoreHarness) -> None:
    db.connection.execute(db.plain(AGE))
    db.connection.execute(db.plain(AGE_GATES))


async def test_idle_lines_and_gates_are_deleted_even_if_all_records_are_kept(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.supervisor("s1", "w1")
    send(db, "tenant/a")
    db.send(serial="key:a")
    held = db.claim("w1", limit=10, starts=10)
    assert len(held) == 2
    age(db)
    await a_pruner(observer, retention_interval_ms=60_000, **NOTHING).tick()
    assert counts(db) == (2, 1), "their tasks are running"
    for one in held:
        db.settle(one)
    db.run(lines.apply_changes(readers=["work"], queues=None, channel=None))
    age(db)
    db.connection.execute(db.plain("update {schema}.turns set taken_until = now() - interval '1 second'"))
    await a_pruner(observer, retention_interval_ms=60_000, **NOTHING).tick()
    assert counts(db) == (0, 0)


async def test_tasks_that_are_sent_while_lines_are_deleted_are_claimed(
    observer: ManualObserver, db: StoreHarness
) -> None:
    """The change of a line is noted before its row is deleted. The next claim creates the line again."""
    db.supervisor("s1", "w1")
    send(db, "tenant/a")
    (first,) = db.claim("w1", limit=10, starts=10)
    db.settle(first)
    db.run(lines.apply_changes(readers=["work"], queues=None, channel=None))
    age(db)
    db.connection.execute(db.plain("delete from {schema}.lines"))
    db.connection.execute(db.plain("delete from {schema}.gates"))
    send(db, "tenant/a")
    await a_pruner(observer, retention_interval_ms=60_000, **NOTHING).tick()
    assert len(db.claim("w1", limit=10, starts=10)) == 1
