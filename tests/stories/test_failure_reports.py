"""Thousands of tasks fail: the log and `doctor` report it, and the log stays readable."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story
FAILING = 2_000
A_SECOND = 50


def test_two_thousand_failures_appear_in_the_log_and_in_doctor(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J4
    tree = scenario.ready_tree(worker={"async_concurrency": 100, "processes": 1})
    sample_tasks.app.send_many([sample_tasks.raise_something.call("a message") for _ in range(FAILING)])
    scenario.until(
        lambda: scenario.states().get("FAILED", 0) == FAILING, within=60 * SLACK, what="all failed"
    )
    assert tree.stop() == 0
    log = tree.output()
    reported = re.findall(
        r"ERROR .*task_failure task_id=\S+ name=raise_something attempt=1 code=(\w+) type=(\w+)", log
    )
    folded = [
        int(count) for count in re.findall(r"ERROR .*failures_folded name=raise_something.* count=(\d+)", log)
    ]
    assert A_SECOND <= len(reported) < FAILING / 2
    assert len(reported) + sum(folded) == FAILING
    assert set(reported) == {("UNHANDLED_EXCEPTION", "AssertionError")}
    assert log.count("Traceback (most recent call last):") == len(reported)
    print(f"{len(reported)} records and {len(folded)} folded ones")
    environment = os.environ | {"EVERBEAT_DATABASE_URL": scenario.url}
    doctor = subprocess.run(
        [sys.executable, "-m", "everbeat", "doctor", "--schema", scenario.schema, "--json"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    check = next(each for each in json.loads(doctor.stdout)["checks"] if each["code"] == "FAILURES")
    assert check["verdict"] == "WARN"
    assert "raise_something: UNHANDLED_EXCEPTION (AssertionError)" in check["text"]
