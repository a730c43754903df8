"""Draining a queue at full speed while a worker process dies every second: no task lost or duplicated, each attempt recorded."""

from __future__ import annotations

import random
import signal
import threading
from types import ModuleType

import psutil
import pytest

from tests.invariants import check_invariants
from tests.stories.scenario import Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

TASKS = 60_000


@pytest.mark.long
def test_a_drain_with_a_kill_every_second_completes_every_task_once(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # I1-I10, L3
    # A process that dies repeatedly is replaced after growing pauses, so there are several trees.
    trees = [scenario.ready_tree() for _ in range(4)]
    dice = random.Random(23)
    over, kills = threading.Event(), 0

    def kill() -> None:
        nonlocal kills
        while not over.wait(1.0):
            workers = [child for tree in trees for child in psutil.Process(tree.pid).children()]
            if workers:
                dice.choice(workers).send_signal(signal.SIGKILL)
                kills += 1

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        sent = [
            handle
            for first in range(0, TASKS, 5_000)
            for handle in sample_tasks.app.send_many(
                sample_tasks.swift.call(n) for n in range(first, first + 5_000)
            )
        ]
        scenario.until(
            lambda: not set(scenario.states()) & {"PENDING", "CLAIMED", "RUNNING"},
            within=200,
            what=f"{TASKS} tasks under fire",
        )
    finally:
        over.set()
        killer.join(10)
    (spent,) = scenario.query(
        "select extract(epoch from max(completed_at) - min(claimed_at)) as seconds from {schema}.tasks"
    )
    print(f"{kills} kills, {TASKS / float(spent['seconds']):,.0f} tasks/s")
    assert kills >= 3
    assert scenario.states() == {"COMPLETED": TASKS}
    wrong = scenario.query("select id from {schema}.tasks where result::text <> args->>'n' limit 3")
    assert wrong == []
    check_invariants(scenario.url, scenario.schema, sent={one.id for one in sent})
