"""Oracles about workflows: each workflow ends as its tasks require. They have no side effects and do not use the engine's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.chaos.evidence import Breach, Evidence, TaskRow

TOP, LEFT, RIGHT, BOTTOM, TAIL = range(5)
"""The nodes of a diamond, in the order of their numbers: left and right need top, bottom needs both, and tail always runs after bottom."""
NODES: Final = 5
_ENDED_BADLY: Final = frozenset({"FAILED", "CANCELLED", "EXPIRED"})


def acknowledged_workflows_exist(evidence: Evidence) -> Iterator[Breach]:
    """I1: no acknowledged workflow is missing."""
    there = {row.id for row in evidence.workflows}
    for workflow_id in evidence.sends.started:
        if workflow_id not in there:
            yield Breach("I1", f"workflow {workflow_id} was acknowledged and is not there")


def every_workflow_ends(evidence: Evidence) -> Iterator[Breach]:
    """L3: after the faults have ended, every workflow finishes, including one whose start is in doubt."""
    for row in evidence.workflows:
        if row.state not in ("COMPLETED", "FAILED"):
            yield Breach("L3", f"workflow {row.id} is still {row.state}")


def a_workflow_ends_as_its_tasks_say(evidence: Evidence) -> Iterator[Breach]:
    """I21, I22: exactly the tasks whose parents completed were sent, and the workflow ends as its tasks did."""
    tasks = {task.number: task for task in evidence.tasks}
    ended = {row.id: row.state for row in evidence.workflows}
    for workflow_id, numbers in evidence.sends.started.items():
        found = [tasks.get(number) for number in numbers]
        top, left, right = (_completed(found[node]) for node in (TOP, LEFT, RIGHT))
        expected = {TOP, TAIL} | ({LEFT, RIGHT} if top else set()) | ({BOTTOM} if left and right else set())
        sent = {node for node, task in enumerate(found) if task is not None}
        if sent != expected:
            yield Breach(
                "I21", f"workflow {workflow_id} sent the tasks of {sorted(sent)}, not of {sorted(expected)}"
            )
        is_bad = any(task is not None and task.state in _ENDED_BADLY for task in found)
        if ended.get(workflow_id) != ("FAILED" if is_bad else "COMPLETED"):
            yield Breach("I22", f"workflow {workflow_id} ended {ended.get(workflow_id)}, its tasks {found}")


def _completed(task: TaskRow | None) -> bool:
    return task is not None and task.state == "COMPLETED"


WORKFLOW_ORACLES: Final = (
    acknowledged_workflows_exist,
    every_workflow_ends,
    a_workflow_ends_as_its_tasks_say,
)
