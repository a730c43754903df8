"""Workflow graphs as data (nodes, edges and argument templates), and the checks that every graph must pass."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from everbeat.domain.labels import MOST_LABELS, NO_LABELS, decode_labels
from everbeat.domain.limit.model import NodeGate
from everbeat.domain.settings.units import spelled_size
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.errors import Problem
from everbeat.errors.wording import amount

NodeKind: TypeAlias = Literal["task", "workflow", "map"]
Wanted: TypeAlias = Literal["value", "outcome"]
OnError: TypeAlias = Literal["fail", "pause", "continue"]

INPUT: Final = -1
"""The `source` of a `Hole` that is filled with an argument of the workflow itself."""
_NO_ERROR: Final = '{"code":"RESULT_NOT_AVAILABLE","message":"it ended without an error"}'
_NO_RESULT: Final = '{"code":"RESULT_NOT_AVAILABLE","message":"it completed, but its result was deleted"}'


class ResultMissing(LookupError):
    """Raised if a completed node has no result, because its child workflow had no output or its result was deleted."""


ITEM: Final = -2
"""The `source` of a `Hole` that is filled with a map member's item."""


class Hole(Struct, frozen=True, array_like=True):
    """A place in a template for the result of node `source`, or for the part of the result at `path` (field names and list indexes).

    If `source` lists several nodes, the place is for the result of the one that completed first.

    If `wants` is "outcome", the whole outcome is inserted: `{"completed": value}` or `{"failed": {"code": ..., "message": ...,
    "data": ...}}`. For a map, a list with one entry per member is inserted, in item order. For `INPUT`, the path starts with
    the name of a parameter.
    """

    source: int | tuple[int, ...]
    wants: Wanted = "value"
    path: tuple[str | int, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        """Return all nodes whose result can fill the hole."""
        return (self.source,) if isinstance(self.source, int) else self.source


Template: TypeAlias = tuple[str | Hole, ...]


class TaskSpec(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The task of a node, with fields as in `NewTask`. `policy`, `flags` and `labels` are JSON text, and `good_until` is in ISO 8601 format.

    The keys of its `gates` are computed when the node is enqueued, because its arguments are not known before.
    """

    name: str
    queue: str
    priority: int = 0
    policy: str | None = None
    flags: str | None = None
    good_until: str | None = None
    serial: str | None = None
    delay_ms: int | None = None
    gates: tuple[NodeGate, ...] | None = None
    costs: tuple[int, ...] | None = None
    labels: str | None = None


class Edge(Struct, frozen=True, omit_defaults=True):
    """A dependency: `child` waits until `parent` has reached a terminal state.

    The edge is met if the parent is COMPLETED. If the edge `tolerates` failures, any terminal state of the parent meets it. If
    `expects` is set, the value at `path` in the parent's result must also equal `expects`. An edge with `if_failed` is met only if the
    parent is FAILED, EXPIRED or CANCELLED. Edges with `joins` count toward the child's quorum. All other edges must be met.
    """

    parent: int
    child: int
    tolerates: bool = False
    joins: bool = False
    path: tuple[str, ...] | None = None
    expects: bool | None = None
    if_failed: bool = False


class GraphNode(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A node of a workflow graph. Its number is its index in the graph.

    - A `task` has its arguments as JSON text in `args` if all of them are known, otherwise a `template`.
    - A `workflow` has the child workflow's `graph`, and its arguments in `args` or `template`.
    - A `map` finishes when its members have finished. Its members may be part of the graph: `members` nodes starting at
      `first_member`, each with `member_of` set. Otherwise `items` is a template with one hole, which is filled with a JSON list
      when the node becomes ready. Each list item then creates one member from `task` or `graph`, with the arguments in
      `template`. The template's `ITEM` hole is filled with the item.

    `quorum` is the number of edges with `joins` that must be met.
    """

    name: str
    kind: NodeKind = "task"
    task: TaskSpec | None = None
    args: str | None = None
    template: Template | None = None
    items: Template | None = None
    graph: Graph | None = None
    member_of: int | None = None
    first_member: int | None = None
    members: int | None = None
    quorum: int | None = None


class Graph(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The graph of a workflow to start. `output` is the number of the node whose value becomes the workflow's result.

    With `success` cases, the workflow is COMPLETED if all nodes of at least one case are COMPLETED. Without them, it is
    COMPLETED if no node failed. `labels` are its own labels as JSON text.
    """

    name: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[Edge, ...] = ()
    on_error: OnError = "fail"
    success: tuple[tuple[int, ...], ...] = ()
    output: int | None = None
    labels: str | None = None


class Known(Struct, frozen=True):
    """The terminal state of a node whose outcome fills holes. `result` and `error` are JSON text; `parts` lists the members of a map."""

    state: str
    result: str | None = None
    error: str | None = None
    parts: Sequence[Known] | None = None
    ended_at: datetime | None = None


def holes(template: Template) -> list[Hole]:
    """Return the holes of a template, in order."""
    return [part for part in template if isinstance(part, Hole)]


def fill(template: Template, known: Mapping[int, Known]) -> str:
    """Return the text of a template with its holes filled.

    Raises:
        LookupError: If a path does not exist in the result.
        ResultMissing: If a completed node has no result.
    """
    return "".join(
        part if isinstance(part, str) else _filling(part, _given(part, known)) for part in template
    )


def _given(hole: Hole, known: Mapping[int, Known]) -> Known:
    """Return the value for a hole: that of its node, or of the node that completed first."""
    if isinstance(hole.source, int):
        return known[hole.source]
    completed = [
        one for each in hole.source if (one := known.get(each)) is not None and one.state == "COMPLETED"
    ]
    return min(completed, key=_end, default=Known("SKIPPED"))


def _end(known: Known) -> float:
    return inf if known.ended_at is None else known.ended_at.timestamp()


def _filling(hole: Hole, known: Known) -> str:
    if known.parts is not None:
        if hole.wants == "outcome" and known.state != "COMPLETED" and not known.parts:
            # The map failed before its list existed. A failed item distinguishes this case from an empty list.
            return f'[{{"failed":{known.error or _NO_ERROR}}}]'
        return "[" + ",".join(_filling(hole, part) for part in known.parts) + "]"
    if hole.wants == "outcome":
        if known.state == "COMPLETED" and known.result is None:
            return f'{{"failed":{known.error or _NO_RESULT}}}'
        if known.state == "COMPLETED":
            return f'{{"completed":{known.result}}}'
        return f'{{"failed":{known.error or _NO_ERROR}}}'
    if known.result is None:
        raise ResultMissing(known.error or _NO_RESULT)
    return part_at(known.result, hole.path)


def part_at(text: str, path: Sequence[str | int]) -> str:
    """Return the part of a JSON value at `path`. The value and the part are JSON text. Raises LookupError if the path does not exist."""
    for step in path:
        try:
            if isinstance(step, int):
                text = _raw(msgspec.json.decode(text, type=list[msgspec.Raw])[step])
            else:
                text = _raw(msgspec.json.decode(text, type=dict[str, msgspec.Raw])[step])
        except (LookupError, msgspec.MsgspecError):
            raise LookupError(f"no {step!r} in {text[:80]}") from None
    return text


def items_of(text: str) -> list[str]:
    """Return the items of a JSON list, each as JSON text. Raises ValueError if the text is not a list."""
    try:
        return [_raw(each) for each in msgspec.json.decode(text, type=list[msgspec.Raw])]
    except msgspec.MsgspecError:
        raise ValueError(f"not a list: {text[:80]}") from None


def _raw(part: msgspec.Raw) -> str:
    return bytes(memoryview(part)).decode()


def encode(graph: Graph | Template) -> bytes:
    """Encode a graph or template as JSON for storage."""
    return msgspec.json.encode(graph)


def decode_graph(data: bytes | str) -> Graph:
    """Decode a graph from its stored JSON."""
    return msgspec.json.decode(data, type=Graph)


def decode_template(data: bytes | str) -> Template:
    """Decode a template from its stored JSON."""
    return msgspec.json.decode(data, type=Template)


LONGEST_NAME: Final = 128
DEEPEST: Final = 16
"""The maximum number of nested workflow levels, including the outermost."""

_NAME: Final = re.compile(rf"[A-Za-z0-9_.:-]{{1,{LONGEST_NAME}}}")
_NAME_RULE: Final = (
    f"must be 1 to {LONGEST_NAME} letters, digits, underscores, dots, colons or hyphens of ASCII"
)


def is_node_name(name: object) -> bool:
    """Return whether users can give a node this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def wrong_name(name: str, *, subject: str, where: str | None = None) -> Problem:
    """Return the problem that describes an invalid name."""
    fix = "use a name such as 'pay' or 'pay:eu'"
    return Problem(code="WRONG_NAME", subject=subject, value=name, rule=_NAME_RULE, fix=fix, where=where)


def problems_of(
    graph: Graph, *, places: Mapping[int, str | None] | None = None, largest: int = LARGEST_BYTES
) -> list[Problem]:
    """Return all problems of a graph. `places` maps each node to the `file:line` that added it. `largest` is the maximum JSON size in bytes."""
    checker = _Checker(graph, places or {})
    if not graph.nodes:
        return [checker.problem("EMPTY", "has no nodes", "add one with wf.add(task, ...)", value="nothing")]
    found = [*checker.outside()]
    if found:
        return found  # the other checks require that all nodes exist
    found = [*checker.twice(), *checker.impossible_quorums(), *checker.cycles()]
    size = len(encode(graph))
    if size > largest:
        rule = f"would take {size:,} bytes of JSON; at most {spelled_size(largest)} are stored"
        fix = "store large data elsewhere and send a reference to it, or start several workflows"
        found.append(checker.problem("TOO_LARGE", rule, fix, value=amount(len(graph.nodes), "node")))
    if (crowd := crowded_node(graph)) is not None:
        found.append(
            checker.problem("TOO_MANY_LABELS", f"has too many labels: {crowd}", "leave some labels out")
        )
    if depth(graph) > DEEPEST:
        rule = f"has {depth(graph)} levels of workflows within workflows; at most {DEEPEST} are allowed"
        found.append(checker.problem("TOO_DEEP", rule, "use tasks where workflows are not needed"))
    return found


def depth(graph: Graph) -> int:
    """Return the number of nested workflow levels in a graph, which is 1 if the graph contains no child workflows."""
    return 1 + max((depth(node.graph) for node in graph.nodes if node.graph is not None), default=0)


def crowded_node(graph: Graph, *, inherited: Mapping[str, str] = NO_LABELS) -> str | None:
    """Return why a node would have more labels than a task can have, or None. A node has its own labels and those that it inherits."""
    above = {**inherited, **decode_labels(graph.labels)}
    if len(above) > MOST_LABELS:
        return f"workflow {graph.name!r} would have {len(above)} labels, including those that it inherits; at most {MOST_LABELS} are allowed"
    for node in graph.nodes:
        if node.graph is not None and (deeper := crowded_node(node.graph, inherited=above)) is not None:
            return deeper
        if above and node.task is not None and node.task.labels is not None:
            total = len({**above, **decode_labels(node.task.labels)})
            if total > MOST_LABELS:
                return f"node {node.name!r} would have {total} labels, including those of its workflow; at most {MOST_LABELS} are allowed"
    return None


class _Checker:
    def __init__(self, graph: Graph, places: Mapping[int, str | None]) -> None:
        self._graph = graph
        self._places = places

    def problem(
        self, code: str, rule: str, fix: str, *, node: int | None = None, value: str | None = None
    ) -> Problem:
        subject = f"workflow {self._graph.name!r}"
        if node is not None:
            subject = f"node {self._graph.nodes[node].name!r} of {subject}"
        shown = value if value is not None else amount(len(self._graph.nodes), "node")
        where = None if node is None else self._places.get(node)
        return Problem(code=code, subject=subject, value=shown, rule=rule, fix=fix, where=where)

    def outside(self) -> Iterator[Problem]:
        """Yield a problem for each reference to a node that does not exist."""
        count = len(self._graph.nodes)
        named = [
            *((f"an edge from {edge.parent} to {edge.child}", edge.parent) for edge in self._graph.edges),
            *((f"an edge from {edge.parent} to {edge.child}", edge.child) for edge in self._graph.edges),
            *(("a success case", number) for case in self._graph.success for number in case),
            *(("the output", number) for number in [self._graph.output] if number is not None),
        ]
        for user, number in named:
            if not 0 <= number < count:
                rule = f"is not one of {amount(count, 'node')}, but {user} names it"
                yield self.problem("UNKNOWN_NODE", rule, "name a node of this workflow", value=str(number))
        for index, node in enumerate(self._graph.nodes):
            for hole in _sources(node):
                if hole >= count or hole < ITEM or (hole == ITEM and node.kind != "map"):
                    rule = f"takes the result of node {hole}, which does not exist"
                    yield self.problem("UNKNOWN_NODE", rule, "name a node of this workflow", node=index)

    def twice(self) -> Iterator[Problem]:
        """Yield a problem for each name that several nodes share."""
        counts = Counter(node.name for node in self._graph.nodes)
        for index, node in enumerate(self._graph.nodes):
            if counts[node.name] > 1 and node.name in counts:
                rule = f"is the name of {counts.pop(node.name)} nodes"
                fix = "give each another name with .named(...), or let everbeat name them"
                yield self.problem("DUPLICATE", rule, fix, node=index, value=repr(node.name))

    def impossible_quorums(self) -> Iterator[Problem]:
        """Yield a problem for each node whose quorum is less than one or exceeds the number of its parents."""
        joining = Counter(edge.child for edge in self._graph.edges if edge.joins)
        for index, node in enumerate(self._graph.nodes):
            if node.quorum is None:
                if joining[index]:
                    rule = f"waits for some of {joining[index]} parents without a quorum"
                    yield self.problem("IMPOSSIBLE_QUORUM", rule, "give a quorum", node=index, value="None")
            elif not 1 <= node.quorum <= joining[index]:
                rule = f"must be from 1 to {joining[index]}, the number of parents that join"
                fix = "wait for fewer, or name more parents; in .after(*nodes, join=...) each member of a map counts"
                yield self.problem("IMPOSSIBLE_QUORUM", rule, fix, node=index, value=f"join={node.quorum}")

    def cycles(self) -> Iterator[Problem]:
        """Yield a problem for the first cycle, with the names of its nodes in order."""
        path = _cycle(_children(self._graph))
        if path:
            names = " -> ".join(self._graph.nodes[index].name for index in [*path, path[0]])
            rule = "is a cycle: each of these nodes would wait for itself"
            fix = "remove one of these .after(...) or .when_failed(...) calls"
            yield self.problem("CYCLE", rule, fix, node=path[0], value=names)


def _sources(node: GraphNode) -> Iterator[int]:
    templates: Sequence[Template | None] = (node.template, node.items)
    for template in templates:
        if template is not None:
            yield from (each for hole in holes(template) for each in hole.sources if each != INPUT)


def _children(graph: Graph) -> list[list[int]]:
    """Return, for each node, the nodes that wait for it: its children and, for a map member, the map."""
    children: list[list[int]] = [[] for _ in graph.nodes]
    for edge in _all_edges(graph):
        children[edge.parent].append(edge.child)
    return children


def _all_edges(graph: Graph) -> Iterator[Edge]:
    yield from graph.edges
    for index, node in enumerate(graph.nodes):
        if node.member_of is not None:
            yield Edge(index, node.member_of)


def _cycle(children: Sequence[Sequence[int]]) -> list[int]:
    """Return the nodes of one cycle in order, or an empty list. The search is not recursive, because a chain can have thousands of nodes."""
    done = [False] * len(children)
    position = dict[int, int]()
    for start in range(len(children)):
        path: list[int] = []
        waiting = [] if done[start] else [iter([start])]
        while waiting:
            following = next(waiting[-1], None)
            if following is None:
                waiting.pop()
                if path:
                    left = path.pop()
                    done[left] = True
                    del position[left]
            elif following in position:
                return path[position[following] :]
            elif not done[following]:
                position[following] = len(path)
                path.append(following)
                waiting.append(iter(children[following]))
    return []
