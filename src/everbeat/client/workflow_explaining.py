"""Why a workflow has not ended: asks what is needed of it, its nodes, their tasks and its children.

What lives here: the questions, in order. What may not: the reasons (`domain.workflow_explanation`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final
from uuid import UUID

from everbeat.client import workflow_control
from everbeat.client.explaining import explained
from everbeat.domain.explanation import Explanation, SilenceRules, WorkflowExplanation
from everbeat.domain.workflow_explanation import MOST_TASKS, Kind, open_kinds, why_not_ended
from everbeat.domain.workflow_info import NodeState
from everbeat.errors import TaskNotFound, WorkflowNotFound
from everbeat.store import explanation
from everbeat.store.plan import Plan, ask

MOST_CHILDREN: Final = 4
DEEPEST: Final = 6
_BEGUN: Final = frozenset({NodeState.ENQUEUED, NodeState.RUNNING})


def explained_workflow(
    workflow_id: UUID, *, rules: SilenceRules, alive_within_ms: int, deeper: int = DEEPEST
) -> Plan[WorkflowExplanation]:
    """The explanation of one workflow, with those of its children down to so many levels; raises WorkflowNotFound."""
    info = yield from workflow_control.info(workflow_id)
    nodes = yield from workflow_control.nodes(workflow_id)
    movement = yield from ask(explanation.movement(workflow_id, stale_ms=alive_within_ms))
    if info.state.is_final:
        return why_not_ended(info, nodes, movement)
    stuck = yield from workflow_control.stuck(workflow_id)
    kinds = open_kinds(nodes)
    tasks = yield from _tasks(kinds, rules=rules, alive_within_ms=alive_within_ms)
    children: dict[str, WorkflowExplanation] = {}
    for kind in [each for each in kinds if each.node.kind == "workflow"][:MOST_CHILDREN]:
        node = kind.node
        if node.task_id is None or node.state not in _BEGUN or not deeper:
            continue
        try:
            children[node.name] = yield from explained_workflow(
                node.task_id, rules=rules, alive_within_ms=alive_within_ms, deeper=deeper - 1
            )
        except WorkflowNotFound:
            continue  # what that means is said by what is stuck
    return why_not_ended(info, nodes, movement, stuck=stuck, tasks=tasks, children=children)


def _tasks(
    kinds: Sequence[Kind], *, rules: SilenceRules, alive_within_ms: int
) -> Plan[dict[str, Explanation]]:
    found: dict[str, Explanation] = {}
    begun = [each.node for each in kinds if each.node.kind == "task" and each.node.state in _BEGUN]
    for node in begun[:MOST_TASKS]:
        if node.task_id is None:
            continue
        try:
            found[node.name] = yield from explained(
                node.task_id, rules=rules, alive_within_ms=alive_within_ms
            )
        except TaskNotFound:
            continue  # as above
    return found
