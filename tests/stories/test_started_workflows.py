"""A task that starts a workflow dies, freezes or is cancelled: there is one workflow, and it ends with its task."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.stories.scenario import SLACK, Scenario, program_of
from tests.stories.test_worker_deaths import FAST
from tests.stories.test_workflow_kills import gate, is_blocked

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}


@pytest.fixture
def founding(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "founding") as program:
        yield program


def started(scenario: Scenario) -> list[dict[str, Any]]:
    return scenario.query("select * from {schema}.workflows order by id")


@pytest.mark.long
def test_a_kill_right_after_the_start_of_a_workflow_leaves_one_workflow(
    scenario: Scenario, founding: ModuleType
) -> None:  # J7
    scenario.ready_tree(program="founding", worker=ALONE)
    task = founding.ship.send(7, True)
    workflow_id = task.result(timeout=60)
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["CRASHED", "COMPLETED"]
    (workflow,) = started(scenario)
    assert str(workflow["id"]) == workflow_id
    assert workflow["parent_task_id"] == task.id
    assert founding.app.workflow_handle(workflow_id).result(timeout=30) == "parcel 7"


@pytest.mark.parametrize(
    ("table", "condition"),
    [("nodes", "new.number = 0"), pytest.param("steps", "new.kind = 'child'", marks=pytest.mark.long)],
    ids=["half", "all"],
)
def test_a_kill_during_the_start_of_a_workflow_leaves_one_workflow(
    scenario: Scenario, founding: ModuleType, table: str, condition: str
) -> None:  # J7
    tree = scenario.ready_tree(program="founding", worker=ALONE)
    with gate(scenario, table, "insert", condition):
        task = founding.ship.send(7, False)
        scenario.until(lambda: is_blocked(scenario), within=30, what="the start is half done")
        for worker in psutil.Process(tree.pid).children():
            worker.kill()
    workflow_id = task.result(timeout=60)
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["LOST", "COMPLETED"]
    assert [str(one["id"]) for one in started(scenario)] == [workflow_id]
    assert founding.app.workflow_handle(workflow_id).result(timeout=30) == "parcel 7"


@pytest.mark.long
def test_a_zombie_cannot_start_a_workflow(scenario: Scenario, founding: ModuleType) -> None:  # J7
    frozen = scenario.ready_tree(program="founding", worker=ALONE, recovery=FAST)
    task = founding.ship_late.send()
    scenario.until(lambda: scenario.effects("start"), within=30, what="it runs")
    scenario.ready_tree(program="founding", worker=ALONE, recovery=FAST)
    time.sleep(1.5)  # the observer has checked at least once
    frozen.freeze()
    scenario.until(lambda: len(scenario.effects("start")) == 2, within=6 * SLACK, what="another tree runs it")
    scenario.open_gate("ship")
    workflow_id = task.result(timeout=60)
    frozen.thaw()
    scenario.until(lambda: scenario.effects("told"), within=30, what="the old code is told")
    assert scenario.effects("told")[0]["attempt"] == 1
    assert frozen.stop() == 0
    assert [str(one["id"]) for one in started(scenario)] == [workflow_id]


def test_a_cancel_of_a_task_ends_the_workflow_that_it_started(
    scenario: Scenario, founding: ModuleType
) -> None:  # J7
    tree = scenario.ready_tree(program="founding", worker=ALONE)
    task = founding.wait_beside.send()
    scenario.until(lambda: scenario.task(task.id)["wake_at"] is not None, within=30, what="it waits")
    task.cancel()
    (workflow,) = founding.app.list_workflows(parent=task.id)
    scenario.until(lambda: founding.app.workflow_handle(workflow.id).status() == "CANCELLED", within=30)
    assert tree.stop() == 0
