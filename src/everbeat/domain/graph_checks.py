"""What makes a graph one that can run: all that is wrong with it, at once.

What lives here: rules that a graph can be held against by itself. What may not: types of what is handed on, and other rules of
building (`client.workflow`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from everbeat.domain.graph import INPUT, ITEM, Edge, Graph, Node, Template, encode, holes
from everbeat.domain.size import spelled
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.errors import Problem

LONGEST_NAME: Final = 128
DEEPEST: Final = 16
"""How many levels of workflows within workflows there may be, the outermost counted."""

_NAME: Final = re.compile(rf"[A-Za-z0-9_.:-]{{1,{LONGEST_NAME}}}")
_NAME_RULE: Final = (
    f"must be 1 to {LONGEST_NAME} letters, digits, underscores, dots, colons or hyphens of ASCII"
)


def is_node_name(name: object) -> bool:
    """Whether users may give a node this name."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def wrong_name(name: str, *, subject: str, where: str | None = None) -> Problem:
    """The problem of a name that is none."""
    fix = "use a name such as 'pay' or 'pay:eu'"
    return Problem(code="WRONG_NAME", subject=subject, value=name, rule=_NAME_RULE, fix=fix, where=where)


def problems_of(
    graph: Graph, *, places: Mapping[int, str | None] | None = None, largest: int = LARGEST_BYTES
) -> list[Problem]:
    """Everything that is wrong with a graph. `places`: where each node was added, as `file:line`; `largest`: bytes of JSON."""
    checker = _Checker(graph, places or {})
    if not graph.nodes:
        return [checker.problem("EMPTY", "has no nodes", "add one with wf.add(task, ...)", value="nothing")]
    found = [*checker.outside()]
    if found:
        return found  # nothing else can be said of a graph whose parts are not there
    found = [*checker.twice(), *checker.impossible_quorums(), *checker.cycles()]
    size = len(encode(graph))
    if size > largest:
        rule = f"would take {size:,} bytes of JSON; at most {spelled(largest)} are stored"
        fix = "keep large data elsewhere and send where it is, or start several workflows"
        found.append(checker.problem("TOO_LARGE", rule, fix, value=f"{len(graph.nodes):,} nodes"))
    if depth(graph) > DEEPEST:
        rule = f"has {depth(graph)} levels of workflows within workflows; there may be {DEEPEST}"
        found.append(checker.problem("TOO_DEEP", rule, "add tasks where workflows are not needed"))
    return found


def depth(graph: Graph) -> int:
    """The levels of a graph: 1 without workflows in it."""
    return 1 + max((depth(node.graph) for node in graph.nodes if node.graph is not None), default=0)


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
        shown = value if value is not None else f"{len(self._graph.nodes)} nodes"
        where = None if node is None else self._places.get(node)
        return Problem(code=code, subject=subject, value=shown, rule=rule, fix=fix, where=where)

    def outside(self) -> Iterator[Problem]:
        """Numbers of nodes that there are not."""
        count = len(self._graph.nodes)
        named = [
            *((f"an edge from {edge.parent} to {edge.child}", edge.parent) for edge in self._graph.edges),
            *((f"an edge from {edge.parent} to {edge.child}", edge.child) for edge in self._graph.edges),
            *(("a success case", number) for case in self._graph.success for number in case),
            *(("the output", number) for number in [self._graph.output] if number is not None),
        ]
        for what, number in named:
            if not 0 <= number < count:
                rule = f"is not one of the {count} nodes, but {what} names it"
                yield self.problem("UNKNOWN_NODE", rule, "name a node of this workflow", value=str(number))
        for index, node in enumerate(self._graph.nodes):
            for hole in _sources(node):
                if hole >= count or hole < ITEM or (hole == ITEM and node.kind != "map"):
                    rule = f"takes what node {hole} returns, which is not there"
                    yield self.problem("UNKNOWN_NODE", rule, "name a node of this workflow", node=index)

    def twice(self) -> Iterator[Problem]:
        """Names that more than one node has."""
        counts = Counter(node.name for node in self._graph.nodes)
        for index, node in enumerate(self._graph.nodes):
            if counts[node.name] > 1 and node.name in counts:
                rule = f"is the name of {counts.pop(node.name)} nodes"
                fix = "give each a name of its own with .named(...), or leave the naming to everbeat"
                yield self.problem("DUPLICATE", rule, fix, node=index, value=repr(node.name))

    def impossible_quorums(self) -> Iterator[Problem]:
        """Nodes that wait for more of their parents than they have, or for less than one."""
        joining = Counter(edge.child for edge in self._graph.edges if edge.joins)
        for index, node in enumerate(self._graph.nodes):
            if node.quorum is None:
                if joining[index]:
                    rule = f"waits for some of {joining[index]} parents, but not said how many"
                    yield self.problem("IMPOSSIBLE_QUORUM", rule, "give a quorum", node=index, value="None")
            elif not 1 <= node.quorum <= joining[index]:
                rule = f"must be from 1 to {joining[index]}, the number of parents that join"
                fix = "wait for fewer, or name more parents; of a map each member counts in .after(*nodes, join=...)"
                yield self.problem("IMPOSSIBLE_QUORUM", rule, fix, node=index, value=f"join={node.quorum}")

    def cycles(self) -> Iterator[Problem]:
        """The first cycle, as a path of names."""
        path = _cycle(_children(self._graph))
        if path:
            names = " -> ".join(self._graph.nodes[index].name for index in [*path, path[0]])
            rule = "is a cycle: each of these nodes would wait for itself"
            fix = "take out one .after(...) of these"
            yield self.problem("CYCLE", rule, fix, node=path[0], value=names)


def _sources(node: Node) -> Iterator[int]:
    templates: Sequence[Template | None] = (node.template, node.items)
    for template in templates:
        if template is not None:
            yield from (hole.source for hole in holes(template) if hole.source != INPUT)


def _children(graph: Graph) -> list[list[int]]:
    """Who waits for each node: its children, and of a member of a map that map."""
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
    """The nodes of one cycle in order, none if there is no cycle. Without recursion: a chain may have thousands of nodes."""
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
