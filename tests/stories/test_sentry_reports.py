"""Sentry's SDK sends a failure from a task process of a real tree, and the death of a worker process from the next one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk

from tests.sentry.conftest import forgotten
from tests.stories.scenario import FAST, Scenario, program_of

pytestmark = pytest.mark.story


def items(scenario: Scenario, kind: str) -> list[dict[str, Any]]:
    file = Path(f"{scenario.effects_file}.sentry")
    lines = file.read_text().splitlines() if file.exists() else []
    return [found for line in lines if (found := json.loads(line))["kind"] == kind]


def test_a_failure_and_a_death_are_one_event_each_and_attempts_join_the_trace_of_their_send(
    scenario: Scenario,
) -> None:
    with forgotten(), program_of(scenario, "reported") as reported:
        tree = scenario.ready_tree(program="reported", recovery=FAST)
        (worker,) = scenario.workers(tree)
        with sentry_sdk.start_transaction(op="script", name="send") as sending:
            failed = reported.fails.send()
            assert failed.outcome(timeout=60).error.code == "UNHANDLED_EXCEPTION"
            died = reported.dies.send()  # earlier, the death could also hit the first task
        assert died.result(timeout=60) == "done"
        scenario.until(
            lambda: len(items(scenario, "event")) == 2, within=20, what="both events are sent", tree=tree
        )
        assert tree.stop() == 0
        failure, death = sorted(items(scenario, "event"), key=lambda each: "exception" not in each["payload"])
        assert failure["pid"] not in (tree.pid, worker["pid"]), "the task process has the exception"
        assert failure["payload"]["exception"]["values"][0]["type"] == "ValueError"
        about = failure["payload"]["contexts"]["everbeat"]
        assert about["task_url"] == f"https://ops.example.com/tasks/{failed.id}"
        assert death["pid"] not in (tree.pid, worker["pid"]), "another worker process reports the death"
        assert "SIGKILL" in death["payload"]["message"]
        (task,) = death["payload"]["contexts"]["everbeat"]["tasks"]
        assert (task["task_id"], task["action"]) == (str(died.id), "retry")
        runs = [
            each["payload"]["contexts"]["trace"]
            for each in items(scenario, "transaction")
            if each["payload"]["contexts"]["trace"]["op"] == "queue.task.everbeat"
        ]
        assert {run["trace_id"] for run in runs} == {sending.trace_id}
        assert sorted(run["status"] for run in runs) == ["internal_error", "ok"]
