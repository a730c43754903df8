"""Statements of whoever asks about workflows, stops them, and puts right what got stuck."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.reopening import EndedNode, Reopening
from everbeat.store.literals import booleans, integers, uuids
from everbeat.store.statement import Row, Statement, nothing
from everbeat.store.workflows import DEFAULT_LARGEST


class WorkflowRow(Struct, frozen=True, kw_only=True):
    """A workflow as it is stored; `result` and `error` are JSON text; `counts`: its nodes, by state."""

    id: UUID
    name: str
    key: str | None
    state: str
    on_error: str
    node_count: int
    output: int | None
    parent_id: UUID | None
    parent_node: int | None
    sent_at: datetime
    paused_at: datetime | None
    cancel_requested_at: datetime | None
    ended_at: datetime | None
    result: str | None
    error: str | None
    output_name: str | None
    counts: dict[str, int]


class NodeRow(Struct, frozen=True, kw_only=True):
    """A node with what its task, or its child, says; `error` is JSON text."""

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


class StuckNode(Struct, frozen=True):
    """Something that should have happened and has not: `what`; without a number it is the workflow's end."""

    workflow_id: UUID
    workflow: str
    number: int | None
    node: str | None
    task_id: UUID | None
    what: str


class StuckPage(Struct, frozen=True):
    """What a look at some of the live workflows found; the next page begins after `next_after` (None: there is none)."""

    found: Sequence[StuckNode]
    next_after: UUID | None


class Retryable(Struct, frozen=True):
    """Whether a workflow can be retried. `is_done`: this very call has done it; `other`: which other lives with its key."""

    state: str
    is_child: bool
    is_done: bool
    other: UUID | None
    can: bool


class WorkflowEnd(Struct, frozen=True):
    """The state of a workflow and how it ended; `result` and `error` are JSON text."""

    id: UUID
    name: str
    state: str
    result: str | None
    error: str | None


def pause(workflow_id: UUID, *, channel: str) -> Statement[str | None]:
    """Pauses; answers the state before; None: no such workflow."""
    return Statement("workflow/pause", {"id": workflow_id, "channel": channel}, _first)


def resume(workflow_id: UUID, *, channel: str) -> Statement[str | None]:
    """Resumes; answers as `pause`."""
    return Statement("workflow/resume", {"id": workflow_id, "channel": channel}, _first)


def cancel(workflow_id: UUID, *, channel: str) -> Statement[str | None]:
    """Begins to cancel; answers as `pause`."""
    return Statement("workflow/cancel", {"id": workflow_id, "channel": channel}, _first)


def retry_hold(workflow_id: UUID, *, call: UUID, from_node: str | None) -> Statement[Retryable | None]:
    """Locks a workflow that is to be retried; None: no such workflow."""
    parameters = {"id": workflow_id, "call": call, "from_node": from_node}
    return Statement("workflow/retry_hold", parameters, lambda found: Retryable(*found[0]) if found else None)


def retry_nodes(workflow_id: UUID) -> Statement[list[EndedNode]]:
    """The nodes of a workflow that is to be retried, in order."""
    names = EndedNode.__struct_fields__
    return Statement(
        "workflow/retry_nodes",
        {"id": workflow_id},
        lambda found: [EndedNode(**dict(zip(names, row, strict=True))) for row in found],
    )


def retry(
    workflow_id: UUID,
    plans: Mapping[UUID, Reopening],
    *,
    call: UUID,
    channel: str,
    largest: int | None = None,
) -> Statement[None]:
    """Begins nodes of a workflow and of its children again, as was decided for each. `largest`: what a node can be given, if it is more."""
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
    return Statement("workflow/retry", parameters, nothing)


def info(ids: Iterable[UUID]) -> Statement[list[WorkflowRow]]:
    """These workflows as they stand; unknown ids are missing."""
    return Statement("workflow/info", {"ids": uuids(ids)}, lambda found: [_workflow(row) for row in found])


def listing(
    *, name: str | None, state: str | None, key: str | None, roots: bool, limit: int
) -> Statement[list[WorkflowRow]]:
    """The latest workflows, without their results; `roots`: those that are nobody's child."""
    parameters = {"name": name, "state": state, "key": key, "roots": roots, "limit": limit}
    return Statement("workflow/list", parameters, lambda found: [_workflow(row) for row in found])


def ends(ids: Iterable[UUID]) -> Statement[dict[UUID, WorkflowEnd]]:
    """The states of these workflows and how they ended; unknown ids are missing."""
    return Statement(
        "workflow/ends", {"ids": uuids(ids)}, lambda found: {row[0]: WorkflowEnd(*row) for row in found}
    )


def nodes(workflow_id: UUID, *, after: int = -1, limit: int = 10_000) -> Statement[list[NodeRow]]:
    """The nodes of a workflow from the one behind `after` on, in order."""
    names = NodeRow.__struct_fields__
    return Statement(
        "workflow/nodes",
        {"id": workflow_id, "after": after, "limit": limit},
        lambda found: [NodeRow(**dict(zip(names, row, strict=True))) for row in found],
    )


def edges(workflow_id: UUID) -> Statement[list[EdgeRow]]:
    """The edges of a workflow."""
    return Statement("workflow/edges", {"id": workflow_id}, lambda found: [EdgeRow(*row) for row in found])


def node(workflow_id: UUID, name: str) -> Statement[tuple[int, str, str] | None]:
    """Number, state and kind of the node of this name; None: there is none."""
    return Statement(
        "workflow/node",
        {"id": workflow_id, "name": name},
        lambda found: (found[0][0], found[0][1], found[0][2]) if found else None,
    )


def node_names(workflow_id: UUID) -> Statement[list[str]]:
    """The names of a workflow's first 1,000 nodes."""
    return Statement("workflow/node_names", {"id": workflow_id}, lambda found: [row[0] for row in found])


def stuck(*, after: UUID, limit: int, grace_ms: int, only: UUID | None = None) -> Statement[StuckPage]:
    """Looks at up to `limit` live workflows for what should have happened and has not; what moved in the last `grace_ms` is left out."""
    parameters = {"after": after, "limit": limit, "grace_ms": grace_ms, "only": only}

    def read(found: Sequence[Row]) -> StuckPage:
        nodes = [StuckNode(*row[1:]) for row in found if row[0] == "found"]
        return StuckPage(nodes, next((row[1] for row in found if row[0] == "page"), None))

    return Statement("workflow/stuck", parameters, read)


def look(ids: Iterable[UUID]) -> Statement[None]:
    """Has workflows looked at as a whole."""
    return Statement("workflow/look", {"ids": uuids(ids)}, nothing)


def restore(ids: Iterable[UUID]) -> Statement[None]:
    """Writes a FAILED node in place of each that is waited for and whose row was deleted."""
    return Statement("workflow/restore", {"ids": uuids(ids)}, nothing)


def forget(*, limit: int) -> Statement[None]:
    """Drops what happened to workflows that are gone, of the oldest `limit` entries of the outbox."""
    return Statement("workflow/forget", {"limit": limit}, nothing)


def _first(found: Sequence[Row]) -> str | None:
    return found[0][0] if found else None


def _workflow(row: Row) -> WorkflowRow:
    named = dict(zip(WorkflowRow.__struct_fields__, row, strict=True))
    named["counts"] = {} if row[-1] is None else msgspec.json.decode(row[-1], type=dict[str, int])
    return WorkflowRow(**named)
