"""Whether a worker reaches the database: any answer counts, and only a worker that had none for long is ended."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from everbeat.config import RecoveryConfig
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.process import spawn
from everbeat.testing.clock import ManualClock
from everbeat.worker.attempt import Stage
from everbeat.worker.children import Child
from everbeat.worker.cut_off_watch import CutOffWatch, WorkerCutOff
from everbeat.worker.protocol import Tick
from everbeat.worker.seat import Seat
from tests.worker.proxy import Proxy
from tests.worker.stand import Running, Stand
from tests.worker.supervising import FAST

THRESHOLD_S = FAST["running_stale_threshold_ms"] / 1_000
TOO_LONG_S = 2 * THRESHOLD_S


@asynccontextmanager
async def a_worker_that_cannot_settle(
    stand: Stand, blow: Callable[[Proxy], None]
) -> AsyncIterator[tuple[Running, Proxy]]:
    """Its outcome waits for a row that somebody keeps locked, and then the blow falls. In the end all is well again."""
    async with Proxy.before(stand.target) as proxy:
        direct, stand.target = stand.target, proxy.target
        try:
            async with stand.worker(recovery=RecoveryConfig(**FAST), poll_interval="500ms") as running:
                task_id = stand.send("nap", seconds=0.5)
                await running.until(lambda: running.have_begun(task_id))
                stand.target = direct
                with stand.holding(f"select from {{schema}}.tasks where id = '{task_id}' for update"):
                    await running.until(lambda: running.attempt(task_id).stage is Stage.SETTLING)
                    await running.until(lambda: cut_off_s(running) != [])
                    blow(proxy)
                    yield running, proxy
                proxy.mend()
                assert (await running.finished(task_id))["state"] == "COMPLETED"
                await running.until(lambda: cut_off_s(running)[-1] == 0)
        finally:
            stand.target = direct


def cut_off_s(running: Running) -> list[float]:
    """What the worker told its supervisor, tick by tick."""
    return [told.cut_off_s for told in running.told if isinstance(told, Tick)]


async def test_whatever_the_database_answers_shows_that_it_is_reached(stand: Stand) -> None:
    """No new connection is to be had, so that every question of its own is in vain: but its claims are answered."""
    async with a_worker_that_cannot_settle(stand, Proxy.refuse) as (running, _):
        began = SystemClock().monotonic()
        await running.until(lambda: SystemClock().monotonic() - began > 1.5 * TOO_LONG_S)
        assert max(cut_off_s(running)) < TOO_LONG_S / 2


async def test_without_any_answer_it_says_for_how_long(stand: Stand) -> None:
    async with a_worker_that_cannot_settle(stand, Proxy.cut) as (running, _):
        began = SystemClock().monotonic()
        assert cut_off_s(running)[-1] < 1
        await running.until(lambda: cut_off_s(running)[-1] >= TOO_LONG_S)
        assert SystemClock().monotonic() - began >= TOO_LONG_S


@dataclass
class Watched:
    """A watch over one real process that says what it is made to say; its supervisor and the time are the test's."""

    child: Child
    events: list[Event] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    disturbances: int = 0
    probes: int = 0
    is_reached: bool = True

    def __post_init__(self) -> None:
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.watch = CutOffWatch(
            threshold_s=THRESHOLD_S, children=lambda: [self.child], disturbances=lambda: self.disturbances,
            can_connect=self._can_connect, events=bus, clock=self.clock,
        )  # fmt: skip

    async def _can_connect(self) -> bool:
        self.probes += 1
        return self.is_reached

    def says(self, seconds: float) -> None:
        """The worker's next word."""
        tick = Tick(running=0, claimed=0, slots=1, cpu_percent=0, loop_lag_ms=0, names=[], cut_off_s=seconds)
        assert self.child.seat is not None
        self.child.seat.hear(tick)

    async def look(self, *, for_s: float, saying: float | None = None) -> None:
        """Look for this many seconds. Before each look the worker reports that it was cut off for `saying` seconds."""
        for _ in range(round(for_s / self.watch.interval_s)):
            await self.clock.advance(self.watch.interval_s)
            if saying is not None:
                self.says(saying)
            await self.watch.tick()

    @property
    def told(self) -> list[Any]:
        return [event for event in self.events if isinstance(event, WorkerCutOff)]


@pytest.fixture
async def watched() -> AsyncIterator[Watched]:
    process = spawn([sys.executable, "-c", "import signal; signal.pause()"])
    child = await Child.adopt(process, clock=SystemClock())
    watched = Watched(child)
    child.seat = Seat(
        pid=process.pid, queues=None, metadata={}, tell=lambda message: None, clock=watched.clock
    )
    yield watched
    process.kill()
    await process.wait_exit()
    child.close()


async def test_a_process_without_an_answer_for_two_thresholds_is_ended(watched: Watched) -> None:
    await watched.look(for_s=TOO_LONG_S + THRESHOLD_S, saying=TOO_LONG_S)
    (told,) = watched.told
    assert (told.pid, told.for_s) == (watched.child.process.pid, TOO_LONG_S)
    report = await watched.child.process.wait_exit()
    assert report.signal_name == "SIGKILL"


async def test_less_than_two_thresholds_end_nobody(watched: Watched) -> None:
    await watched.look(for_s=10 * THRESHOLD_S, saying=TOO_LONG_S - 0.01)
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_process_that_is_answered_costs_no_connection(watched: Watched) -> None:
    await watched.look(for_s=10 * THRESHOLD_S, saying=0)
    assert (watched.told, watched.probes) == ([], 0)


async def test_while_the_supervisor_opens_no_connection_nobody_is_ended(watched: Watched) -> None:
    watched.is_reached = False
    await watched.look(for_s=5 * THRESHOLD_S, saying=TOO_LONG_S)
    assert watched.probes > 1
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_process_has_two_thresholds_to_reach_a_database_that_is_back(watched: Watched) -> None:
    watched.is_reached = False
    await watched.look(for_s=5 * THRESHOLD_S, saying=5 * THRESHOLD_S)
    watched.is_reached = True
    await watched.look(for_s=TOO_LONG_S, saying=7 * THRESHOLD_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)
    await watched.look(for_s=10 * THRESHOLD_S, saying=0)
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_process_that_says_nothing_more_is_not_ended_for_its_last_word(watched: Watched) -> None:
    """Its loop stands still, so it asks nothing: what it said before proves nothing about now."""
    watched.says(TOO_LONG_S)
    await watched.look(for_s=10 * THRESHOLD_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_after_a_beat_that_failed_two_thresholds_must_go_by(watched: Watched) -> None:
    for _ in range(5):
        watched.disturbances += 1
        await watched.look(for_s=TOO_LONG_S * 3 / 4, saying=TOO_LONG_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)
    await watched.look(for_s=TOO_LONG_S, saying=TOO_LONG_S)
    assert len(watched.told) == 1


async def test_after_a_pause_of_the_supervisor_two_thresholds_must_go_by(watched: Watched) -> None:
    await watched.look(for_s=TOO_LONG_S * 3 / 4, saying=TOO_LONG_S)
    await watched.clock.advance(10 * THRESHOLD_S)  # it was frozen
    await watched.look(for_s=TOO_LONG_S, saying=TOO_LONG_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)
    await watched.look(for_s=THRESHOLD_S, saying=TOO_LONG_S)
    assert len(watched.told) == 1
