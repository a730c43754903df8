"""A dry run of retention reports what a real run deletes: live and moved tasks, partitions, and workflows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from random import Random
from uuid import UUID, uuid4

import pytest

from everbeat.config import RecoveryConfig
from everbeat.domain.identifiers import uuid7
from everbeat.maintenance.cleanup import prune
from everbeat.maintenance.counting import MOST_COUNTED, count_old
from everbeat.store import history
from tests.maintenance.pruning import beat_and_snapshot, ended, holder
from tests.maintenance.test_history_retention import DAYS, await_moved
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness
from tests.store.test_history_plans import FILL


def a_workflow(
    db: StoreHarness, *, hours: float | None, task_hours: float, parent: UUID | None = None
) -> UUID:
    """Insert a workflow with one node, whose task ended before the workflow did. With `hours=None`, the workflow is running."""
    at = datetime.now(UTC) - timedelta(hours=task_hours + 2)
    flow = uuid7(unix_ms=round(at.timestamp() * 1_000), random=Random(uuid4().int).randbytes(10))
    db.connection.execute(
        db.plain(
            "insert into {schema}.workflows (id, name, state, on_error, node_count, ended_at, parent_id, parent_node)"
            " values (%(id)s, 'w', case when %(h)s::float8 is null then 'RUNNING' else 'FAILED' end, 'fail', 1,"
            " now() - %(h)s::float8 * interval '1 h', %(parent)s, case when %(parent)s::uuid is not null then 0 end)"
        ),
        {"id": flow, "h": hours, "parent": parent},
    )
    db.connection.execute(
        db.plain("update {schema}.tasks set workflow_id = %s, node = 0 where id = %s"),
        [flow, ended(db, hours=task_hours, state="FAILED")],
    )
    return flow


def fill(db: StoreHarness) -> None:
    """Insert rows of every type: in `tasks`, in partitions that are dropped, and in one that is kept for a workflow."""
    for days in (3, 4, 6, 6.5, 7, 8):
        ended(db, hours=days * DAYS)
    a_workflow(db, hours=5.5 * DAYS, task_hours=8 * DAYS)
    a_workflow(db, hours=2 * DAYS, task_hours=7 * DAYS)
    live = a_workflow(db, hours=None, task_hours=7 * DAYS)
    a_workflow(db, hours=6 * DAYS, task_hours=6.5 * DAYS, parent=live)
    assert await_moved(db) > 6
    for days in (1, 5, 8):
        ended(db, hours=days * DAYS)
    a_workflow(db, hours=6 * DAYS, task_hours=7 * DAYS)
    db.send()
    db.running()
    holder(db, "s9", hours=9 * DAYS)
    beat_and_snapshot(db, hours=9 * DAYS)


@pytest.mark.parametrize("days", [2.5, 4, 5, 6, 30, None])
async def test_a_dry_run_reports_the_numbers_of_the_real_run(
    observer: ManualObserver, db: StoreHarness, days: float | None
) -> None:  # H1
    fill(db)
    config = RecoveryConfig(
        terminal_record_retention_hours=None if days is None else round(days * DAYS),
        worker_state_retention_hours=8 * DAYS,
        heartbeat_retention_hours=8 * DAYS,
    )
    counted = await count_old(observer.session, config)
    assert await prune(observer.session, config, clock=observer.clock) == counted
    if days == 5:
        assert (counted.workflows, counted.at_least) == (2, ())
        assert counted.history_parts >= 1
        assert counted.tasks >= 5
    if days is None or days == 30:
        assert (counted.history_parts, counted.tasks) == (0, 0)
    again = await count_old(observer.session, config)
    assert again.total == 0


async def test_counts_of_a_big_partition_are_marked_as_incomplete_and_agree(
    observer: ManualObserver, db: StoreHarness
) -> None:
    since = (datetime.now(UTC) - timedelta(days=6)).replace(hour=0, minute=0, second=0, microsecond=0)
    db.run(history.add_part(since, unit="day"))
    db.connection.execute(db.plain(FILL), {"rows": MOST_COUNTED + 500, "since": since})
    config = RecoveryConfig(terminal_record_retention_hours=3 * DAYS)
    counted = await count_old(observer.session, config)
    assert (counted.history_parts, counted.tasks, counted.attempts) == (1, MOST_COUNTED, MOST_COUNTED)
    assert counted.at_least == ("tasks", "attempts", "recoveries", "steps", "signals")
    assert await prune(observer.session, config, clock=observer.clock) == counted
    assert db.table("history", "id") == []


async def test_a_partition_that_is_kept_for_a_workflow_is_counted_completely(
    observer: ManualObserver, db: StoreHarness
) -> None:
    since = (datetime.now(UTC) - timedelta(days=6)).replace(hour=0, minute=0, second=0, microsecond=0)
    db.run(history.add_part(since, unit="day"))
    db.connection.execute(db.plain(FILL), {"rows": MOST_COUNTED + 500, "since": since})
    (one,) = db.connection.execute(db.plain("select id from {schema}.history limit 1")).fetchall()
    db.connection.execute(
        db.plain(
            "with flow as (insert into {schema}.workflows (id, name, state, on_error, node_count)"
            " values (%s, 'w', 'RUNNING', 'fail', 1) returning id)"
            " update {schema}.history set workflow_id = (select id from flow), node = 0 where id = %s"
        ),
        [uuid4(), one[0]],
    )
    config = RecoveryConfig(terminal_record_retention_hours=3 * DAYS)
    counted = await count_old(observer.session, config)
    assert (counted.history_parts, counted.tasks, counted.at_least) == (0, MOST_COUNTED + 499, ())
    assert await prune(observer.session, config, clock=observer.clock) == counted
    assert db.table("history", "id") == [one]
