"""Code that stalls where its worker cannot notice: judged by the supervisor of that worker, by what it hears over its own line."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.events import TaskRecovered
from everbeat.services.stalls import Stalls
from tests.services.conftest import Hands, Onlooker

SILENT = StoredPolicy(stall_timeout_ms=2_000).to_json()
AGAIN = StoredPolicy(stall_timeout_ms=2_000, on_crash="retry").to_json()


@dataclass
class Holder:
    """A worker that says something when the test says so."""

    worker_id: str = "w1"
    heard_at: float = 0.0
    on_loop: frozenset[str] = field(default_factory=lambda: frozenset({"work"}))


@dataclass
class Watch:
    """The service, one worker, and a clock."""

    onlooker: Onlooker
    holder: Holder
    stalls: Stalls

    async def look(self, *, after_s: float) -> float | None:
        await self.onlooker.clock.advance(after_s)
        return await self.stalls.tick()

    def speak(self) -> None:
        self.holder.heard_at = self.onlooker.clock.monotonic()


@pytest.fixture
def watch(onlooker: Onlooker) -> Watch:
    holder = Holder(heard_at=onlooker.clock.monotonic())
    stalls = Stalls(
        onlooker.session, holders=lambda: [holder], recoverer=onlooker.recoverer(), clock=onlooker.clock
    )
    return Watch(onlooker, holder, stalls)


async def test_silent_code_on_a_loop_that_stands_still_is_recovered(watch: Watch, hands: Hands) -> None:  # G2
    running = hands.running(policy=SILENT)
    for _ in range(2):
        await watch.look(after_s=1.0)
    wait = await watch.look(after_s=0.5)
    assert wait == pytest.approx(0.5), "the next look is at the moment in which it will have been too long"
    assert hands.row(running.id, "state") == "RUNNING"
    await watch.look(after_s=0.51)
    assert hands.row(running.id, "state, crash_count, loss_count") == ("FAILED", 0, 0)
    error = hands.row(running.id, "error")
    assert error["code"] == "TASK_STALLED"
    assert error["data"]["cause"] == "no progress for 2s: the event loop of its worker is blocked"
    assert hands.table("recoveries", "noticed_by, was, action, recovered_by") == [
        ("progress", "RUNNING", "fail", "me")
    ]
    assert len(watch.onlooker.told(TaskRecovered)) == 1
    assert hands.settle(running) == "lost", "a late write changes nothing"


async def test_a_worker_that_speaks_judges_itself(watch: Watch, hands: Hands) -> None:
    running = hands.running(policy=SILENT)
    for _ in range(8):
        watch.speak()
        await watch.look(after_s=1.0)
    assert hands.row(running.id, "state") == "RUNNING"


@pytest.mark.parametrize("what", ["no limit", "elsewhere", "alone", "claimed"])
async def test_only_running_code_on_that_loop_with_a_limit_is_judged(
    what: str, watch: Watch, hands: Hands
) -> None:  # G2
    if what == "claimed":
        hands.send(policy=SILENT)
        (task,) = hands.claim(limit=1)
    else:
        task = hands.running(policy=None if what == "no limit" else SILENT)
    if what == "elsewhere":
        watch.holder.on_loop = frozenset()
    if what == "alone":
        hands.connection.execute(f'update "{hands.target.schema}".tasks set alone = true'.encode())
    before = hands.row(task.id, "state")
    for _ in range(8):
        await watch.look(after_s=1.0)
    assert hands.row(task.id, "state") == before
    assert hands.table("recoveries") == []


async def test_who_blocks_alone_is_charged_and_of_several_nobody_is_judged(
    watch: Watch, hands: Hands
) -> None:
    alone = hands.running(policy=AGAIN)
    for _ in range(4):
        await watch.look(after_s=1.0)
    assert hands.row(alone.id, "state, crash_count, loss_count, retry_count") == ("PENDING", 1, 0, 1)
    watch.speak()
    two = [hands.running(policy=AGAIN), hands.running(policy=AGAIN)]
    before = [hands.row(task.id, "state, crash_count, loss_count") for task in two]
    for _ in range(4):
        await watch.look(after_s=1.0)
    assert [hands.row(task.id, "state, crash_count, loss_count") for task in two] == before


async def test_an_observer_that_was_away_grants_a_whole_silence_anew(
    watch: Watch, hands: Hands
) -> None:  # I14
    running = hands.running(policy=SILENT)
    await watch.look(after_s=1.0)
    await watch.look(after_s=60.0)
    assert hands.row(running.id, "state") == "RUNNING"
    for _ in range(2):
        await watch.look(after_s=1.4)
    assert hands.row(running.id, "state") == "RUNNING"
    await watch.look(after_s=0.3)
    assert hands.row(running.id, "state") == "FAILED"
