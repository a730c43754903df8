"""Random actions in random order on a real database: stale holders change nothing, no live tree is ended, all tasks end."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from everbeat.store.target import Target
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.holder_actions import VERBS
from tests.protocol.stateful.machine import Machine
from tests.protocol.stateful.random_run import random_run

QUICK = settings(
    max_examples=30, stateful_step_count=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
)  # fmt: skip
# Six to twelve minutes for each of the two long tests. The environment asks for more.
LONG = settings(
    QUICK, phases=(Phase.generate, Phase.shrink), derandomize=False, max_examples=int(os.environ.get("EVERBEAT_TEST_EXAMPLES", "300")),
    stateful_step_count=int(os.environ.get("EVERBEAT_TEST_STEPS", "60")), print_blob=True,
)  # fmt: skip


@pytest.fixture
def database(database_url: str, schema: str) -> Iterator[FaultyDatabase]:
    database = FaultyDatabase(Target.parse(database_url, schema=schema))
    yield database
    database.close()


def run_machine(database: FaultyDatabase, profile: settings) -> Counter[str]:
    """Run the machine; return the counted events."""
    tally: Counter[str] = Counter()
    machine_class = type("MachineOnDatabase", (Machine,), {"database": database, "tally": tally})
    run_state_machine_as_test(machine_class, settings=profile)
    return tally


def missing(tally: Counter[str]) -> list[str]:
    """Return the expected events that did not happen: a run without deaths or zombies proves nothing."""
    happened = (
        "recovered CLAIMED", "recovered RUNNING", "declared dead", "reply lost", "commit lost",
        *(f"{verb} by a zombie" for verb in VERBS),
    )  # fmt: skip
    return [what for what in happened if not tally[what]]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_promises_hold_under_random_actions(database: FaultyDatabase) -> None:
    tally = run_machine(database, QUICK)
    assert tally["recovered RUNNING"]
    assert tally["complete by a zombie"]


@pytest.mark.timeout(400)
def test_random_runs_find_no_broken_promise(database: FaultyDatabase) -> None:
    assert missing(sum((random_run(database, seed) for seed in range(30)), Counter())) == []


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_the_promises_hold_under_many_random_actions(database: FaultyDatabase) -> None:
    assert missing(run_machine(database, LONG)) == []


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_many_long_random_runs_find_no_broken_promise(database: FaultyDatabase) -> None:
    storms = int(os.environ.get("EVERBEAT_TEST_STORMS", "200"))
    assert missing(sum((random_run(database, seed, steps=60) for seed in range(storms)), Counter())) == []
