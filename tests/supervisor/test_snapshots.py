"""Test the snapshots that a supervisor stores of its workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from msgspec.structs import replace

from everbeat.runtime.clock import SystemClock
from everbeat.store.workers import WorkerState
from everbeat.supervisor.workers import Snapshots
from everbeat.testing.clock import ManualClock
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


async def test_a_pause_of_the_supervisor_while_it_examines_its_workers_is_not_stored_as_their_silence(
    observer: ManualObserver, db: StoreHarness
) -> None:  # E4
    clock, lags = ManualClock(), iter((4_000.0, 5.0))
    state = WorkerState(
        worker_id="w1", running=1, claimed=0, slots=8, rss_bytes=1, cpu_percent=0.0, loop_lag_ms=0.0
    )

    def state_after_a_pause() -> WorkerState:
        """Return what a supervisor computes that was suspended for 5 s in the middle of its first examination."""
        lag_ms = next(lags)
        if lag_ms > 1_000:
            clock._now += 5.0
        return replace(state, loop_lag_ms=lag_ms)

    supervised = SimpleNamespace(workers=[SimpleNamespace(state=state_after_a_pause)])
    snapshots = Snapshots(replace(observer.environment(), clock=clock), supervised)  # type: ignore[arg-type]
    ticking = asyncio.create_task(snapshots.tick())
    while not ticking.done():
        await clock.advance(0.1)
    assert db.table("worker_states", "worker_id, loop_lag_ms") == [("w1", 5.0)]
