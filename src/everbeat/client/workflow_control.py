"""What can be asked of one workflow, whoever holds its id.

What lives here: these questions as plans. What may not: waiting (`control`), types of results (`workflow_handle`), building (`workflow`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

import msgspec

from everbeat.domain.drawing import named
from everbeat.domain.failure import error_from_json
from everbeat.domain.outcome import TaskError
from everbeat.domain.settings import refused
from everbeat.domain.workflow_info import NodeInfo, NodeState, StuckWorkflow, WorkflowInfo, WorkflowState
from everbeat.errors import (
    DatabaseError,
    DatabaseReadOnly,
    DatabaseUnreachable,
    UnknownName,
    WorkflowNotFound,
)
from everbeat.store import workflow_control as store
from everbeat.store.advance import StepTimedOut, step
from everbeat.store.plan import Plan, ask, together
from everbeat.store.reconcile import GRACE_MS, NEVER_MENDED, find_stuck, move_on, problem_of
from everbeat.store.statement import Statement
from everbeat.store.workflow_control import EdgeRow, NodeRow, StuckNode, WorkflowRow

_MOST_STEPS: Final = 20
"""What a command means for nodes and tasks is done here and now, if no worker is faster; no more than this of what others left."""
_PAGE: Final = 10_000
_LONGEST_PROBLEM: Final = 500
_OUTAGES: Final = (DatabaseUnreachable, DatabaseReadOnly)
_BROKEN: Final = (DatabaseError, StepTimedOut, msgspec.MsgspecError, LookupError, ValueError, RecursionError)
"""What a step raises where a row holds a value that everbeat never writes, or a statement takes too long."""
_log = logging.getLogger("everbeat.client")


def to_workflow_id(value: object) -> UUID:
    """A workflow's id, given as UUID or as text; raises ConfigurationError for anything else."""
    if isinstance(value, UUID):
        return value
    if isinstance(value, str):
        try:
            return UUID(value)
        except ValueError:
            pass
    rule, fix = "must be a UUID, or its text", "pass handle.id, as start() gave it"
    raise refused(value, subject="workflow_id", code="WRONG_TYPE", rule=rule, fix=fix)


def status(workflow_id: UUID) -> Plan[WorkflowState]:
    """Its state; raises WorkflowNotFound."""
    found = yield from ask(store.ends([workflow_id]))
    if workflow_id not in found:
        raise WorkflowNotFound(workflow_id)
    return WorkflowState(found[workflow_id].state)


def info(workflow_id: UUID) -> Plan[WorkflowInfo]:
    """The workflow as it is now; raises WorkflowNotFound."""
    found = yield from ask(store.info([workflow_id]))
    if not found:
        raise WorkflowNotFound(workflow_id)
    return _info(found[0])


def listing(
    *, name: str | None, state: WorkflowState | None, key: str | None, children: bool, limit: int
) -> Plan[list[WorkflowInfo]]:
    """The latest workflows, the latest first, without their results."""
    found = yield from ask(
        store.listing(
            name=name, state=None if state is None else state.value, key=key, roots=not children, limit=limit
        )
    )
    return [_info(row) for row in found]


def nodes(workflow_id: UUID) -> Plan[list[NodeInfo]]:
    """Its nodes, in the order they were added; raises WorkflowNotFound."""
    yield from status(workflow_id)
    rows: list[NodeRow] = []
    page = yield from ask(store.nodes(workflow_id, limit=_PAGE))
    while page:
        rows.extend(page)
        page = (
            (yield from ask(store.nodes(workflow_id, after=page[-1].number, limit=_PAGE)))
            if len(page) == _PAGE
            else []
        )
    edges = yield from ask(store.edges(workflow_id))
    # Members that were made at run time have numbers behind all other nodes.
    rows.sort(key=lambda row: (row.number if row.member_of is None else row.member_of, row.number))
    return _nodes(rows, edges)


def pause(workflow_id: UUID, *, channel: str) -> Plan[WorkflowState]:
    """Pauses a running workflow, its children too; answers its state now. Raises WorkflowNotFound."""
    return (yield from _ordered(store.pause(workflow_id, channel=channel), workflow_id, channel))


def resume(workflow_id: UUID, *, channel: str) -> Plan[WorkflowState]:
    """Lets a paused workflow go on; answers its state now. Raises WorkflowNotFound."""
    return (yield from _ordered(store.resume(workflow_id, channel=channel), workflow_id, channel))


def cancel(workflow_id: UUID, *, channel: str) -> Plan[WorkflowState]:
    """Cancels a workflow that has not ended; answers its state now. Raises WorkflowNotFound."""
    return (yield from _ordered(store.cancel(workflow_id, channel=channel), workflow_id, channel))


def node_task(workflow_id: UUID, name: str) -> Plan[NodeRow]:
    """The node of this name; raises WorkflowNotFound, UnknownName."""
    found = yield from ask(store.node(workflow_id, name))
    if found is None:
        yield from status(workflow_id)
        names = yield from ask(store.node_names(workflow_id))
        raise UnknownName("node", [name], known=names)
    (row,) = yield from ask(store.nodes(workflow_id, after=found[0] - 1, limit=1))
    return row


def stuck(workflow_id: UUID, *, grace_ms: int = GRACE_MS) -> Plan[list[StuckWorkflow]]:
    """What should have happened in this workflow and has not; nothing is done about it."""
    found = yield from find_stuck(grace_ms=grace_ms, only=workflow_id)
    return [_stuck(each) for each in found]


def recover_stuck(
    *, channel: str, dry_run: bool, only: UUID | None = None, grace_ms: int = GRACE_MS
) -> Plan[list[StuckWorkflow]]:
    """Finds what should have happened in live workflows and has not, and does it. A workflow that cannot go on stops no other one."""
    found = yield from find_stuck(grace_ms=grace_ms, only=only)
    if dry_run:
        return [_stuck(each, problem=NEVER_MENDED.get(each.what)) for each in found]
    problems: dict[UUID, str] = {}
    still: set[StuckNode] = set()
    for one in sorted({each.workflow_id for each in found}):
        try:
            yield from together(lambda one=one: move_on([one], channel=channel))  # type: ignore[misc]
            yield from _steps(one, channel)
            still.update((yield from find_stuck(grace_ms=grace_ms, only=one)))
        except _OUTAGES:
            raise
        except _BROKEN as problem:
            problems[one] = str(problem)[:_LONGEST_PROBLEM]
    return [
        _stuck(each, problem=problems.get(each.workflow_id) or (problem_of(each) if each in still else None))
        for each in found
    ]


def _ordered(statement: Statement[str | None], workflow_id: UUID, channel: str) -> Plan[WorkflowState]:
    was = yield from ask(statement)
    if was is None:
        raise WorkflowNotFound(workflow_id)
    yield from advanced(workflow_id, channel)
    return (yield from status(workflow_id))


def advanced(workflow_id: UUID, channel: str) -> Plan[None]:
    """Take the first steps after an order."""
    # The order is stored. A step that fails is not an error of this call: workers repeat it, and `everbeat doctor` names the workflow.
    try:
        yield from _steps(workflow_id, channel)
    except _OUTAGES:
        raise
    except _BROKEN as problem:
        _log.error("workflow_cannot_go_on workflow=%s error=%r", workflow_id, str(problem)[:_LONGEST_PROBLEM])


def _steps(workflow_id: UUID, channel: str) -> Plan[None]:
    for _ in range(_MOST_STEPS):
        done = yield from together(lambda: step(channel=channel, only=workflow_id))
        if not done.workflows:
            return


def _info(row: WorkflowRow) -> WorkflowInfo:
    return WorkflowInfo(
        id=row.id, name=row.name, key=row.key, state=WorkflowState(row.state), on_error=row.on_error,
        counts={NodeState(state): count for state, count in row.counts.items()}, output=row.output_name, parent_id=row.parent_id,
        sent_at=row.sent_at, paused_at=row.paused_at, cancel_requested_at=row.cancel_requested_at, ended_at=row.ended_at,
        result=None if row.result is None else msgspec.json.decode(row.result), error=_error(row.error),
    )  # fmt: skip


def _nodes(rows: Sequence[NodeRow], edges: Sequence[EdgeRow]) -> list[NodeInfo]:
    names = {row.number: row.name for row in rows}
    needs: dict[int, list[str]] = {}
    conditions = _conditions(rows, edges, names)
    for edge in edges:
        needed = needs.setdefault(edge.child, [])
        # A row that was changed with SQL can refer to a number that no node has.
        if (parent := names.get(edge.parent)) is not None and parent not in needed:
            needed.append(parent)
    return [
        NodeInfo(
            name=row.name, kind=row.kind, state=_state(row), task=row.task or row.child_name, task_id=row.task_id,
            needs=tuple(needs.get(row.number, ())), member_of=None if row.member_of is None else names.get(row.member_of),
            quorum=row.quorum, conditions=conditions.get(row.number, ()), attempt=row.attempt, enqueued_at=row.enqueued_at, started_at=row.started_at,
            ended_at=row.ended_at, error=_error(row.error),
            waits_for=row.waits_for if row.wake_at is not None else None, wake_at=row.wake_at,
        )
        for row in rows
    ]  # fmt: skip


def _conditions(
    rows: Sequence[NodeRow], edges: Sequence[EdgeRow], names: Mapping[int, str]
) -> dict[int, tuple[str, ...]]:
    joined: dict[int, list[str]] = {}
    found: dict[int, list[str]] = {}
    for edge in edges:
        if edge.joins:
            joined.setdefault(edge.child, []).append(_named(names, edge.parent))
        if edge.expects is not None:
            said = ".".join((_named(names, edge.parent), *map(str, edge.path or ())))
            found.setdefault(edge.child, []).append(f"{'if' if edge.expects else 'unless'} {said}")
    for row in rows:
        if row.quorum is not None and (parents := joined.get(row.number)):
            found.setdefault(row.number, []).insert(0, f"{row.quorum} of {named(parents)}")
    return {number: tuple(said) for number, said in found.items()}


def _named(names: Mapping[int, str], number: int) -> str:
    """The name of a node; its number where no node has it."""
    return names.get(number, f"#{number}")


def _state(row: NodeRow) -> NodeState:
    if row.state == "ENQUEUED" and row.task_state == "RUNNING":
        return NodeState.RUNNING
    return NodeState(row.state)


def _error(text: str | None) -> TaskError | None:
    return None if text is None else error_from_json(text)


def _stuck(found: StuckNode, *, problem: str | None = None) -> StuckWorkflow:
    return StuckWorkflow(
        workflow_id=found.workflow_id,
        workflow=found.workflow,
        node=found.node,
        task_id=found.task_id,
        what=found.what,
        problem=problem,
    )
