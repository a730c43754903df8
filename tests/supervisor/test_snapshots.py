"""Test the snapshots that a supervisor stores of its workers."""

from __future__ import annotations

from types import SimpleNamespace

from msgspec.structs import replace

from everbeat.runtime.clock import SystemClock
from everbeat.store.workers import WorkerState
from everbeat.supervisor.workers import Snapshots
from tests.recovering.conftest import ManualObserver, StoreHarness


async def test_the_supervisor_stores_snapshots_of_its_workers(
    observer: ManualObserver, db: StoreHarness
) -> None:  # D6
    supervised = SimpleNamespace(workers=[])
    environment = replace(observer.environment(), clock=SystemClock())
    snapshots = Snapshots(environment, supervised)  # type: ignore[arg-type]
    assert snapshots.interval_s == 30.0
    assert await snapshots.tick() == 1.0, (
        "the service ticks again soon, so that the first snapshot does not wait for 30 s"
    )
    state = WorkerState(
        worker_id="w1", running=1, claimed=2, slots=8, rss_bytes=10**10, cpu_percent=99.5, loop_lag_ms=0.25
    )
    supervised.workers.append(SimpleNamespace(state=lambda: state))
    assert await snapshots.tick() is None
    rows = db.table(
        "worker_states", "worker_id, tasks_running, tasks_claimed, slots, rss_bytes, cpu_percent, loop_lag_ms"
    )
    assert rows == [("w1", 1, 2, 8, 10**10, 99.5, 0.25)]
