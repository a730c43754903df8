"""Thousands of tasks that fail: the log and `doctor` show it, and the log does not drown."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from types import ModuleType

import pytest

from tests.stories.stage import SLACK, Stage

pytestmark = pytest.mark.story
FAILING = 2_000
A_SECOND = 50


def test_two_thousand_failures_are_told_in_the_log_and_by_doctor(
    stage: Stage, deeds: ModuleType
) -> None:  # J4
    tree = stage.ready_tree(worker={"async_concurrency": 100, "processes": 1})
    deeds.app.send_many([deeds.raise_something.call("a message") for _ in range(FAILING)])
    stage.until(lambda: stage.states().get("FAILED", 0) == FAILING, within=60 * SLACK, what="all failed")
    assert tree.stop() == 0
    log = tree.output()
    told = re.findall(
        r"ERROR .*task_failure task_id=\S+ name=raise_something attempt=1 code=(\w+) type=(\w+)", log
    )
    folded = [
        int(count) for count in re.findall(r"ERROR .*failures_folded name=raise_something.* count=(\d+)", log)
    ]
    assert A_SECOND <= len(told) < FAILING / 2
    assert len(told) + sum(folded) == FAILING
    assert set(told) == {("UNHANDLED_EXCEPTION", "AssertionError")}
    assert log.count("Traceback (most recent call last):") == len(told)
    print(f"{len(told)} records and {len(folded)} folded ones")
    environment = os.environ | {"EVERBEAT_DATABASE_URL": stage.url}
    doctor = subprocess.run(
        [sys.executable, "-m", "everbeat", "doctor", "--schema", stage.schema, "--json"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    check = next(each for each in json.loads(doctor.stdout)["checks"] if each["code"] == "FAILURES")
    assert check["verdict"] == "WARN"
    assert "raise_something: UNHANDLED_EXCEPTION (AssertionError)" in check["text"]
