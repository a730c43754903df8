"""Statements that start workflows and move them on. Each is one step; what a whole step of a workflow is, says `store.advance`.

What lives here: the statements. What may not: their order, and what is decided of a workflow's end (`domain.verdict`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.graph import Graph, Node, TaskSpec, encode
from everbeat.domain.payload_limit import DEFAULT_LIMIT, payload_limit
from everbeat.domain.verdict import Ended, Verdict
from everbeat.store.literals import booleans, integers, json_array, uuids
from everbeat.store.statement import Row, Statement, nothing

_NO_NODE: Final = -1
"""Nodes are numbered from 0."""

DEFAULT_LARGEST: Final = payload_limit(DEFAULT_LIMIT)
Place = tuple[UUID, int]
"""A node: the id of its workflow, and its number there."""


class StartedWorkflow(Struct, frozen=True):
    """The answer to a start: the workflow's id, which is another's where a live one already had the key."""

    id: UUID
    inserted: bool


class Locked(Struct, frozen=True):
    """A workflow that this transaction holds. `largest`: bytes of JSON that the arguments of one of its nodes can take."""

    id: UUID
    state: str
    on_error: str
    largest: int


class ReadyNode(Struct, frozen=True):
    """A node whose turn it is. `composed`: its arguments, items or graph are still to be put together."""

    workflow_id: UUID
    number: int
    kind: str
    composed: bool

    @property
    def place(self) -> Place:
        return self.workflow_id, self.number


class Happenings(Struct, frozen=True):
    """What one look into the outbox brought: nodes that may have something to do, nodes that are READY, nodes that ended badly, and which
    workflows are to be looked at as a whole."""

    look: Sequence[Place]
    ready: Sequence[ReadyNode]
    failed: Sequence[Place]
    whole: Sequence[UUID]


class Composition(Struct, frozen=True):
    """How a node's arguments are put together: JSON texts."""

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
    parent: Place | None = None,
    largest: int | None = None,
) -> Statement[StartedWorkflow | None]:
    """Starts a workflow; None when one with the same key ended at this very moment (start again). `given`: its input, as JSON text;
    `largest`: bytes of JSON that the arguments of one node can take, with what is handed on."""
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
        "largest": largest,
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
        "paths": json_array([msgspec.json.encode(edge.path or ()) for edge, _ in edges]),
    }  # fmt: skip

    def read(found: Sequence[Row]) -> StartedWorkflow | None:
        return None if found[0][0] is None else StartedWorkflow(_id(found[0][0]), bool(found[0][1]))

    return Statement("workflow/insert", parameters, read)


def _first_state(node: Node, waits: bool) -> str:
    if node.kind == "map" and node.members is not None:
        return "ENQUEUED"
    return "PENDING" if waits else "READY"


def _options(kind: TaskSpec) -> bytes | None:
    options = {
        name: value
        for name in ("policy", "flags", "good_until", "serial")
        if (value := getattr(kind, name)) is not None
    }
    return msgspec.json.encode(options) if options else None


def _next(numbers: dict[tuple[int, int], int], ends: tuple[int, int]) -> int:
    number = numbers.get(ends, 0)
    numbers[ends] = number + 1
    return number


def happened() -> Statement[bool]:
    """Whether anything stands in the outbox."""
    return Statement("workflow/happened", {}, lambda found: bool(found[0][0]))


def lock(
    *, look: int, limit: int, only: UUID | None = None, without: Iterable[UUID] = ()
) -> Statement[list[Locked]]:
    """Takes up to `limit` workflows of which something stands among the oldest `look` entries of the outbox, and nobody is at them:
    none but this one, or none of those."""
    parameters = {"look": look, "limit": limit, "only": only, "without": uuids(without)}
    return Statement("workflow/lock", parameters, _locked)


def lock_these(ids: Iterable[UUID]) -> Statement[list[Locked]]:
    """Takes these workflows, but for those that somebody is at."""
    return Statement("workflow/lock_these", {"ids": uuids(ids)}, _locked)


def _locked(found: Sequence[Row]) -> list[Locked]:
    return [Locked(row[0], row[1], row[2], DEFAULT_LARGEST if row[3] is None else row[3]) for row in found]


def absorb(ids: Iterable[UUID], *, limit: int) -> Statement[Happenings]:
    """Makes of up to `limit` entries of the outbox what they mean for nodes and edges of locked workflows."""

    def read(found: Sequence[Row]) -> Happenings:
        by_kind: dict[str, list[Place]] = {"look": [], "failed": [], "whole": []}
        ready: list[ReadyNode] = []
        for what, workflow_id, number, kind, composed in found:
            if what == "ready":
                ready.append(ReadyNode(workflow_id, number, kind, composed))
            else:
                by_kind[what].append((workflow_id, number))
        whole = [place[0] for place in by_kind["whole"]]
        return Happenings(by_kind["look"], ready, by_kind["failed"], whole)

    return Statement("workflow/absorb", {"ids": uuids(ids), "limit": limit}, read)


def resolve(places: Sequence[Place]) -> Statement[list[ReadyNode]]:
    """Skips what cannot run any more, ends maps whose members have, and answers the nodes whose turn it is."""
    return Statement("workflow/resolve", placed(places), lambda found: [ReadyNode(*row) for row in found])


def hold(places: Sequence[Place], *, again: Sequence[bool]) -> Statement[None]:
    """Notes that nodes are ready; `again`: and that they are to be enqueued soon."""
    return Statement("workflow/hold", {**placed(places), "again": booleans(again)}, nothing)


def compositions(places: Sequence[Place]) -> Statement[list[Composition]]:
    """How the arguments of these nodes are put together."""
    return Statement(
        "workflow/compositions", placed(places), lambda found: [Composition(*row) for row in found]
    )


def enqueue(places: Sequence[Place], args: Sequence[str | None], *, channel: str) -> Statement[int]:
    """Sends the tasks of nodes, with these arguments (None: those of the node); answers how many."""
    parameters = {**placed(places), "args": json_array([_bytes(each) for each in args]), "channel": channel}
    return Statement("workflow/enqueue", parameters, lambda found: int(found[0][0]))


def expand(place: Place, args: Sequence[str]) -> Statement[None]:
    """Makes the members of a map, one for each of the arguments."""
    parameters = {"id": place[0], "number": place[1], "args": json_array([each.encode() for each in args])}
    return Statement("workflow/expand", parameters, nothing)


def adopt(place: Place) -> Statement[UUID | None]:
    """Gives a node the id of its child; None: it has one."""
    return Statement(
        "workflow/adopt", {"id": place[0], "number": place[1]}, lambda found: found[0][0] if found else None
    )


def refuse(place: Place, *, code: str, message: str) -> Statement[None]:
    """Fails a node that cannot begin."""
    parameters = {"id": place[0], "number": place[1], "code": code, "message": message}
    return Statement("workflow/refuse", parameters, nothing)


def pause_failed(ids: Iterable[UUID]) -> Statement[list[UUID]]:
    """Pauses those that are to pause when a node fails; answers them."""
    return Statement("workflow/pause_failed", {"ids": uuids(ids)}, lambda found: [row[0] for row in found])


def let_go(ids: Iterable[UUID]) -> Statement[set[UUID]]:
    """Lets children go on that were paused with these workflows; answers those with a child that another transaction holds."""
    return Statement("workflow/let_go", {"ids": uuids(ids)}, _waiting)


def withdraw(ids: Iterable[UUID], *, channel: str) -> Statement[set[UUID]]:
    """Takes back what paused and cancelled workflows have under way and has not begun; asks what runs to end, if cancelled. Answers as
    `let_go`."""
    return Statement("workflow/withdraw", {"ids": uuids(ids), "channel": channel}, _waiting)


def _waiting(found: Sequence[Row]) -> set[UUID]:
    return set(found[0][0])


def ended(ids: Iterable[UUID]) -> Statement[list[Ended]]:
    """Those of locked workflows in which nothing is left to wait for, and what they came to."""
    return Statement("workflow/ended", {"ids": uuids(ids)}, lambda found: [_ended(row) for row in found])


def finish(verdicts: Sequence[Verdict], *, channel: str) -> Statement[None]:
    """Ends workflows."""
    parameters = {
        "ids": uuids([one.workflow_id for one in verdicts]), "states": [one.state for one in verdicts],
        "results": json_array([_bytes(one.result) for one in verdicts]),
        "errors": json_array([_bytes(one.error) for one in verdicts]), "channel": channel,
    }  # fmt: skip
    return Statement("workflow/finish", parameters, nothing)


def _ended(row: Row) -> Ended:
    short = row[11] or ()
    try:
        success = () if row[3] is None else msgspec.json.decode(row[3], type=tuple[tuple[int, ...], ...])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        # A policy that cannot be read is not met: the workflow ends FAILED instead of never.
        success, short = ((_NO_NODE,),), (*short, _NO_NODE)
    return Ended(
        workflow_id=row[0], state=row[1], on_error=row[2], success=success, output=row[4], output_state=row[5],
        output_result=row[6], output_is_map=bool(row[7]), bad_name=row[8], bad_state=row[9], bad_error=row[10], short=short,
        output_name=row[12], output_error=row[13],
    )  # fmt: skip


def placed(places: Sequence[Place]) -> dict[str, object]:
    """Nodes as parameters of a statement."""
    return {"ids": uuids([place[0] for place in places]), "numbers": integers([place[1] for place in places])}


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def _id(value: object) -> UUID:
    # The connection may be the user's, and psycopg2 gives UUIDs as text unless it was told.
    return value if isinstance(value, UUID) else UUID(str(value))
