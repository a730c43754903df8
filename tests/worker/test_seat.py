"""What a worker looks like to its supervision while it says something, and while its blocked event loop keeps it from that."""

from __future__ import annotations

import os
import time

import pytest

from everbeat.store.workers import WorkerState
from everbeat.testing.clock import ManualClock
from everbeat.worker.protocol import Held, Tick
from everbeat.worker.seat import Seat

TICK = Tick(running=1, claimed=0, slots=4, cpu_percent=59.0, loop_lag_ms=2.0, names=["film"])


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def seat(clock: ManualClock) -> Seat:
    return Seat(pid=os.getpid(), queues=None, metadata={}, tell=lambda message: None, clock=clock)


def state(seat: Seat) -> WorkerState:
    found = seat.state()
    assert found is not None
    return found


async def test_before_its_first_tick_a_worker_has_no_state(clock: ManualClock, seat: Seat) -> None:
    await clock.advance(60)
    assert seat.state() is None


async def test_between_two_ticks_its_last_word_holds(clock: ManualClock, seat: Seat) -> None:
    seat.hear(TICK)
    await clock.advance(1.0)
    assert (state(seat).loop_lag_ms, state(seat).cpu_percent) == (2.0, 59.0)


async def test_the_silence_of_a_blocked_loop_is_its_lag_while_it_lasts(
    clock: ManualClock, seat: Seat
) -> None:
    seat.hear(TICK)
    await clock.advance(6.0)
    assert state(seat).loop_lag_ms == pytest.approx(5_000)
    await clock.advance(30.0)
    assert state(seat).loop_lag_ms == pytest.approx(35_000)
    assert state(seat).running == 1
    seat.hear(Held([], []))
    assert state(seat).loop_lag_ms == 2.0
    await clock.advance(1.5)
    seat.hear(TICK)
    assert (state(seat).loop_lag_ms, state(seat).cpu_percent) == (2.0, 59.0)


async def test_a_told_lag_that_is_longer_than_the_silence_stands(clock: ManualClock, seat: Seat) -> None:
    seat.hear(Tick(running=0, claimed=0, slots=1, cpu_percent=0, loop_lag_ms=9_000.0, names=[]))
    await clock.advance(1.5)
    assert state(seat).loop_lag_ms == 9_000


async def test_the_processor_time_of_a_silent_worker_is_looked_up(clock: ManualClock, seat: Seat) -> None:
    seat.hear(TICK)
    used_from = time.process_time()
    while time.process_time() - used_from < 0.05:
        pass  # this process is the worker, and computes
    await clock.advance(10.0)
    shown = state(seat).cpu_percent
    assert 0.5 <= shown < 30, "0.05 s and a little of 10 s"
