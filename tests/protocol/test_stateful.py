"""Whatever happens in whatever order, on a real database: stale holders change nothing, nobody alive is given up, all ends."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from everbeat.store.target import Target
from tests.protocol.stateful.deeds import VERBS
from tests.protocol.stateful.machine import Machine
from tests.protocol.stateful.stage import Stage
from tests.protocol.stateful.storm import storm

QUICK = settings(
    max_examples=30, stateful_step_count=30, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=(Phase.generate,),
)  # fmt: skip
LONG = settings(
    QUICK, phases=(Phase.generate, Phase.shrink), derandomize=False, max_examples=int(os.environ.get("EVERBEAT_TEST_EXAMPLES", "1500")),
    stateful_step_count=int(os.environ.get("EVERBEAT_TEST_STEPS", "60")), print_blob=True,
)  # fmt: skip


@pytest.fixture
def stage(database_url: str, schema: str) -> Iterator[Stage]:
    stage = Stage(Target.parse(database_url, schema=schema))
    yield stage
    stage.close()


def play(stage: Stage, profile: settings) -> Counter[str]:
    """Runs the machine; answers what happened."""
    tally: Counter[str] = Counter()
    on_stage = type("MachineOnStage", (Machine,), {"stage": stage, "tally": tally})
    run_state_machine_as_test(on_stage, settings=profile)
    return tally


def missing(tally: Counter[str]) -> list[str]:
    """What did not happen: a run in which nobody died and no zombie acted proves nothing."""
    happened = (
        "recovered CLAIMED", "recovered RUNNING", "given up", "reply lost", "commit lost",
        *(f"{verb} by a zombie" for verb in VERBS),
    )  # fmt: skip
    return [what for what in happened if not tally[what]]


@pytest.mark.timeout(400)
def test_whatever_happens_the_promises_hold(stage: Stage) -> None:
    tally = play(stage, QUICK)
    assert tally["recovered RUNNING"]
    assert tally["complete by a zombie"]


@pytest.mark.timeout(400)
def test_no_storm_finds_a_broken_promise(stage: Stage) -> None:
    assert missing(sum((storm(stage, seed) for seed in range(30)), Counter())) == []


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_whatever_happens_for_longer_the_promises_hold(stage: Stage) -> None:
    assert missing(play(stage, LONG)) == []


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_no_long_storm_finds_a_broken_promise(stage: Stage) -> None:
    storms = int(os.environ.get("EVERBEAT_TEST_STORMS", "1000"))
    assert missing(sum((storm(stage, seed, steps=60) for seed in range(storms)), Counter())) == []
