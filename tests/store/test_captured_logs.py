"""Captured logs in the database: absolute parts of one claim each, bounded reads, and retention by age and with the task."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from everbeat.domain.task.captured_log import LogLine, UnwrittenPart
from everbeat.store import attempt_logs, leases, retention
from everbeat.store.attempt_logs import LogPlace
from everbeat.store.claims import Claimed
from tests.store.conftest import StoreHarness

LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
AT = datetime(2030, 1, 1, tzinfo=UTC)


def part(number: int, first: int, last: int, text: str = "line") -> UnwrittenPart:
    lines = [LogLine(each, AT, "INFO", "shop", f"{text} {each}") for each in range(first, last + 1)]
    return UnwrittenPart(number, lines)


def place(held: Claimed, attempt: int = 1) -> LogPlace:
    return LogPlace(held.id, attempt, held.claim_id)


def write(db: StoreHarness, held: Claimed, *parts: UnwrittenPart, attempt: int = 1) -> None:
    db.run(attempt_logs.write_parts([(place(held, attempt), each) for each in parts]))


def stored(db: StoreHarness, task_id: UUID, after: int = 0) -> dict[int, list[tuple[int, int]]]:
    """Return the numbers of the parts by attempt, as a reader sees them."""
    return {
        each.attempt: [
            (one.first, one.last) for one in db.run(attempt_logs.list_parts(task_id, each, after=after))
        ]
        for each in db.run(attempt_logs.list_logs(task_id))
    }


def test_a_repeated_or_late_part_never_replaces_a_newer_state(db: StoreHarness) -> None:
    held = db.running()
    write(db, held, part(0, 1, 5))
    write(db, held, part(0, 1, 8), part(1, 9, 9))
    before = db.table("attempt_logs", "part, first, last, lines::text, written_at")
    write(db, held, part(0, 1, 5), part(1, 9, 9, "other"))
    assert db.table("attempt_logs", "part, first, last, lines::text, written_at") == before
    assert stored(db, held.id) == {1: [(1, 8), (9, 9)]}
    write(db, held, part(1, 30, 31))
    write(db, held, part(1, 9, 20))
    assert stored(db, held.id) == {1: [(1, 8), (30, 31)]}
    assert stored(db, held.id, after=8) == {1: [(30, 31)]}


def test_a_claim_writes_only_its_own_log_also_after_it_lost_the_task(db: StoreHarness) -> None:  # I2
    held = db.running()
    write(db, held, part(0, 1, 2, "mine"))
    settled = leases.Settlement(
        id=held.id, claim_id=held.claim_id, outcome="FAILED", error=b'{"code": "X"}', retry_in_ms=0
    )
    db.run(leases.settle([settled], channel=db.target.channel))
    (again,) = db.claim("w2", limit=1)
    assert db.start(again) == ["started"]
    write(db, again, part(0, 1, 3, "other"), attempt=2)
    row = db.row(held.id, "xmin::text, state, attempt, claim_id")
    write(db, held, part(0, 1, 9, "zombie"))
    assert db.row(held.id, "xmin::text, state, attempt, claim_id") == row
    assert stored(db, held.id) == {2: [(1, 3)], 1: [(1, 9)]}
    # A failover that lost a commit can give the same attempt number to two claims.
    db.run(attempt_logs.write_parts([(LogPlace(held.id, 1, uuid4()), part(0, 1, 1))]))
    assert [each.attempt for each in db.run(attempt_logs.list_logs(held.id))] == [2, 1, 1]
    assert [each.last for each in db.run(attempt_logs.list_logs(held.id, attempt=1))] in ([9, 1], [1, 9])
    assert db.run(attempt_logs.list_logs(held.id, attempt=3)) == []


def test_only_the_newest_logs_are_listed(db: StoreHarness) -> None:
    held = db.running()
    for attempt in range(1, 31):
        write(db, held, part(0, 1, attempt), attempt=attempt)
    found = db.run(attempt_logs.list_logs(held.id))
    assert [(each.attempt, each.last) for each in found] == [(n, n) for n in range(30, 10, -1)]


def test_the_log_of_a_task_that_was_deleted_is_not_stored(db: StoreHarness) -> None:
    held, kept = db.running(), db.running()
    db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [held.id])
    db.run(attempt_logs.write_parts([(place(held), part(0, 1, 1)), (place(kept), part(0, 1, 1))]))
    assert (stored(db, held.id), stored(db, kept.id)) == ({}, {1: [(1, 1)]})


def prune(db: StoreHarness, *, hours: int = 10, limit: int = 1_000) -> int:
    after: Any = LOWEST
    steps = 0
    while after is not None:
        after = db.run(retention.prune_logs(hours=hours, limit=limit, after=after, until=HIGHEST)).next_after
        steps += 1
        assert steps < 100
    return steps


def test_retention_deletes_old_logs_and_those_of_deleted_tasks_in_small_steps(db: StoreHarness) -> None:
    old, fresh, deleted = (db.running() for _ in range(3))
    for held in (old, fresh, deleted):
        write(db, held, *(part(n, 10 * n + 1, 10 * n + 9) for n in range(7)))
    age = "update {schema}.attempt_logs set written_at = written_at - interval '11 hours' where task_id = %s or (task_id = %s and part < 2)"
    db.connection.execute(db.plain(age), [old.id, fresh.id])
    db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [deleted.id])
    assert prune(db, limit=4) == 5
    left = db.table("attempt_logs", "task_id, part")
    assert sorted(left) == sorted((fresh.id, n) for n in range(2, 7))
    assert prune(db) == 1


def test_pruning_walks_past_any_number_of_tasks_that_are_kept(db: StoreHarness) -> None:
    fill = """insert into {schema}.attempt_logs (task_id, attempt, claim_id, part, first, last, lines)
              select gen_random_uuid(), 1, gen_random_uuid(), 0, 1, 1, '[]' from generate_series(1, 250)"""
    db.connection.execute(db.plain(fill))
    copy = "insert into {schema}.tasks (id, name, queue, priority, args) select l.task_id, %s, %s, 0, %s::json from {schema}.attempt_logs l"
    db.connection.execute(db.plain(copy), ["n", "q", "{}"])
    for stray in (UUID(int=1), UUID(int=(1 << 128) - 2)):
        one = "insert into {schema}.attempt_logs (task_id, attempt, claim_id, part, first, last, lines) values (%s, 1, %s, 0, 1, 1, '[]')"
        db.connection.execute(db.plain(one), [stray, stray])
    assert prune(db) == 3
    assert db.table("attempt_logs", "count(*)") == [(250,)]
