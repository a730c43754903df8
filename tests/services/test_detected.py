"""What is told of the dead before they are recovered: how many tasks, and by which way they were found."""

from __future__ import annotations

import subprocess
import sys
from typing import TypeVar

import pytest

from everbeat.config import RecoveryConfig
from everbeat.domain.policy import StoredPolicy
from everbeat.runtime.events import Event, TaskRecovered
from everbeat.services.carrying import NAMED, OrphanedTasksDetected, StaleTasksDetected
from everbeat.services.release import release
from everbeat.services.stalls import Stalls
from everbeat.services.startup import ReconciliationComplete
from everbeat.services.sweep import sweep
from tests.services.conftest import Hands, Onlooker
from tests.services.test_reaper import FAST, look
from tests.services.test_recovery import KILLED, bury
from tests.services.test_stalls import Holder
from tests.services.test_startup import neighbour, reconcile
from tests.services.test_sweep import silence

K = TypeVar("K", bound=Event)
TOLD = (OrphanedTasksDetected, StaleTasksDetected, TaskRecovered, ReconciliationComplete)


def told(onlooker: Onlooker) -> list[str]:
    """The kinds of what was told, in order."""
    return [type(event).__name__ for event in onlooker.seen if isinstance(event, TOLD)]


def only(onlooker: Onlooker, kind: type[K]) -> K:
    (event,) = [event for event in onlooker.seen if isinstance(event, kind)]
    return event


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_orphans_found_at_the_start_are_told_of_before_they_are_recovered(
    onlooker: Onlooker, hands: Hands
) -> None:  # N10
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    neighbour(hands, "dead", pid=process.pid, process_started=1)
    held = {hands.running("dead-w").id for _ in range(2)}
    await reconcile(onlooker)
    orphaned = only(onlooker, OrphanedTasksDetected)
    assert (orphaned.count, set(orphaned.task_ids)) == (2, held)
    assert only(onlooker, ReconciliationComplete).orphaned_count == 2
    assert told(onlooker) == [
        "OrphanedTasksDetected", "TaskRecovered", "TaskRecovered", "ReconciliationComplete",
    ]  # fmt: skip


async def test_a_start_that_finds_nobody_says_that_it_is_complete(onlooker: Onlooker) -> None:  # N10
    await reconcile(onlooker)
    assert onlooker.seen == [ReconciliationComplete(orphaned_count=0)]


async def test_what_is_found_by_age_is_stale(onlooker: Onlooker, hands: Hands) -> None:  # N10
    running = hands.running()
    reaper = onlooker.reaper(**FAST)
    for after_s in (1.0, 1.0, 0.99):
        await look(onlooker, reaper, after_s=after_s)
    assert told(onlooker) == []
    await look(onlooker, reaper, after_s=0.02)
    assert only(onlooker, StaleTasksDetected) == StaleTasksDetected(count=1, task_ids=(running.id,))
    assert told(onlooker) == ["StaleTasksDetected", "TaskRecovered"]


async def test_what_a_sweep_finds_is_stale_and_the_first_are_named(
    onlooker: Onlooker, hands: Hands
) -> None:  # N10
    held = [hands.running().id for _ in range(NAMED + 2)]
    silence(hands, "s1", 6)
    await sweep(onlooker.session, RecoveryConfig(), recoverer=onlooker.recoverer(), dry_run=True)
    assert told(onlooker) == [], "a dry run recovers nothing"
    await sweep(onlooker.session, RecoveryConfig(), recoverer=onlooker.recoverer())
    stale = only(onlooker, StaleTasksDetected)
    assert (stale.count, len(stale.task_ids), set(stale.task_ids) <= set(held)) == (NAMED + 2, NAMED, True)


async def test_code_that_stalls_is_stale(onlooker: Onlooker, hands: Hands) -> None:  # N10
    running = hands.running(policy=StoredPolicy(stall_timeout_ms=2_000).to_json())
    holder = Holder(heard_at=onlooker.clock.monotonic())
    stalls = Stalls(
        onlooker.session, holders=lambda: [holder], recoverer=onlooker.recoverer(), clock=onlooker.clock
    )
    for _ in range(4):
        await onlooker.clock.advance(1.0)
        await stalls.tick()
    assert only(onlooker, StaleTasksDetected).task_ids == (running.id,)


async def test_a_death_that_was_seen_and_a_release_are_neither(onlooker: Onlooker, hands: Hands) -> None:
    hands.running("w1")
    hands.running("w2")
    bury(hands)
    await onlooker.recoverer().recover_worker("w1", KILLED, died_at=onlooker.clock.monotonic())
    await release(onlooker.session, ["w2"], recoverer=onlooker.recoverer())
    assert told(onlooker) == ["TaskRecovered", "TaskRecovered"]
