"""Statements that inspect, pause, resume, cancel and retry workflows, and that advance stuck ones."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.labels import NO_LABELS, Labels, encode_labels
from everbeat.domain.settings.units import When
from everbeat.domain.workflow.states import EndedNode, WorkflowRetryPlan, WorkflowState
from everbeat.store import rows
from everbeat.store.advance import step
from everbeat.store.inspection import LAST_ID, moment_or_age
from everbeat.store.plan import Plan, ask
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, booleans, integers, uuids
from everbeat.store.workflows import DEFAULT_LARGEST


class WorkflowRow(Struct, frozen=True, kw_only=True):
    """A workflow as it is stored. `result`, `error` and `labels` are JSON text. `counts` maps each state to the number of nodes in it."""

    id: UUID
    name: str
    key: str | None
    state: str
    on_error: str
    node_count: int
    output: int | None
    parent_id: UUID | None
    parent_node: int | None
    parent_task_id: UUID | None
    sent_at: datetime
    paused_at: datetime | None
    cancel_requested_at: datetime | None
    ended_at: datetime | None
    result: str | None
    error: str | None
    output_name: str | None
    counts: dict[str, int]
    labels: str | None = None


class NodeRow(Struct, frozen=True, kw_only=True):
    """A node, with data from its task or child workflow. `error` is JSON text."""

    number: int
    name: str
    kind: str
    state: str
    task: str | None
    task_id: UUID | None
    member_of: int | None
    members: int | None
    quorum: int | None
    iteration: int
    enqueued_at: datetime | None
    ended_at: datetime | None
    error: str | None
    task_state: str | None
    started_at: datetime | None
    attempt: int | None
    child_name: str | None
    child_state: str | None
    waits_for: str | None
    wake_at: datetime | None


class EdgeRow(Struct, frozen=True):
    """An edge as it is stored."""

    parent: int
    child: int
    joins: bool
    tolerates: bool
    path: Sequence[str]
    expects: bool | None
    state: str
    if_failed: bool


class StuckNode(Struct, frozen=True):
    """An overdue transition of a node, named by `what`. If `number` is None, the overdue transition is the end of the workflow."""

    workflow_id: UUID
    workflow: str
    number: int | None
    node: str | None
    task_id: UUID | None
    what: str


class StuckPage(Struct, frozen=True):
    """A page of the stuck nodes of live workflows. The next page starts after `next_after` (None: there is no next page)."""

    found: Sequence[StuckNode]
    next_after: UUID | None


class Retryable(Struct, frozen=True):
    """Whether a workflow can be retried.

    `is_done`: an earlier try of this call has already retried it. `other`: the id of another live workflow with the same key.
    """

    state: str
    is_child: bool
    is_done: bool
    other: UUID | None
    can: bool


class WorkflowEnd(Struct, frozen=True):
    """The state and the outcome of a workflow. `result` and `error` are JSON text."""

    id: UUID
    name: str
    state: str
    result: str | None
    error: str | None


def pause(workflow_id: UUID, *, channel: str) -> Statement[str | None]:
    """Pause a workflow. Return its previous state, or None if the workflow does not exist."""
    return Statement("workflow/pause_workflow", {"id": workflow_id, "channel": channel}, _first)


def resume(workflow_id: UUID, *, channel: str) -> Statement[str | None]:
    """Resume a workflow. Return its previous state, or None if the workflow does not exist."""
    return Statement("workflow/resume_workflow", {"id": workflow_id, "channel": channel}, _first)


def cancel(workflow_id: UUID, *, channel: str) -> Statement[str | None]:
    """Begin to cancel a workflow. Return its previous state, or None if the workflow does not exist."""
    return Statement("workflow/cancel_workflow", {"id": workflow_id, "channel": channel}, _first)


def retry_hold(workflow_id: UUID, *, call: UUID, from_node: str | None) -> Statement[Retryable | None]:
    """Lock a workflow for a retry. Return None if the workflow does not exist."""
    parameters = {"id": workflow_id, "call": call, "from_node": from_node}
    return Statement("workflow/hold_for_retry", parameters, rows.first(Retryable))


def retry_nodes(workflow_id: UUID) -> Statement[list[EndedNode]]:
    """Return, in order, the nodes of a workflow that is to be retried."""
    read = rows.each(rows.by_name(EndedNode, EndedNode.__struct_fields__))
    return Statement("workflow/list_nodes_to_retry", {"id": workflow_id}, read)


def retry(
    workflow_id: UUID,
    plans: Mapping[UUID, WorkflowRetryPlan],
    *,
    call: UUID,
    channel: str,
    largest: int | None = None,
) -> Statement[None]:
    """Restart nodes of a workflow and of its children, as `plans` specifies for each workflow.

    `largest` is the new limit on the size of a node's arguments. It takes effect only if it is larger than the old limit.
    """
    places = [
        (one, number, state, number in plan.emptied)
        for one, plan in plans.items()
        for number, state in plan.states.items()
    ]
    parameters = {
        "id": workflow_id, "call": call, "channel": channel, "largest": largest,
        "default": DEFAULT_LARGEST, "children": uuids(plans.keys() - {workflow_id}),
        "workflows": uuids([place[0] for place in places]), "numbers": integers([place[1] for place in places]),
        "states": [place[2] for place in places], "emptied": booleans([place[3] for place in places]),
    }  # fmt: skip
    return Statement("workflow/retry_workflow", parameters, rows.nothing)


def info(ids: Iterable[UUID]) -> Statement[list[WorkflowRow]]:
    """Return these workflows in their current state. Unknown ids are omitted."""
    return Statement(
        "workflow/read_workflow", {"ids": uuids(ids)}, lambda found: [_workflow(row) for row in found]
    )


class WorkflowQuery(Struct, frozen=True, kw_only=True):
    """The filters of a list of workflows. None matches all of them. `before` is the last id of the previous page.

    If `roots` is set, only workflows without a parent match.
    """

    name: str | None = None
    state: str | None = None
    key: str | None = None
    parent: UUID | None = None
    roots: bool = True
    before: UUID | None = None
    since: When | None = None
    until: When | None = None
    labels: Labels = NO_LABELS
    label_keys: Sequence[str] = ()

    def scope(self, *, oldest: UUID | None = None) -> dict[str, Any]:
        """Return the parameters of the filters that an index serves. `oldest` is the lowest id that can match (None: any)."""
        return {
            "parent": self.parent,
            "is_live": self.state is not None and not WorkflowState(self.state).is_final,
            "first_id": oldest or UUID(int=0),
            "last_id": LAST_ID if self.before is None else UUID(int=max(self.before.int - 1, 0)),
        }


def listing(
    query: WorkflowQuery, *, limit: int, most: int | None = None, oldest: UUID | None = None
) -> Statement[list[WorkflowRow]]:
    """List the newest workflows that match, without their results. `oldest` is the lowest id that the list reads (None: no bound).

    Of the newest workflows, or of those that have not ended if only these can match, at most `most` are examined (None: all).
    """
    until = moment_or_age(query.until)
    parameters = {
        "name": query.name, "state": query.state, "key": query.key, "roots": query.roots, "limit": limit, "until": until["since"],
        "before_ms": until["within_ms"], "labels": encode_labels(query.labels), "label_keys": [*query.label_keys] or None, "most": most,
    } | query.scope(oldest=oldest) | moment_or_age(query.since)  # fmt: skip
    return Statement("workflow/list_workflows", parameters, lambda found: [_workflow(row) for row in found])


def last_examined(query: WorkflowQuery, *, most: int) -> Statement[UUID | None]:
    """Return the id of the last workflow that a list examines, or None if it examines all. A list examines at most `most` of them."""
    return Statement(
        "workflow/find_last_examined",
        query.scope() | {"most": most},
        lambda found: found[0][0] if len(found) == 2 else None,
    )


def ends(ids: Iterable[UUID]) -> Statement[dict[UUID, WorkflowEnd]]:
    """Return the states and outcomes of these workflows. Unknown ids are omitted."""
    return Statement(
        "workflow/list_ends", {"ids": uuids(ids)}, lambda found: {row[0]: WorkflowEnd(*row) for row in found}
    )


def nodes(workflow_id: UUID, *, after: int = -1, limit: int = 10_000) -> Statement[list[NodeRow]]:
    """Return the nodes of a workflow in order, starting after node number `after`."""
    read = rows.each(rows.by_name(NodeRow, NodeRow.__struct_fields__))
    return Statement("workflow/list_nodes", {"id": workflow_id, "after": after, "limit": limit}, read)


def edges(workflow_id: UUID) -> Statement[list[EdgeRow]]:
    """Return the edges of a workflow."""
    return Statement("workflow/list_edges", {"id": workflow_id}, rows.each(EdgeRow))


def node(workflow_id: UUID, name: str) -> Statement[tuple[int, str, str] | None]:
    """Return the number, state and type of the node with this name, or None if the workflow has no such node."""
    return Statement(
        "workflow/read_node",
        {"id": workflow_id, "name": name},
        lambda found: (found[0][0], found[0][1], found[0][2]) if found else None,
    )


def node_names(workflow_id: UUID) -> Statement[list[str]]:
    """Return the names of a workflow's first 1,000 nodes."""
    return Statement("workflow/list_node_names", {"id": workflow_id}, rows.first_column)


def stuck(*, after: UUID, limit: int, grace_ms: int, only: UUID | None = None) -> Statement[StuckPage]:
    """Check up to `limit` live workflows for overdue transitions. Transitions that are overdue by less than `grace_ms` are ignored."""
    parameters = {"after": after, "limit": limit, "grace_ms": grace_ms, "only": only}

    def read(found: Sequence[Row]) -> StuckPage:
        nodes = [StuckNode(*row[1:]) for row in found if row[0] == "found"]
        return StuckPage(nodes, next((row[1] for row in found if row[0] == "page"), None))

    return Statement("workflow/find_stuck", parameters, read)


def mark_for_review(ids: Iterable[UUID]) -> Statement[None]:
    """Mark these workflows, so that the next step checks each of them as a whole."""
    return Statement("workflow/mark_for_review", {"ids": uuids(ids)}, rows.nothing)


def restore(ids: Iterable[UUID]) -> Statement[None]:
    """Insert a FAILED node in place of each deleted node for which other nodes are still waiting."""
    return Statement("workflow/restore_nodes", {"ids": uuids(ids)}, rows.nothing)


def forget(*, limit: int) -> Statement[None]:
    """Delete outbox entries whose workflow has been deleted. Only the oldest `limit` entries are examined."""
    return Statement("workflow/forget_deleted", {"limit": limit}, rows.nothing)


def _first(found: Sequence[Row]) -> str | None:
    return found[0][0] if found else None


def _workflow(row: Row) -> WorkflowRow:
    named = dict(zip(WorkflowRow.__struct_fields__, row, strict=True))
    counts = named["counts"]
    named["counts"] = {} if counts is None else msgspec.json.decode(counts, type=dict[str, int])
    return WorkflowRow(**named)


PAGE: Final = 200
GRACE_MS: Final = 10_000
"""A transition that became due less than this many milliseconds ago is considered to be in progress."""
_FIRST: Final = UUID(int=0)
_UNCHANGED: Final = "the step that should have fixed this changed nothing"
NEVER_MENDED: Final = {
    "NOTHING_MOVES": "its open nodes are waiting for each other, and none of them can begin"
}


def problem_of(one: StuckNode) -> str:
    """Return why this node is still stuck after a step."""
    return NEVER_MENDED.get(one.what, _UNCHANGED)


def find_stuck(*, grace_ms: int, only: UUID | None = None) -> Plan[list[StuckNode]]:
    """Return the stuck nodes of all live workflows, or of the workflow `only`."""
    found: list[StuckNode] = []
    after: UUID | None = _FIRST
    while after is not None:
        page = yield from ask(stuck(after=after, limit=PAGE, grace_ms=grace_ms, only=only))
        found.extend(page.found)
        after = page.next_after
    return found


def move_on(ids: Collection[UUID], *, channel: str) -> Plan[None]:
    """Check all nodes of these workflows and advance the workflows by one step. Run this plan in one transaction."""
    yield from ask(restore(ids))
    yield from ask(mark_for_review(ids))
    yield from step(channel=channel, ids=ids)
