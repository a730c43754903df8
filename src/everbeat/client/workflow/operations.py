"""Operations on one workflow, identified by its id: status, nodes, pause, resume, cancel and retry."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, Literal, TypeAlias
from uuid import UUID, uuid4

import msgspec
from msgspec import Struct

from everbeat.domain.drawing.picture import MOST_NAMED
from everbeat.domain.labels import decode_labels
from everbeat.domain.settings.checks import one_of
from everbeat.domain.task.outcome import error_from_json
from everbeat.domain.workflow.states import (
    EndedNode,
    NodeInfo,
    NodeState,
    StuckWorkflow,
    WorkflowInfo,
    WorkflowPage,
    WorkflowRetry,
    WorkflowRetryPlan,
    WorkflowState,
    plan_retry,
)
from everbeat.errors import (
    DatabaseError,
    DatabaseReadOnly,
    DatabaseUnreachable,
    TaskError,
    UnknownName,
    WorkflowNotFound,
    WorkflowNotRetryable,
)
from everbeat.errors.wording import some
from everbeat.store import history
from everbeat.store import workflow_control as store
from everbeat.store.advance import StepTimedOut, step
from everbeat.store.plan import Plan, ask, together
from everbeat.store.statement import Statement
from everbeat.store.workflow_control import (
    GRACE_MS,
    NEVER_MENDED,
    EdgeRow,
    NodeRow,
    StuckNode,
    WorkflowRow,
    find_stuck,
    move_on,
    problem_of,
)

_MOST_STEPS: Final = 20
"""The maximum number of workflow steps that a call performs itself. Workers perform the remaining steps."""
_PAGE: Final = 10_000
_LONGEST_PROBLEM: Final = 500
_OUTAGES: Final = (DatabaseUnreachable, DatabaseReadOnly)
_BROKEN: Final = (DatabaseError, StepTimedOut, msgspec.MsgspecError, LookupError, ValueError, RecursionError)
"""The errors that a step raises if its rows contain a value that everbeat never writes, or its statement takes too long."""
_log = logging.getLogger("everbeat.client")


def status(workflow_id: UUID) -> Plan[WorkflowState]:
    """Return the state of a workflow. Raises WorkflowNotFound if the workflow does not exist."""
    found = yield from ask(store.ends([workflow_id]))
    if workflow_id not in found:
        raise WorkflowNotFound(workflow_id)
    return WorkflowState(found[workflow_id].state)


def info(workflow_id: UUID) -> Plan[WorkflowInfo]:
    """Return the current details of a workflow. Raises WorkflowNotFound if the workflow does not exist."""
    found = yield from ask(store.info([workflow_id]))
    if not found:
        raise WorkflowNotFound(workflow_id)
    return _info(found[0])


def listing(query: store.WorkflowQuery, *, limit: int, most: int | None = None) -> Plan[WorkflowPage]:
    """Return the latest workflows, newest first, without their results. At most `most` workflows are examined (None: all).

    If the page is not full because the search stopped early, the plan searches again down to a fixed id, as `examined_page` does.
    """
    found = yield from ask(store.listing(query, limit=limit, most=most))
    if most is not None and len(found) < limit:
        last = yield from ask(store.last_examined(query, most=most))
        if last is not None:
            found = yield from ask(store.listing(query, limit=limit, oldest=last))
            if len(found) < limit:
                return WorkflowPage(map(_info, found), examined=most, continue_before=last)
    return WorkflowPage(map(_info, found))


def nodes(workflow_id: UUID) -> Plan[list[NodeInfo]]:
    """Return the nodes of a workflow, in the order they were added. Raises WorkflowNotFound if the workflow does not exist."""
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
    # Members that are created at run time have higher numbers than all other nodes.
    rows.sort(key=lambda row: (row.number if row.member_of is None else row.member_of, row.number))
    return _nodes(rows, edges)


def pause(workflow_id: UUID, *, channel: str) -> Plan[WorkflowState]:
    """Pause a running workflow and its children. Return the new state. Raises WorkflowNotFound if the workflow does not exist."""
    return (yield from _ordered(store.pause(workflow_id, channel=channel), workflow_id, channel))


def resume(workflow_id: UUID, *, channel: str) -> Plan[WorkflowState]:
    """Resume a paused workflow. Return the new state. Raises WorkflowNotFound if the workflow does not exist."""
    return (yield from _ordered(store.resume(workflow_id, channel=channel), workflow_id, channel))


def cancel(workflow_id: UUID, *, channel: str) -> Plan[WorkflowState]:
    """Cancel a workflow that has not ended. Return the new state. Raises WorkflowNotFound if the workflow does not exist."""
    return (yield from _ordered(store.cancel(workflow_id, channel=channel), workflow_id, channel))


def node_task(workflow_id: UUID, name: str) -> Plan[NodeRow]:
    """Return the node with this name. Raises WorkflowNotFound if the workflow does not exist, and UnknownName if the node does not."""
    found = yield from ask(store.node(workflow_id, name))
    if found is None:
        yield from status(workflow_id)
        names = yield from ask(store.node_names(workflow_id))
        raise UnknownName("node", [name], known=names)
    (row,) = yield from ask(store.nodes(workflow_id, after=found[0] - 1, limit=1))
    return row


def stuck(workflow_id: UUID, *, grace_ms: int = GRACE_MS) -> Plan[list[StuckWorkflow]]:
    """Return the overdue steps of this workflow without performing them."""
    found = yield from find_stuck(grace_ms=grace_ms, only=workflow_id)
    return [_stuck(each) for each in found]


def recover_stuck(
    *, channel: str, dry_run: bool, only: UUID | None = None, grace_ms: int = GRACE_MS
) -> Plan[list[StuckWorkflow]]:
    """Perform the overdue steps of live workflows, and return these steps. A failure in one workflow does not affect the others."""
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
    """Perform the next steps of a workflow after a command such as pause or cancel."""
    # The command is already stored, so a failed step does not fail this call. Workers retry the step, and `everbeat doctor` reports it.
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
        parent_task_id=row.parent_task_id,
        sent_at=row.sent_at, paused_at=row.paused_at, cancel_requested_at=row.cancel_requested_at, ended_at=row.ended_at,
        result=None if row.result is None else msgspec.json.decode(row.result), error=_error(row.error), labels=decode_labels(row.labels),
    )  # fmt: skip


def _nodes(rows: Sequence[NodeRow], edges: Sequence[EdgeRow]) -> list[NodeInfo]:
    names = {row.number: row.name for row in rows}
    needs: dict[int, list[str]] = {}
    conditions = _conditions(rows, edges, names)
    for edge in edges:
        needed = needs.setdefault(edge.child, [])
        # A row that was changed with SQL can refer to a node number that does not exist.
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
    handled = {edge.child for edge in edges if edge.if_failed}
    for edge in edges:
        if edge.if_failed and not edge.joins:
            found.setdefault(edge.child, []).append(f"if {_named(names, edge.parent)} fails")
        if edge.joins:
            joined.setdefault(edge.child, []).append(_named(names, edge.parent))
        if edge.expects is not None:
            said = ".".join((_named(names, edge.parent), *map(str, edge.path or ())))
            found.setdefault(edge.child, []).append(f"{'if' if edge.expects else 'unless'} {said}")
    for row in rows:
        if row.quorum is not None and (parents := joined.get(row.number)):
            shown = some(parents, limit=MOST_NAMED)
            said = f"if one of {shown} fails" if row.number in handled else f"{row.quorum} of {shown}"
            found.setdefault(row.number, []).insert(0, said)
    return {number: tuple(said) for number, said in found.items()}


def _named(names: Mapping[int, str], number: int) -> str:
    """Return the name of the node with this number, or the number itself if no node has it."""
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


CompletedNodes: TypeAlias = Literal["rerun", "keep"]


class _Decided(Struct, frozen=True):
    """The retry plans for a workflow and its children, and the names of the nodes to report."""

    plans: dict[UUID, WorkflowRetryPlan]
    again: tuple[str, ...]
    completed: tuple[str, ...]
    kept: tuple[str, ...]


def retry(
    workflow_id: UUID,
    *,
    channel: str,
    completed: CompletedNodes,
    from_node: str | None,
    dry_run: bool,
    largest: int,
) -> Plan[WorkflowRetry]:
    """Rerun failed nodes and the nodes downstream of them. `largest` is the maximum JSON size, in bytes, of a node's arguments.

    Raises WorkflowNotFound if the workflow does not exist, WorkflowNotRetryable if it cannot be retried, and UnknownName if it does not
    have the node `from_node`.
    """
    one_of("rerun", "keep")(completed, subject="retry.completed")
    call, decisions = uuid4(), list[_Decided]()

    def make() -> Plan[None]:
        found = yield from ask(store.retry_hold(workflow_id, call=call, from_node=from_node))
        if found is None:
            raise WorkflowNotFound(workflow_id)
        if found.is_done:
            return  # the reply to the first attempt was lost
        if not found.can:
            raise WorkflowNotRetryable(
                workflow_id, state=found.state, is_child=found.is_child, other=found.other
            )
        decided = yield from _decided(workflow_id, keep=completed == "keep", from_node=from_node)
        decisions.append(decided)
        if not dry_run:
            yield from ask(history.recall_workflows(decided.plans))
            yield from ask(
                store.retry(workflow_id, decided.plans, call=call, channel=channel, largest=largest)
            )

    yield from together(make)
    if not dry_run:
        yield from advanced(workflow_id, channel)
    decided = decisions[-1]
    state: WorkflowState = yield from status(workflow_id)
    return WorkflowRetry(
        state=state, again=decided.again, completed=decided.completed, kept=decided.kept, dry_run=dry_run
    )


def _decided(root: UUID, *, keep: bool, from_node: str | None) -> Plan[_Decided]:
    plans: dict[UUID, WorkflowRetryPlan] = {}
    names: tuple[list[str], list[str], list[str]] = ([], [], [])
    waiting = [(root, "")]
    while waiting:
        one, prefix = waiting.pop()
        nodes = yield from ask(store.retry_nodes(one))
        edges = yield from ask(store.edges(one))
        first = [] if prefix or from_node is None else [_numbered(nodes, from_node)]
        plan = plans[one] = plan_retry(
            nodes, ((edge.parent, edge.child) for edge in edges), keep=keep, first=first
        )
        named = {node.number: node.name for node in nodes}
        for found, numbers in zip(names, (plan.again, plan.completed, plan.kept), strict=True):
            found += [prefix + named[number] for number in numbers]
        waiting += [
            (child, f"{prefix}{named[number]}/")
            for number, child in plan.children.items()
            if child not in plans
        ]
    again, completed, kept = map(tuple, names)
    return _Decided(plans, again, completed, kept)


def _numbered(nodes: list[EndedNode], name: str) -> int:
    """Return the number of the node with this name. Raises UnknownName if no node has it."""
    for node in nodes:
        if node.name == name:
            return node.number
    raise UnknownName("node", [name], known=[node.name for node in nodes])
