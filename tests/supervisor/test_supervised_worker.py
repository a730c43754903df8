"""Test the state of a worker that its supervisor derives from ticks, and from silence while its loop is blocked."""

from __future__ import annotations

import os
import time

import pytest

from everbeat.protocol import Held, Tick
from everbeat.store.workers import WorkerState
from everbeat.supervisor.workers import SupervisedWorker
from everbeat.testing.clock import ManualClock

TICK = Tick(running=1, claimed=0, slots=4, cpu_percent=59.0, loop_lag_ms=2.0, names=["film"])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def worker(clock: ManualClock) -> SupervisedWorker:
    return SupervisedWorker(pid=os.getpid(), queues=None, metadata={}, send=lambda message: None, clock=clock)


def state(worker: SupervisedWorker) -> WorkerState:
    found = worker.state()
    assert found is not None
    return found


async def test_a_worker_has_no_state_before_its_first_tick(
    clock: ManualClock, worker: SupervisedWorker
) -> None:
    await clock.advance(60)
    assert worker.state() is None


async def test_the_state_of_a_worker_is_that_of_its_last_tick(
    clock: ManualClock, worker: SupervisedWorker
) -> None:
    worker.receive(TICK)
    await clock.advance(1.0)
    assert (state(worker).loop_lag_ms, state(worker).cpu_percent) == (2.0, 59.0)


async def test_the_silence_of_a_worker_counts_as_its_event_loop_lag(
    clock: ManualClock, worker: SupervisedWorker
) -> None:
    worker.receive(TICK)
    await clock.advance(6.0)
    assert state(worker).loop_lag_ms == pytest.approx(5_000)
    await clock.advance(30.0)
    assert state(worker).loop_lag_ms == pytest.approx(35_000)
    assert state(worker).running == 1
    worker.receive(Held([], []))
    assert state(worker).loop_lag_ms == 2.0
    await clock.advance(1.5)
    worker.receive(TICK)
    assert (state(worker).loop_lag_ms, state(worker).cpu_percent) == (2.0, 59.0)


async def test_a_reported_lag_that_exceeds_the_silence_is_kept(
    clock: ManualClock, worker: SupervisedWorker
) -> None:
    worker.receive(Tick(running=0, claimed=0, slots=1, cpu_percent=0, loop_lag_ms=9_000.0, names=[]))
    await clock.advance(1.5)
    assert state(worker).loop_lag_ms == 9_000


async def test_the_supervisor_reads_the_processor_time_of_a_silent_worker(
    clock: ManualClock, worker: SupervisedWorker
) -> None:
    worker.receive(TICK)
    used_from = time.process_time()
    while time.process_time() - used_from < 0.05:
        pass  # this process stands for the worker and uses the processor
    await clock.advance(10.0)
    shown = state(worker).cpu_percent
    assert 0.5 <= shown < 30, "about 0.05 s of 10 s"
