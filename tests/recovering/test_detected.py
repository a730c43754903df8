"""Test the events before a recovery: how many tasks were found, and by which means."""

from __future__ import annotations

import subprocess
import sys
from typing import TypeVar

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.recovering.notice.stall import BlockedLoopWatch
from everbeat.recovering.notice.startup import ReconciliationComplete
from everbeat.recovering.recoverer import NAMED, OrphanedTasksDetected, StaleTasksDetected
from everbeat.recovering.sweep import release
from everbeat.runtime.events import Event, TaskRecovered
from tests.recovering.conftest import ManualObserver, StoreHarness, sweep
from tests.recovering.notice.test_age import FAST, look
from tests.recovering.notice.test_stall import LocalSupervisor, LocalWorker
from tests.recovering.notice.test_startup import neighbour, reconcile
from tests.recovering.test_recovery import KILLED, bury
from tests.recovering.test_sweep import silence

K = TypeVar("K", bound=Event)
TOLD = (OrphanedTasksDetected, StaleTasksDetected, TaskRecovered, ReconciliationComplete)


def told(observer: ManualObserver) -> list[str]:
    """Return the kinds of the emitted events, in order."""
    return [type(event).__name__ for event in observer.seen if isinstance(event, TOLD)]


def only(observer: ManualObserver, kind: type[K]) -> K:
    (event,) = [event for event in observer.seen if isinstance(event, kind)]
    return event


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_orphaned_tasks_found_at_the_start_are_reported_before_their_recovery(
    observer: ManualObserver, db: StoreHarness
) -> None:  # N10
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    neighbour(db, "dead", pid=process.pid, process_started=1)
    held = {db.running("dead-w").id for _ in range(2)}
    await reconcile(observer)
    orphaned = only(observer, OrphanedTasksDetected)
    assert (orphaned.count, set(orphaned.task_ids)) == (2, held)
    assert only(observer, ReconciliationComplete).orphaned_count == 2
    assert told(observer) == [
        "OrphanedTasksDetected", "TaskRecovered", "TaskRecovered", "ReconciliationComplete",
    ]  # fmt: skip


async def test_a_start_without_orphaned_tasks_reports_a_complete_reconciliation(
    observer: ManualObserver,
) -> None:  # N10
    await reconcile(observer)
    assert observer.seen == [ReconciliationComplete(orphaned_count=0)]


async def test_tasks_found_by_age_are_reported_as_stale(
    observer: ManualObserver, db: StoreHarness
) -> None:  # N10
    running = db.running()
    reaper = observer.reaper(**FAST)
    for after_s in (1.0, 1.0, 0.99):
        await look(observer, reaper, after_s=after_s)
    assert told(observer) == []
    await look(observer, reaper, after_s=0.02)
    assert only(observer, StaleTasksDetected) == StaleTasksDetected(count=1, task_ids=(running.id,))
    assert told(observer) == ["StaleTasksDetected", "TaskRecovered"]


async def test_tasks_found_by_a_sweep_are_reported_as_stale_with_the_first_ids(
    observer: ManualObserver, db: StoreHarness
) -> None:  # N10
    held = [db.running().id for _ in range(NAMED + 2)]
    silence(db, "s1", 6)
    await sweep(observer.recoverer(), dry_run=True)
    assert told(observer) == [], "a dry run recovers nothing"
    await sweep(observer.recoverer())
    stale = only(observer, StaleTasksDetected)
    assert (stale.count, len(stale.task_ids), set(stale.task_ids) <= set(held)) == (NAMED + 2, NAMED, True)


async def test_stalled_tasks_are_reported_as_stale(observer: ManualObserver, db: StoreHarness) -> None:  # N10
    running = db.running(policy=StoredPolicy(stall_timeout_ms=2_000).to_json())
    worker = LocalWorker(heard_at=observer.clock.monotonic())
    stalls = BlockedLoopWatch(observer.recoverer(), supervisor=LocalSupervisor([worker]))
    for _ in range(4):
        await observer.clock.advance(1.0)
        await stalls.tick()
    assert only(observer, StaleTasksDetected).task_ids == (running.id,)


async def test_an_observed_death_and_a_release_report_no_stale_or_orphaned_tasks(
    observer: ManualObserver, db: StoreHarness
) -> None:
    db.running("w1")
    db.running("w2")
    bury(db)
    await observer.recoverer().recover_worker("w1", KILLED, died_at=observer.clock.monotonic())
    await release(observer.recoverer(), ["w2"])
    assert told(observer) == ["TaskRecovered", "TaskRecovered"]
