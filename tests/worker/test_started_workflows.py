"""Test workflows that code starts, in every mode: once in all attempts, under the lease, refused with a reason."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from uuid import UUID

import pytest

from tests.worker import sample_starts as sample_starts
from tests.worker.harness import WorkerHarness
from tests.worker.run_modes import SOME_MODES
from tests.worker.sample_tasks import gate
from tests.worker.test_steps import ended, steps

PROGRAM = [sys.executable, str(Path(__file__).parent / "programs" / "start_task_process.py")]
assert sample_starts


@pytest.mark.parametrize("mode", SOME_MODES)
async def test_each_workflow_of_a_task_is_started_once_in_all_attempts(
    harness: WorkerHarness, mode: str
) -> None:
    async with harness.worker(task_process_argv=PROGRAM) as running:
        task_id = harness.send(f"found_{mode}")
        row = await ended(running, task_id)
        ids = [UUID(each) for each in row["result"]]
        await running.until(
            lambda: (
                [one["state"] for one in harness.query("select state from {schema}.workflows")]
                == ["COMPLETED"] * 3
            )
        )
    found = harness.query("select id, parent_task_id from {schema}.workflows")
    assert {one["id"] for one in found} == {*ids}
    assert {one["parent_task_id"] for one in found} == {task_id}
    assert row["attempt"] == 2
    assert steps(harness, task_id) == [("child", name, "DONE") for name in ("flow", "flow#2", "own")]


async def test_a_workflow_start_with_other_arguments_is_refused_with_its_name(
    harness: WorkerHarness,
) -> None:  # J3
    async with harness.worker() as running:
        row = await ended(running, harness.send("found_another"))
    assert (row["state"], row["error"]["code"]) == ("FAILED", "NON_DETERMINISTIC")
    message = row["error"]["message"]
    assert "Workflow 'own' of task 'found_another' has other arguments" in message
    assert "give a new workflow another name: ctx.named(...)." in message
    assert row["error"]["data"]["kind"] == "workflow"
    assert len(harness.query("select from {schema}.workflows")) == 1


async def test_a_task_that_lost_its_lease_starts_no_workflow(harness: WorkerHarness) -> None:
    gate.reset()
    async with harness.worker() as running:
        task_id = harness.send("found_late")
        await running.until(lambda: gate.journal == ["begun"])
        harness.recover(task_id)
        gate.opened.set()
        await running.until(lambda: gate.journal == ["begun", "lease_lost"])
    assert harness.query("select id from {schema}.workflows") == []
    assert harness.task(task_id)["state"] == "FAILED"


async def test_a_task_that_was_cancelled_starts_no_workflow(harness: WorkerHarness) -> None:
    gate.reset()
    async with harness.worker() as running:
        task_id = harness.send("found_late")
        await running.until(lambda: gate.journal == ["begun"])
        harness.cancel(task_id)
        gate.opened.set()
        row = await ended(running, task_id)
    assert row["state"] == "CANCELLED"
    assert harness.query("select id from {schema}.workflows") == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("flow", "'flow' cannot be started by task 'found_wrongly': it is of type str, not a workflow"),
        (17, "17 cannot be started .* pass definition.call"),
    ],
)
async def test_start_refuses_an_object_that_is_not_a_workflow(
    harness: WorkerHarness, what: object, message: str
) -> None:
    async with harness.worker() as running:
        row = await ended(running, harness.send("found_wrongly", what=what))
    assert row["state"] == "FAILED"
    assert re.search(message, row["error"]["message"])
