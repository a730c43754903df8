"""A drain at full speed while a worker process dies every second: nothing lost, nothing doubled, and each attempt on record."""

from __future__ import annotations

import random
import signal
import threading
from types import ModuleType

import psutil
import pytest

from tests.invariants import check_invariants
from tests.stories.stage import Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

TASKS = 60_000


@pytest.mark.long
def test_a_drain_with_a_kill_every_second(stage: Stage, deeds: ModuleType) -> None:  # I1-I10, L3
    # One process that dies again and again is replaced ever more slowly: there are enough of them.
    trees = [stage.ready_tree() for _ in range(4)]
    dice = random.Random(23)
    over, blows = threading.Event(), 0

    def kill() -> None:
        nonlocal blows
        while not over.wait(1.0):
            workers = [child for tree in trees for child in psutil.Process(tree.pid).children()]
            if workers:
                dice.choice(workers).send_signal(signal.SIGKILL)
                blows += 1

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        sent = [
            handle
            for first in range(0, TASKS, 5_000)
            for handle in deeds.app.send_many(deeds.swift.call(n) for n in range(first, first + 5_000))
        ]
        stage.until(
            lambda: not set(stage.states()) & {"PENDING", "CLAIMED", "RUNNING"},
            within=200,
            what=f"{TASKS} tasks under fire",
        )
    finally:
        over.set()
        killer.join(10)
    (spent,) = stage.query(
        "select extract(epoch from max(completed_at) - min(claimed_at)) as seconds from {schema}.tasks"
    )
    print(f"{blows} kills, {TASKS / float(spent['seconds']):,.0f} tasks/s")
    assert blows >= 3
    assert stage.states() == {"COMPLETED": TASKS}
    wrong = stage.query("select id from {schema}.tasks where result::text <> args->>'n' limit 3")
    assert wrong == []
    check_invariants(stage.url, stage.schema, sent={one.id for one in sent})
