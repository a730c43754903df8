"""Test workers that are cut off from the database: only a worker without any answer for long is killed."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from everbeat.config import RecoveryConfig
from everbeat.protocol import Tick
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.processes import spawn
from everbeat.supervisor.liveness import CutOffWatch, WorkerCutOff
from everbeat.supervisor.processes import WorkerChild
from everbeat.supervisor.workers import SupervisedWorker
from everbeat.testing.clock import ManualClock
from everbeat.worker.attempt import Stage
from tests.supervisor.supervising import FAST
from tests.worker.harness import Running, WorkerHarness
from tests.worker.proxy import Proxy

THRESHOLD_S = FAST["running_stale_threshold_ms"] / 1_000
TOO_LONG_S = 2 * THRESHOLD_S


@asynccontextmanager
async def a_worker_that_cannot_settle(
    harness: WorkerHarness, blow: Callable[[Proxy], None]
) -> AsyncIterator[tuple[Running, Proxy]]:
    """Run a worker whose outcome waits for a locked row, then apply `blow` to its proxy; at the end repair both."""
    async with Proxy.before(harness.target) as proxy:
        direct, harness.target = harness.target, proxy.target
        try:
            async with harness.worker(recovery=RecoveryConfig(**FAST), poll_interval="500ms") as running:
                task_id = harness.send("nap", seconds=0.5)
                await running.until(lambda: running.have_begun(task_id))
                harness.target = direct
                with harness.holding(f"select from {{schema}}.tasks where id = '{task_id}' for update"):
                    await running.until(lambda: running.attempt(task_id).stage is Stage.SETTLING)
                    await running.until(lambda: cut_off_s(running) != [])
                    blow(proxy)
                    yield running, proxy
                proxy.mend()
                assert (await running.finished(task_id))["state"] == "COMPLETED"
                await running.until(lambda: cut_off_s(running)[-1] == 0)
        finally:
            harness.target = direct


def cut_off_s(running: Running) -> list[float]:
    """Return the cut-off times that the worker reported, one for each tick."""
    return [told.cut_off_s for told in running.told if isinstance(told, Tick)]


@pytest.mark.long
async def test_a_worker_that_gets_any_answer_does_not_report_that_it_is_cut_off(
    harness: WorkerHarness,
) -> None:
    """New connections are refused, so each own probe fails; but the claims still get answers."""
    async with a_worker_that_cannot_settle(harness, Proxy.refuse) as (running, _):
        began = SystemClock().monotonic()
        await running.until(lambda: SystemClock().monotonic() - began > 1.5 * TOO_LONG_S)
        assert max(cut_off_s(running)) < TOO_LONG_S / 2


async def test_a_worker_without_answers_reports_for_how_long_it_is_cut_off(harness: WorkerHarness) -> None:
    async with a_worker_that_cannot_settle(harness, Proxy.cut) as (running, _):
        began = SystemClock().monotonic()
        assert cut_off_s(running)[-1] < 1
        await running.until(lambda: cut_off_s(running)[-1] >= TOO_LONG_S)
        assert SystemClock().monotonic() - began >= TOO_LONG_S


@dataclass
class Watched:
    """A watch over one real process whose reports, supervisor and clock the test controls."""

    child: WorkerChild
    events: list[Event] = field(default_factory=list)
    clock: ManualClock = field(default_factory=ManualClock)
    supervisor_id: str = "s1"
    is_pooled: bool = False
    reconnected_at: float | None = None
    disturbances: int = 0
    probes: int = 0
    is_reached: bool = True

    def __post_init__(self) -> None:
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.watch = CutOffWatch(
            self,
            ProcessEnvironment(events=bus, clock=self.clock),
            [self.child],
            threshold_s=THRESHOLD_S,
        )

    async def can_connect(self) -> bool:
        self.probes += 1
        return self.is_reached

    def says(self, seconds: float) -> None:
        """Report as the worker that it has been cut off for this time."""
        tick = Tick(running=0, claimed=0, slots=1, cpu_percent=0, loop_lag_ms=0, names=[], cut_off_s=seconds)
        assert self.child.worker is not None
        self.child.worker.receive(tick)

    async def look(self, *, for_s: float, saying: float | None = None) -> None:
        """Check for this many seconds. Before each check the worker reports that it was cut off for `saying` seconds."""
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
    child = await WorkerChild.adopt(process, clock=SystemClock())
    watched = Watched(child)
    child.worker = SupervisedWorker(
        pid=process.pid, queues=None, metadata={}, send=lambda message: None, clock=watched.clock
    )
    yield watched
    process.kill()
    await process.wait_exit()
    child.close()


async def test_a_worker_without_an_answer_for_two_thresholds_is_killed(watched: Watched) -> None:
    await watched.look(for_s=TOO_LONG_S + THRESHOLD_S, saying=TOO_LONG_S)
    (told,) = watched.told
    assert (told.pid, told.for_s) == (watched.child.process.pid, TOO_LONG_S)
    report = await watched.child.process.wait_exit()
    assert report.signal_name == "SIGKILL"


async def test_a_worker_without_an_answer_for_less_than_two_thresholds_is_not_killed(
    watched: Watched,
) -> None:
    await watched.look(for_s=10 * THRESHOLD_S, saying=TOO_LONG_S - 0.01)
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_worker_that_gets_answers_is_not_probed(watched: Watched) -> None:
    await watched.look(for_s=10 * THRESHOLD_S, saying=0)
    assert (watched.told, watched.probes) == ([], 0)


async def test_no_worker_is_killed_while_the_supervisor_cannot_connect_either(watched: Watched) -> None:
    watched.is_reached = False
    await watched.look(for_s=5 * THRESHOLD_S, saying=TOO_LONG_S)
    assert watched.probes > 1
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_worker_has_two_thresholds_to_reach_a_database_that_is_back(watched: Watched) -> None:
    watched.is_reached = False
    await watched.look(for_s=5 * THRESHOLD_S, saying=5 * THRESHOLD_S)
    watched.is_reached = True
    await watched.look(for_s=TOO_LONG_S, saying=7 * THRESHOLD_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)
    await watched.look(for_s=10 * THRESHOLD_S, saying=0)
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_worker_that_stops_reporting_is_not_killed_for_its_last_report(watched: Watched) -> None:
    """Its event loop is blocked, so it sends no statements: its earlier report is not proof that it is cut off now."""
    watched.says(TOO_LONG_S)
    await watched.look(for_s=10 * THRESHOLD_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)


async def test_a_failed_heartbeat_of_the_supervisor_restarts_the_two_thresholds(watched: Watched) -> None:
    for _ in range(5):
        watched.disturbances += 1
        await watched.look(for_s=TOO_LONG_S * 3 / 4, saying=TOO_LONG_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)
    await watched.look(for_s=TOO_LONG_S, saying=TOO_LONG_S)
    assert len(watched.told) == 1


async def test_a_pause_of_the_supervisor_restarts_the_two_thresholds(watched: Watched) -> None:
    await watched.look(for_s=TOO_LONG_S * 3 / 4, saying=TOO_LONG_S)
    await watched.clock.advance(10 * THRESHOLD_S)  # the supervisor was frozen
    await watched.look(for_s=TOO_LONG_S, saying=TOO_LONG_S)
    assert (watched.told, watched.child.process.poll()) == ([], None)
    await watched.look(for_s=THRESHOLD_S, saying=TOO_LONG_S)
    assert len(watched.told) == 1
