"""New senders run before new workers: no task fails, operators see what is missing, and the first new worker runs the tasks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest

from everbeat import App
from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story

POLL_S = 5.0


def everbeat(scenario: Scenario, *words: str) -> dict[str, Any]:
    """Run a command as an operator does. Return its JSON document."""
    command = [
        sys.executable,
        "-m",
        "everbeat",
        *words,
        "--json",
        "--url",
        scenario.url,
        "--schema",
        scenario.schema,
    ]
    found = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode in (0, 1), found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def reasons(scenario: Scenario, task: UUID) -> dict[str, str]:
    return {
        each["code"]: each["text"]
        for each in everbeat(scenario, "explain", str(task))["explanation"]["reasons"]
    }


def needs_check(scenario: Scenario) -> dict[str, Any]:
    (check,) = (each for each in everbeat(scenario, "doctor")["checks"] if each["code"] == "NEEDS")
    return dict(check)


@pytest.mark.long
def test_explain_and_doctor_name_the_missing_argument_until_a_new_worker_runs_the_tasks(
    scenario: Scenario,
) -> None:  # J2
    old = scenario.ready_tree(program="greetings_old")
    sender = App(
        scenario.url, schema=scenario.schema
    )  # it has no task functions, so it cannot check the arguments
    try:
        waiting = [
            sender.send_by_name("greet", {"user": "Ann", "language": "de"}, key=f"greeting-{number}")
            for number in range(3)
        ]
        marked = "select count(*) from {schema}.tasks where needs_id is not null and state = 'PENDING'"
        scenario.until(
            lambda: scenario.query(marked)[0]["count"] == 3, within=20, what="handed back", tree=old
        )
        for number in range(20):
            assert sender.send_by_name("greet", {"user": f"{number}"}).result(timeout=20) == f"Hello {number}"
        for handle in waiting:
            row = scenario.task(handle.id)
            assert (row["state"], row["attempt"], row["retry_count"], row["crash_count"]) == (
                "PENDING",
                0,
                0,
                0,
            )
            assert scenario.attempts(handle.id) == scenario.effects("start", handle.id) == []
        found = reasons(scenario, waiting[0].id)
        assert list(found) == ["NEEDS_OTHER_CODE"]
        assert "does not take 'language'" in found["NEEDS_OTHER_CODE"]
        check = needs_check(scenario)
        assert check["verdict"] == "WARN"
        assert "greet (3 in queue default): 1 live worker does not take 'language'" in check["text"]
        lines = re.findall("task_declined .*", old.output())
        assert len(lines) == 1, "one line for a deploy, however many tasks"
        assert "name=greet unknown=language missing=" in lines[0]
        shown = everbeat(scenario, "tasks", "show", str(waiting[0].id))
        assert shown["needs"]["arguments"] == ["language", "user"]
        mistyped = sender.send_by_name("greet", {"user": "Ann", "langauge": "de"})

        new = scenario.ready_tree(program="greetings_new")
        for handle in waiting:
            assert handle.result(timeout=POLL_S * SLACK) == "Hallo Ann"
            assert len(scenario.effects("start", handle.id)) == 1
        scenario.until(
            lambda: scenario.query(marked)[0]["count"] == 1, within=20, what="the mistyped one is marked"
        )
        assert "'langauge'" in reasons(scenario, mistyped.id)["NEEDS_OTHER_CODE"]
        assert mistyped.cancel()
        assert needs_check(scenario)["verdict"] == "OK"
        assert old.stop() == 0, old.output()
        assert new.stop() == 0, new.output()
        assert scenario.states() == {"COMPLETED": 23, "CANCELLED": 1}
    finally:
        sender.close()
