"""Retention deletes old ticks in small steps and keeps the schedules, and the dry run counts what a pass deletes."""

from __future__ import annotations

from datetime import UTC, datetime

from everbeat.store import retention, schedules
from tests.store.conftest import StoreHarness
from tests.store.scheduling import end_worker, put, start_worker, version

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


def add_ticks(db: StoreHarness, count: int, *, hours_ago: int) -> None:
    text = (
        "insert into {schema}.ticks (schedule, at, outcome, reason, decided_at)"
        " select 'hourly', now() - (n + 60 * %(hours)s) * interval '1 minute', 'MISSED', 'LATE', now() - %(hours)s * interval '1 hour'"
        " from generate_series(1, %(count)s) n"
    )
    db.connection.execute(db.plain(text), {"hours": hours_ago, "count": count})


def test_old_ticks_are_deleted_in_steps_and_the_schedule_stays(db: StoreHarness) -> None:
    put(db)
    add_ticks(db, 25, hours_ago=48)
    add_ticks(db, 5, hours_ago=1)
    after: datetime | None = LONG_AGO
    deleted = []
    while after is not None:
        step = db.run(retention.prune_ticks(hours=24, limit=10, after=after))
        deleted.append(step.deleted["ticks"])
        after = step.next_after
    assert deleted == [10, 10, 5]
    assert len(db.run(schedules.list_ticks("hourly", limit=100))) == 5
    assert db.run(schedules.read_schedule("hourly")) is not None


def test_the_dry_run_counts_old_ticks_and_versions(db: StoreHarness) -> None:
    add_ticks(db, 7, hours_ago=48)
    add_ticks(db, 3, hours_ago=1)
    for number in (1, 2):
        start_worker(db, f"a{number}", version(number, "nightly"))
    end_worker(db, "a1", ago_ms=48 * 3_600_000)
    db.connection.execute(
        db.plain("update {schema}.schedule_versions set live_since = now() - interval '3 days'")
    )
    bounds = db.run(retention.task_id_bounds(hours=24))
    found = db.run(retention.count(terminal_hours=24, worker_hours=24, beat_hours=24, bounds=bounds))
    assert (found.ticks, found.schedule_versions, found.workers) == (7, 1, 1)
    kept = db.run(retention.count(terminal_hours=None, worker_hours=None, beat_hours=None, bounds=bounds))
    assert (kept.ticks, kept.schedule_versions) == (0, 0)
