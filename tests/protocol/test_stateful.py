"""Whatever happens in whatever order, on a real database: stale holders change nothing, nobody alive is given up, all ends."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from everbeat.store.target import Target
from tests.protocol.stateful.machine import Machine
from tests.protocol.stateful.stage import Stage

QUICK = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None, database=None,
    suppress_health_check=list(HealthCheck), phases=(Phase.explicit, Phase.generate, Phase.shrink),
)  # fmt: skip
LONG = settings(
    QUICK, derandomize=False, max_examples=int(os.environ.get("EVERBEAT_TEST_EXAMPLES", "1500")),
    stateful_step_count=int(os.environ.get("EVERBEAT_TEST_STEPS", "60")), print_blob=True,
)  # fmt: skip


@pytest.fixture
def stage(database_url: str, schema: str) -> Iterator[Stage]:
    stage = Stage(Target.parse(database_url, schema=schema))
    yield stage
    stage.close()


def assert_holds(stage: Stage, profile: settings) -> None:
    run_state_machine_as_test(type("MachineOnStage", (Machine,), {"stage": stage}), settings=profile)


def test_whatever_happens_the_promises_hold(stage: Stage) -> None:
    assert_holds(stage, QUICK)


@pytest.mark.long
@pytest.mark.timeout(3_600)
def test_whatever_happens_for_longer_the_promises_hold(stage: Stage) -> None:
    assert_holds(stage, LONG)
