"""Statements that start and advance workflows, and read the results of their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.settings.units import DEFAULT_LIMIT, payload_limit
from everbeat.domain.workflow.graph import Graph, GraphNode, TaskSpec, encode
from everbeat.domain.workflow.states import EndedWorkflow, WorkflowVerdict
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, booleans, integers, json_array, uuids

_NO_NODE: Final = -1
"""No node has this number, because nodes are numbered from 0."""

DEFAULT_LARGEST: Final = payload_limit(DEFAULT_LIMIT)
NodePlace = tuple[UUID, int]
"""The key of a node: its workflow's id and its number in that workflow."""


class StartedWorkflow(Struct, frozen=True):
    """The reply to `insert`: the id of the new workflow, or of the live workflow that already had the key."""

    id: UUID
    inserted: bool


class Locked(Struct, frozen=True):
    """A workflow that this transaction has locked. `largest` is the maximum size of one node's arguments in bytes of JSON."""

    id: UUID
    state: str
    on_error: str
    largest: int


class ReadyNode(Struct, frozen=True):
    """A node that can start. `composed`: its arguments, items or graph still have to be composed."""

    workflow_id: UUID
    number: int
    kind: str
    composed: bool

    @property
    def place(self) -> NodePlace:
        return self.workflow_id, self.number


class OutboxPage(Struct, frozen=True):
    """The events of one outbox page: nodes to check, READY nodes, failed nodes, and workflows to check as a whole."""

    nodes: Sequence[NodePlace]
    ready: Sequence[ReadyNode]
    failed: Sequence[NodePlace]
    whole: Sequence[UUID]


class Composition(Struct, frozen=True):
    """The JSON texts from which a node's arguments are composed."""

    workflow_id: UUID
    number: int
    kind: str
    name: str
    args: str | None
    template: str | None
    items: str | None
    graph: str | None


def insert(
    workflow_id: UUID,
    graph: Graph,
    *,
    channel: str,
    key: str | None = None,
    given: bytes | None = None,
    parent: NodePlace | None = None,
    parent_task: UUID | None = None,
    largest: int | None = None,
    joined: bool = False,
    context: str | None = None,
) -> Statement[StartedWorkflow | None]:
    """Start a workflow. Return None if a workflow with the same key has just ended; in that case, repeat the statement.

    `given` is the workflow's input as JSON text. `parent_task` is the task that starts the workflow. `largest` is the maximum size of one
    node's arguments in bytes of JSON, including the results that the node receives. If `joined` is set, the statement is part of a larger
    transaction and itself notifies the workers. The start of a child needs no hint. `context` is the carrier of a traced start.
    """
    kinds: dict[TaskSpec, int] = {}
    specs = [
        None if node.task is None else kinds.setdefault(node.task, len(kinds) + 1) for node in graph.nodes
    ]
    waiting = {edge.child for edge in graph.edges}
    numbers: dict[tuple[int, int], int] = {}
    edges = [(edge, _next(numbers, (edge.parent, edge.child))) for edge in graph.edges]
    parameters = {
        "id": workflow_id, "name": graph.name, "key": key, "on_error": graph.on_error, "channel": channel,
        "success": msgspec.json.encode(graph.success).decode() if graph.success else None,
        "output": graph.output, "node_count": len(graph.nodes), "input": None if given is None else given.decode(),
        "parent_id": None if parent is None else parent[0], "parent_node": None if parent is None else parent[1],
        "parent_task_id": parent_task, "largest": largest, "joined": joined, "labels": graph.labels, "context": context,
        "tasks": [kind.name for kind in kinds], "queues": [kind.queue for kind in kinds],
        "priorities": [kind.priority for kind in kinds], "options": json_array([_options(kind) for kind in kinds]),
        "node_names": [node.name for node in graph.nodes], "node_kinds": [node.kind for node in graph.nodes],
        "states": [_first_state(node, number in waiting) for number, node in enumerate(graph.nodes)],
        "members_of": integers([node.member_of for node in graph.nodes]),
        "first_members": integers([node.first_member for node in graph.nodes]),
        "members": integers([node.members for node in graph.nodes]), "quorums": integers([node.quorum for node in graph.nodes]),
        "specs": integers(specs), "args": json_array([_bytes(node.args) for node in graph.nodes]),
        "templates": json_array([None if node.template is None else encode(node.template) for node in graph.nodes]),
        "items": json_array([None if node.items is None else encode(node.items) for node in graph.nodes]),
        "graphs": json_array([None if node.graph is None else encode(node.graph) for node in graph.nodes]),
        "parents": integers([edge.parent for edge, _ in edges]), "children": integers([edge.child for edge, _ in edges]),
        "numbers": integers([number for _, number in edges]), "joins": booleans([edge.joins for edge, _ in edges]),
        "tolerates": booleans([edge.tolerates for edge, _ in edges]),
        "expects": "{" + ",".join("NULL" if edge.expects is None else str(edge.expects) for edge, _ in edges) + "}",
        "if_failed": booleans([edge.if_failed for edge, _ in edges]),
        "paths": json_array([msgspec.json.encode(edge.path or ()) for edge, _ in edges]),
    }  # fmt: skip

    def read(found: Sequence[Row]) -> StartedWorkflow | None:
        return None if found[0][0] is None else StartedWorkflow(rows.as_uuid(found[0][0]), bool(found[0][1]))

    hints = () if joined or parent is not None else ("w",)
    return Statement("workflow/insert_workflow", parameters, read, hints=hints)


def _first_state(node: GraphNode, waits: bool) -> str:
    if node.kind == "map" and node.members is not None:
        return "ENQUEUED"
    return "PENDING" if waits else "READY"


def _options(kind: TaskSpec) -> bytes | None:
    options = {
        name: value
        for name in ("policy", "flags", "good_until", "serial", "delay_ms", "gates", "costs", "labels")
        if (value := getattr(kind, name)) is not None
    }
    return msgspec.json.encode(options) if options else None


def _next(numbers: dict[tuple[int, int], int], ends: tuple[int, int]) -> int:
    number = numbers.get(ends, 0)
    numbers[ends] = number + 1
    return number


def happened() -> Statement[bool]:
    """Return whether the outbox contains any entries."""
    return Statement("workflow/check_outbox", {}, rows.only(bool))


def lock(
    *, entries: int, limit: int, only: UUID | None = None, without: Iterable[UUID] = ()
) -> Statement[list[Locked]]:
    """Lock up to `limit` workflows that have an entry among the oldest `entries` outbox entries.

    Skip workflows that another transaction has locked.

    `only` restricts the search to one workflow and those nested in it. `without` lists workflows to exclude.
    """
    parameters = {"entries": entries, "limit": limit, "only": only, "without": uuids(without)}
    return Statement("workflow/lock_workflows", parameters, _locked)


def lock_these(ids: Iterable[UUID]) -> Statement[list[Locked]]:
    """Lock the given workflows, except those that another transaction has locked. Return the locked workflows."""
    return Statement("workflow/lock_given_workflows", {"ids": uuids(ids)}, _locked)


def _locked(found: Sequence[Row]) -> list[Locked]:
    return [Locked(row[0], row[1], row[2], DEFAULT_LARGEST if row[3] is None else row[3]) for row in found]


def absorb(ids: Iterable[UUID], *, limit: int) -> Statement[OutboxPage]:
    """Apply up to `limit` outbox entries to the nodes and edges of locked workflows."""

    def read(found: Sequence[Row]) -> OutboxPage:
        by_kind: dict[str, list[NodePlace]] = {"look": [], "failed": [], "whole": []}
        ready: list[ReadyNode] = []
        for what, workflow_id, number, kind, composed in found:
            if what == "ready":
                ready.append(ReadyNode(workflow_id, number, kind, composed))
            else:
                by_kind[what].append((workflow_id, number))
        whole = [place[0] for place in by_kind["whole"]]
        return OutboxPage(by_kind["look"], ready, by_kind["failed"], whole)

    return Statement("workflow/record_ended_nodes", {"ids": uuids(ids), "limit": limit}, read)


def resolve(places: Sequence[NodePlace]) -> Statement[list[ReadyNode]]:
    """Skip nodes that can no longer run, complete maps whose members have ended, and return the nodes that can start."""
    return Statement("workflow/resolve_nodes", placed(places), rows.each(ReadyNode))


def hold(places: Sequence[NodePlace], *, again: Sequence[bool]) -> Statement[None]:
    """Record that nodes are ready but not yet enqueued. If a node's `again` is True, the next step enqueues the node."""
    return Statement("workflow/hold_nodes", {**placed(places), "again": booleans(again)}, rows.nothing)


def compositions(places: Sequence[NodePlace]) -> Statement[list[Composition]]:
    """Return the texts from which the arguments of these nodes are composed."""
    return Statement("workflow/list_compositions", placed(places), rows.each(Composition))


def enqueue(places: Sequence[NodePlace], args: Sequence[str | None], *, channel: str) -> Statement[int]:
    """Send the tasks of these nodes with the given arguments (None: the node's stored arguments). Return the number of tasks sent."""
    parameters = {
        **placed(places),
        "args": json_array([_bytes(each) for each in args]),
        "channel": channel,
    }
    return Statement("workflow/enqueue_nodes", parameters, lambda found: int(found[0][0]))


def expand(place: NodePlace, args: Sequence[str]) -> Statement[None]:
    """Create the members of a map, one for each element of `args`."""
    parameters = {"id": place[0], "number": place[1], "args": json_array([each.encode() for each in args])}
    return Statement("workflow/expand_map", parameters, rows.nothing)


def adopt(place: NodePlace) -> Statement[UUID | None]:
    """Assign the id of a child workflow to a node and return the id. Return None if the node already has a child."""
    return Statement(
        "workflow/adopt_child",
        {"id": place[0], "number": place[1]},
        lambda found: found[0][0] if found else None,
    )


def refuse(place: NodePlace, *, code: str, message: str) -> Statement[None]:
    """Fail a node that cannot start, with this error code and message."""
    parameters = {"id": place[0], "number": place[1], "code": code, "message": message}
    return Statement("workflow/refuse_nodes", parameters, rows.nothing)


def pause_failed(ids: Iterable[UUID]) -> Statement[list[UUID]]:
    """Pause the given workflows that have `on_error='pause'`. Return the ids of the paused workflows."""
    return Statement("workflow/pause_failed_workflow", {"ids": uuids(ids)}, rows.first_column)


def let_go(ids: Iterable[UUID]) -> Statement[set[UUID]]:
    """Resume the children that were paused together with these workflows.

    Return the ids of the workflows with a child that another transaction has locked.
    """
    return Statement("workflow/resume_children", {"ids": uuids(ids)}, _waiting)


def withdraw(ids: Iterable[UUID], *, channel: str) -> Statement[set[UUID]]:
    """Withdraw the tasks of paused and cancelled workflows if their code has not started.

    In cancelled workflows, also request the cancellation of running tasks. Return the ids of the workflows with a child that another
    transaction has locked.
    """
    return Statement("workflow/withdraw_tasks", {"ids": uuids(ids), "channel": channel}, _waiting)


def _waiting(found: Sequence[Row]) -> set[UUID]:
    return set(found[0][0])


def ended(ids: Iterable[UUID]) -> Statement[list[EndedWorkflow]]:
    """Return those of the locked workflows that have nothing left to wait for, with their outcomes."""
    return Statement(
        "workflow/find_ended_workflows", {"ids": uuids(ids)}, lambda found: [_ended(row) for row in found]
    )


def finish(verdicts: Sequence[WorkflowVerdict], *, channel: str) -> Statement[None]:
    """Move workflows to their terminal states and store their outcomes."""
    parameters = {
        "ids": uuids([one.workflow_id for one in verdicts]), "states": [one.state for one in verdicts],
        "results": json_array([_bytes(one.result) for one in verdicts]),
        "errors": json_array([_bytes(one.error) for one in verdicts]), "channel": channel,
    }  # fmt: skip
    return Statement("workflow/finish_workflows", parameters, rows.nothing)


def _ended(row: Row) -> EndedWorkflow:
    short = row[11] or ()
    try:
        success = () if row[3] is None else msgspec.json.decode(row[3], type=tuple[tuple[int, ...], ...])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        # An unreadable success policy counts as not met. The workflow then ends as FAILED instead of never ending.
        success, short = ((_NO_NODE,),), (*short, _NO_NODE)
    return EndedWorkflow(
        workflow_id=row[0], state=row[1], on_error=row[2], success=success, output=row[4], output_state=row[5],
        output_result=row[6], output_is_map=bool(row[7]), bad_name=row[8], bad_state=row[9], bad_error=row[10], short=short,
        output_name=row[12], output_error=row[13],
    )  # fmt: skip


def placed(places: Sequence[NodePlace]) -> dict[str, object]:
    """Return the statement parameters for these nodes."""
    return {"ids": uuids([place[0] for place in places]), "numbers": integers([place[1] for place in places])}


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


class Source(Struct, frozen=True):
    """A node whose value is passed to other nodes, and the stored size of that value.

    `of` is the requested node: either this node itself or the map that contains it. In the map, this node is member number `place_in_map`.
    """

    workflow_id: UUID
    of: int
    number: int
    place_in_map: int | None
    state: str
    is_map: bool
    stored: int
    ended_at: datetime | None

    @property
    def place(self) -> NodePlace:
        return self.workflow_id, self.number


class Value(Struct, frozen=True):
    """The value of a node. If the node is a member of a map, `place` is its position in the map."""

    workflow_id: UUID
    number: int
    place: int | None
    state: str
    result: str | None
    error: str | None
    is_map: bool
    ended_at: datetime | None = None


def sources(places: Iterable[NodePlace]) -> Statement[list[Source]]:
    """Return the states of these nodes and the sizes of their values. For a map, also return those of its members."""
    return Statement("workflow/list_result_sizes", placed(list(places)), rows.each(Source))


def results(places: Sequence[NodePlace]) -> Statement[Sequence[tuple[UUID, int, str | None, str | None]]]:
    """Return the results and errors of these nodes, each with its workflow's id and its number."""
    return Statement("workflow/list_results", placed(places), lambda found: [(*row,) for row in found])


def values(places: Iterable[NodePlace]) -> Statement[list[Value]]:
    """Return the values of these nodes. For a map, also return the values of its members."""
    return Statement("workflow/list_values", placed(list(places)), rows.each(Value))
