"""The draft of a workflow: the nodes added so far, and their problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec import inspect as types
from msgspec.structs import replace

from everbeat.domain.settings.settings import place_of_caller
from everbeat.domain.workflow.graph import (
    LONGEST_NAME,
    Edge,
    Graph,
    GraphNode,
    NodeKind,
    OnError,
    TaskSpec,
    Template,
    problems_of,
)
from everbeat.domain.workflow.placeholders import Composed, Placed, Promise
from everbeat.domain.workflow.shapes import fits, spelled
from everbeat.errors import ConfigurationError, Problem

_UNUSUAL: Final = re.compile(r"[^A-Za-z0-9_.:-]")


class Condition(Struct, frozen=True):
    """A condition for running a node: the bool at `path` in a parent's result must equal `expects`."""

    parent: int
    path: tuple[str, ...]
    expects: bool


class NodeDraft(Struct, kw_only=True, eq=False):
    """The draft of a node. `shape` is the shape of its result, `read` decodes this result from JSON, and `base` is its default name."""

    owner: Draft
    source: int
    base: str
    shape: types.Type
    read: Callable[[str], Any]
    kind: NodeKind = "task"
    task: TaskSpec | None = None
    composed: Composed = Composed()
    items: Template | None = None
    graph: Graph | None = None
    member_of: int | None = None
    members: int | None = None
    given_name: str | None = None
    placed: list[Placed] = field(default_factory=list)
    required: dict[int, None] = field(default_factory=dict)
    joining: dict[int, None] = field(default_factory=dict)
    quorum: int | None = None
    tolerates: bool = False
    conditions: list[Condition] = field(default_factory=list)
    handles: dict[int, None] = field(default_factory=dict)
    where: str | None = field(default_factory=place_of_caller)
    is_broken: bool = False
    ignores_result: bool = False

    @property
    def name(self) -> str:
        """Return the current name of the node."""
        return self.owner.names()[self.source]

    @property
    def title(self) -> str:
        """Return a description of the node for messages."""
        return f"node {self.name!r}"

    def problem(self, code: str, value: str, rule: str, fix: str, *, what: str = "") -> None:
        """Record a problem with this node, to be raised together with all other problems."""
        subject = f"{what}{' of ' if what else ''}{self.title}"
        self.owner.note(code, subject, value, rule, fix, where=place_of_caller())

    def join(self, parents: Iterable[int], count: int, *, what: str = "join") -> None:
        """Make this node wait for `count` of these nodes. Records a problem if it already waits for some nodes of another group."""
        group = dict.fromkeys(parents)
        if self.quorum is None or (group, count) == (self.joining, self.quorum):
            self.joining, self.quorum = group, count
        else:
            self._second_group(str(count), what=what)

    def handle(self, parents: Iterable[int]) -> None:
        """Run this node only if one of these nodes fails. Records a problem if it already handles failures."""
        group = dict.fromkeys(parents)
        if self.handles or (len(group) > 1 and self.quorum is not None):
            self._second_group(str(len(group)), what="when_failed")
            return
        self.handles = group
        if len(group) > 1:
            self.quorum = 1

    def _second_group(self, value: str, *, what: str) -> None:
        rule = "is the second group with a join; a node can have only one"
        fix = "name all of them in one .after(..., join=...) or .when_failed(...), or put a node between"
        self.problem("DUPLICATE", value, rule, fix, what=what)

    def edges(self) -> Iterator[Edge]:
        """Yield the edges to this node from the nodes that it waits for.

        There is one edge for each required parent, each parent in a join, each condition, and each node whose failure this node handles.
        """
        tolerates: dict[int, bool] = {}
        for placed in self.placed:
            parent = placed.promise.origin.source
            if parent >= 0 and not placed.promise.among:
                tolerates[parent] = tolerates.get(parent, True) and placed.promise.wants == "outcome"
        for parent in self.required:
            tolerates[parent] = tolerates.get(parent, True) and self.tolerates
        for parent, each in tolerates.items():
            yield Edge(parent, self.source, tolerates=each)
        for parent in self.joining:
            yield Edge(parent, self.source, tolerates=self.tolerates, joins=True)
        for condition in dict.fromkeys(self.conditions):
            yield Edge(condition.parent, self.source, path=condition.path, expects=condition.expects)
        for parent in self.handles:
            yield Edge(parent, self.source, joins=len(self.handles) > 1, if_failed=True)

    def node(self, name: str) -> GraphNode:
        """Return the node in its stored form."""
        return GraphNode(
            name=name,
            kind=self.kind,
            task=self.task,
            args=self.composed.args,
            template=None if self.is_broken else self.composed.template,
            items=None if self.is_broken else self.items,
            graph=self.graph,
            member_of=self.member_of,
            first_member=None if self.members is None else self.source + 1,
            members=self.members,
            quorum=self.quorum,
        )


class Draft:
    """The nodes added to one workflow so far, and all problems found."""

    def __init__(self, name: str, *, on_error: OnError, labels: str | None = None) -> None:
        self.name = name
        self.on_error = on_error
        self.labels = labels
        self.nodes: list[NodeDraft] = []
        self.cases: list[tuple[int, ...]] = []
        self._problems: list[Problem] = []
        self._names: list[str] | None = None

    def add(self, base: str, **facts: Any) -> NodeDraft:
        """Add a node and return its draft."""
        base = _UNUSUAL.sub("-", base.rpartition(".")[2])[: LONGEST_NAME - 20] or "node"
        node = NodeDraft(owner=self, source=len(self.nodes), base=base, **facts)
        self.nodes.append(node)
        self._names = None
        return node

    def rename(self, node: NodeDraft, name: str) -> None:
        """Set the name of a node."""
        node.given_name = name
        self._names = None

    def note(self, code: str, subject: str, value: str, rule: str, fix: str, *, where: str | None) -> None:
        """Record a problem."""
        self.take([Problem(code=code, subject=subject, value=value, rule=rule, fix=fix, where=where)])

    def take(self, problems: Iterable[Problem], *, where: str | None = None) -> None:
        """Record problems that were found elsewhere. Problems without a source location get the location `where`."""
        self._problems += [replace(each, where=each.where or where) for each in problems]

    def place(self, node: NodeDraft, placed: Sequence[Placed]) -> None:
        """Make a node wait for the nodes whose placeholders are in its arguments.

        Records a problem for each placeholder that has the wrong type or belongs to another workflow.
        """
        for each in placed:
            if not self.is_ours(node, each.promise, what=f"argument {each.place!r}"):
                node.is_broken = True
                continue
            node.placed.append(each)
            if each.promise.among:
                node.join(each.promise.among, 1, what=f"argument {each.place!r}")
            if not fits(each.promise.shape, each.expected):
                rule = f"is {spelled(each.promise.shape)}, but must be {spelled(each.expected)}"
                fix = _fix_of_type(each)
                node.problem("WRONG_TYPE", repr(each.promise), rule, fix, what=f"argument {each.place!r}")

    def is_ours(self, node: NodeDraft, promise: Promise, *, what: str) -> bool:
        """Return whether a placeholder belongs to this workflow. Records a problem if it does not."""
        if promise.origin.owner is self:
            return True
        fix = "add both to the same workflow, or pass it as an argument to a workflow within this one"
        node.problem("OTHER_WORKFLOW", repr(promise), _FOREIGN.format(self.name), fix, what=what)
        return False

    def names(self) -> list[str]:
        """Return the names of all nodes. A node that was not given a name has the name of its task.

        If several nodes run the same task, a number is appended from the second node on.
        """
        if self._names is None:
            self._names = self._named()
        return self._names

    def _named(self) -> list[str]:
        taken = {node.given_name for node in self.nodes}
        numbers: dict[str, int] = {}
        names: list[str] = []
        for node in self.nodes:
            name = node.given_name
            if node.member_of is not None:
                name = f"{names[node.member_of]}[{node.source - node.member_of - 1}]"
            while name is None:
                number = numbers[node.base] = numbers.get(node.base, 0) + 1
                proposed = node.base if number == 1 else f"{node.base}#{number}"
                name = None if proposed in taken else proposed
            names.append(name)
        return names

    def graph(self, output: NodeDraft | None, *, problems: Sequence[Problem] = ()) -> Graph:
        """Return the workflow in its stored form. Raises ConfigurationError, which lists all problems, if the workflow is invalid."""
        self._names = None
        graph = Graph(
            name=self.name,
            nodes=tuple(map(NodeDraft.node, self.nodes, self.names())),
            edges=tuple(edge for node in self.nodes for edge in node.edges()),
            on_error=self.on_error,
            success=tuple(self.cases),
            output=None if output is None else output.source,
            labels=self.labels,
        )
        places = {node.source: node.where for node in self.nodes}
        ignored = self._ignored(output)
        found = [
            *self._problems,
            *problems,
            *self._contradictions(),
            *ignored,
            *problems_of(graph, places=places),
        ]
        if found:
            raise ConfigurationError(found)
        return graph

    def _ignored(self, output: NodeDraft | None) -> Iterator[Problem]:
        """Yield a problem for each use of a result that its node does not store."""
        for node in self.nodes:
            used = [
                source
                for each in node.placed
                if each.promise.wants == "value"
                for source in each.promise.sources
            ]
            for source in dict.fromkeys([*used, *(each.parent for each in node.conditions)]):
                if source >= 0 and self.nodes[source].ignores_result:
                    yield _result_ignored(self.nodes[source], user=node.title, where=node.where)
        if output is not None and output.ignores_result:
            yield _result_ignored(output, user=f"the output of workflow {self.name!r}", where=output.where)

    def _contradictions(self) -> Iterator[Problem]:
        for node in self.nodes:
            order = {**node.required, **node.joining}
            values = [each for each in node.placed if _is_value(each)]
            lost = next((each for each in values if each.promise.origin.source in order or not order), None)
            if node.tolerates and lost is not None:
                yield Problem(
                    code="CONTRADICTION",
                    subject=f"allow_failed of {node.title}",
                    value=repr(lost.promise),
                    rule=f"would not exist if {lost.promise.origin.title} failed, and argument {lost.place!r} needs it",
                    fix="take .outcome instead of .result there, or leave out .allow_failed()",
                    where=node.where,
                )
            failed = next((each for each in values if each.promise.origin.source in node.handles), None)
            if failed is not None:
                yield Problem(
                    code="CONTRADICTION",
                    subject=f"when_failed of {node.title}",
                    value=repr(failed.promise),
                    rule=f"does not exist if {failed.promise.origin.title} failed, and argument {failed.place!r} needs it",
                    fix="take .outcome instead of .result there",
                    where=node.where,
                )
            expected = {(each.parent, each.path): each.expects for each in node.conditions}
            if any(expected[each.parent, each.path] is not each.expects for each in node.conditions):
                yield Problem(
                    code="CONTRADICTION",
                    subject=f"conditions of {node.title}",
                    value="when and unless",
                    rule="require the same value to be True and False, so the node would never run",
                    fix="leave one of them out",
                    where=node.where,
                )


def _result_ignored(node: NodeDraft, *, user: str, where: str | None) -> Problem:
    return Problem(
        code="RESULT_IGNORED",
        subject=f"result of {node.title}",
        value=node.base,
        rule=f"is used by {user}, but its task has ignore_result=True, so the result is not stored",
        fix="register the task without ignore_result, or wait for the node with .after(...) or its .outcome",
        where=where,
    )


_FOREIGN: Final = "is not of workflow {!r}, which cannot know its value"


def _is_value(placed: Placed) -> bool:
    return placed.promise.wants == "value" and placed.promise.origin.source >= 0


def _fix_of_type(placed: Placed) -> str:
    if placed.promise.wants == "outcome":
        return "take .result, or annotate the parameter with Completed[...] | Failed"
    return "pass a value of the annotated type, or correct an annotation"
