"""A task in an in-process worker starts a workflow, and the program dies, is stopped, or the task is cancelled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest

from everbeat import Handle
from tests.stories.scenario import FAST, SLACK, Scenario, Tree, program_of
from tests.stories.test_workflow_kills import gate, is_blocked

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

PROGRAM = "import founding; founding.app.run_worker()"
MODES = ["async", "thread", "process"]


def modes(*quick: str) -> list[Any]:
    """Mark all modes except these for the long run."""
    return [mode if mode in quick else pytest.param(mode, marks=pytest.mark.long) for mode in MODES]


@pytest.fixture
def founding(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "founding") as program:
        yield program


def ready_program(scenario: Scenario, *, grace: str = "1s") -> Tree:
    worker = {"process_concurrency": 2, "async_concurrency": 2, "thread_concurrency": 2, "grace": grace}
    return scenario.ready_tree(
        prefix=(sys.executable, "-c", PROGRAM), program="founding", recovery=FAST, worker=worker
    )


def sent(founding: ModuleType, mode: str) -> Handle[str]:
    handle: Handle[str] = getattr(founding, f"ship_{mode}").send(7)
    return handle


def the_workflow(scenario: Scenario, task: Handle[str]) -> dict[str, Any]:
    (workflow,) = scenario.query("select * from {schema}.workflows")
    assert workflow["parent_task_id"] == task.id
    return workflow


def ends_with_one_workflow(scenario: Scenario, founding: ModuleType, task: Handle[str]) -> None:
    workflow_id = task.result(timeout=60)
    assert str(the_workflow(scenario, task)["id"]) == workflow_id
    assert founding.app.workflow_handle(workflow_id).result(timeout=30) == "parcel 7"


@pytest.mark.parametrize("mode", modes("process"))
def test_a_program_that_is_killed_after_the_start_leaves_one_workflow(
    scenario: Scenario, founding: ModuleType, mode: str
) -> None:  # J7
    doomed = ready_program(scenario)
    task = sent(founding, mode)
    scenario.until(lambda: scenario.effects("started"), within=30, what="the workflow is started")
    ready_program(scenario)
    doomed.kill()
    scenario.until(
        lambda: len(scenario.effects("started")) == 2, within=6 * SLACK, what="another guest runs it"
    )
    scenario.open_gate("ship")
    ends_with_one_workflow(scenario, founding, task)
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["LOST", "COMPLETED"]


@pytest.mark.parametrize("mode", modes("thread"))
def test_a_program_that_is_killed_during_the_start_leaves_one_workflow(
    scenario: Scenario, founding: ModuleType, mode: str
) -> None:  # J7
    doomed = ready_program(scenario)
    scenario.open_gate("ship")
    with gate(scenario, "nodes", "insert", "new.number = 0"):
        task = sent(founding, mode)
        scenario.until(lambda: is_blocked(scenario), within=30, what="the start is half done")
        doomed.kill()
    ready_program(scenario)
    ends_with_one_workflow(scenario, founding, task)
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["LOST", "COMPLETED"]


@pytest.mark.parametrize("mode", modes("async"))
def test_a_program_that_is_stopped_during_the_start_leaves_one_workflow(
    scenario: Scenario, founding: ModuleType, mode: str
) -> None:  # J7
    """Its grace ends while the server still holds the start, or later: the task is released and continues from its records."""
    stopped = ready_program(scenario)
    with gate(scenario, "steps", "insert", "new.kind = 'child'"):
        task = sent(founding, mode)
        scenario.until(lambda: is_blocked(scenario), within=30, what="the start is half done")
        stopped.process.terminate()
        with suppress(subprocess.TimeoutExpired):  # the grace is over, and the server still holds the start
            stopped.process.wait(timeout=2)
    scenario.until(lambda: stopped.process.poll() is not None, within=30, what="the guest has left")
    ready_program(scenario)
    scenario.open_gate("ship")
    ends_with_one_workflow(scenario, founding, task)
    assert [one["outcome"] for one in scenario.attempts(task.id)][-1] == "COMPLETED"


@pytest.mark.parametrize("mode", modes("thread"))
def test_a_cancel_during_the_start_cancels_the_workflow(
    scenario: Scenario, founding: ModuleType, mode: str
) -> None:  # J7
    program = ready_program(scenario)
    with ThreadPoolExecutor(1) as pool:
        with gate(scenario, "nodes", "insert", "new.number = 0"):
            task = sent(founding, mode)
            scenario.until(lambda: is_blocked(scenario), within=30, what="the start is half done")
            cancelled = pool.submit(task.cancel)
        cancelled.result(timeout=30)
    if mode == "thread":
        scenario.open_gate("ship")
    scenario.until(
        scenario.state_is(task.id, "CANCELLED", "COMPLETED"), within=10 * SLACK, what="the task has ended"
    )
    handle = founding.app.workflow_handle(the_workflow(scenario, task)["id"])
    scenario.until(lambda: handle.status() == "CANCELLED", within=10 * SLACK, what="the workflow has ended")
    assert program.stop() == 0
