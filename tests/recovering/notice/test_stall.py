"""Test stalls that a worker cannot notice itself: its supervisor judges them by the messages of the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from everbeat.domain.task.policy import StoredPolicy
from everbeat.recovering.notice.stall import BlockedLoopWatch
from everbeat.runtime.events import TaskRecovered
from tests.recovering.conftest import ManualObserver, StoreHarness

SILENT = StoredPolicy(stall_timeout_ms=2_000).to_json()
AGAIN = StoredPolicy(stall_timeout_ms=2_000, on_crash="retry").to_json()


@dataclass
class LocalWorker:
    """A worker that sends messages when the test requests it."""

    worker_id: str = "w1"
    heard_at: float = 0.0
    on_loop: frozenset[str] = field(default_factory=lambda: frozenset({"work"}))


@dataclass
class LocalSupervisor:
    """A stand-in for a supervisor with these workers."""

    workers: list[LocalWorker]


@dataclass
class Watch:
    """The service, one worker and a clock."""

    observer: ManualObserver
    worker: LocalWorker
    stalls: BlockedLoopWatch

    async def look(self, *, after_s: float) -> float | None:
        await self.observer.clock.advance(after_s)
        return await self.stalls.tick()

    def speak(self) -> None:
        self.worker.heard_at = self.observer.clock.monotonic()


@pytest.fixture
def watch(observer: ManualObserver) -> Watch:
    worker = LocalWorker(heard_at=observer.clock.monotonic())
    stalls = BlockedLoopWatch(observer.recoverer(), supervisor=LocalSupervisor([worker]))
    return Watch(observer, worker, stalls)


async def test_silent_code_on_a_blocked_event_loop_is_recovered(watch: Watch, db: StoreHarness) -> None:  # G2
    running = db.running(policy=SILENT)
    for _ in range(2):
        await watch.look(after_s=1.0)
    wait = await watch.look(after_s=0.5)
    assert wait == pytest.approx(0.5), "the next check is at the end of the stall timeout"
    assert db.row(running.id, "state") == "RUNNING"
    await watch.look(after_s=0.51)
    assert db.row(running.id, "state, crash_count, loss_count") == ("FAILED", 0, 0)
    error = db.row(running.id, "error")
    assert error["code"] == "TASK_STALLED"
    assert error["data"]["cause"] == "no progress for 2s: the event loop of its worker is blocked"
    assert db.table("recoveries", "noticed_by, was, action, recovered_by") == [
        ("progress", "RUNNING", "fail", "me")
    ]
    assert len(watch.observer.told(TaskRecovered)) == 1
    assert db.settle(running) == "lost", "a late write changes nothing"


async def test_a_worker_that_sends_messages_judges_its_own_stalls(watch: Watch, db: StoreHarness) -> None:
    running = db.running(policy=SILENT)
    for _ in range(8):
        watch.speak()
        await watch.look(after_s=1.0)
    assert db.row(running.id, "state") == "RUNNING"


@pytest.mark.parametrize("what", ["no limit", "elsewhere", "alone", "claimed"])
async def test_only_running_code_with_a_stall_timeout_on_the_blocked_loop_is_judged(
    what: str, watch: Watch, db: StoreHarness
) -> None:  # G2
    if what == "claimed":
        db.send(policy=SILENT)
        (task,) = db.claim(limit=1)
    else:
        task = db.running(policy=None if what == "no limit" else SILENT)
    if what == "elsewhere":
        watch.worker.on_loop = frozenset()
    if what == "alone":
        db.connection.execute(f'update "{db.target.schema}".tasks set alone = true'.encode())
    before = db.row(task.id, "state")
    for _ in range(8):
        await watch.look(after_s=1.0)
    assert db.row(task.id, "state") == before
    assert db.table("recoveries") == []


async def test_a_single_task_on_a_blocked_loop_is_charged_and_several_are_not_judged(
    watch: Watch, db: StoreHarness
) -> None:
    alone = db.running(policy=AGAIN)
    for _ in range(4):
        await watch.look(after_s=1.0)
    assert db.row(alone.id, "state, crash_count, loss_count, retry_count") == ("PENDING", 1, 0, 1)
    watch.speak()
    two = [db.running(policy=AGAIN), db.running(policy=AGAIN)]
    before = [db.row(task.id, "state, crash_count, loss_count") for task in two]
    for _ in range(4):
        await watch.look(after_s=1.0)
    assert [db.row(task.id, "state, crash_count, loss_count") for task in two] == before


async def test_a_gap_of_the_observer_restarts_the_stall_timeout(
    watch: Watch, db: StoreHarness
) -> None:  # I14
    running = db.running(policy=SILENT)
    await watch.look(after_s=1.0)
    await watch.look(after_s=60.0)
    assert db.row(running.id, "state") == "RUNNING"
    for _ in range(2):
        await watch.look(after_s=1.4)
    assert db.row(running.id, "state") == "RUNNING"
    await watch.look(after_s=0.3)
    assert db.row(running.id, "state") == "FAILED"
