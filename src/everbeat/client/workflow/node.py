"""The public classes for workflow nodes, their placeholders and their dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, cast

from msgspec import inspect as types
from msgspec.structs import replace

from everbeat.client.workflow.draft import Condition, Draft, NodeDraft
from everbeat.domain.settings.checks import public, whole
from everbeat.domain.settings.settings import place_of_caller, refused, shown
from everbeat.domain.settings.units import Duration, to_milliseconds
from everbeat.domain.task.outcome import Completed, Failed
from everbeat.domain.workflow.graph import Wanted, is_node_name, wrong_name
from everbeat.domain.workflow.placeholders import Placeholder, Promise, promise_of
from everbeat.domain.workflow.shapes import NONE, shape_of
from everbeat.errors import PlaceholderUsed
from everbeat.errors.wording import amount, nearest

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Join: TypeAlias = Literal["all", "any"] | int

_delay_ms: Final = whole(0, 100 * 365 * 86_400_000)
_WHOLE_LIST: Final = (
    "it is built when all members have ended; pass nodes[0].result of one of them, or the whole list"
)
_WHOLE_OUTCOME: Final = (
    "it is Completed or Failed only when the workflow runs; match it in the task that takes it"
)


class _Waiting:
    """Base class of Node and Nodes, with their name, dependencies and conditions."""

    __slots__ = ("_draft",)

    def __init__(self, draft: NodeDraft) -> None:
        self._draft = draft

    @property
    def name(self) -> str:
        """Return the node's name in the workflow: the name set with `named`, or the name of its task.

        If several nodes run the same task, `#2`, `#3` and so on are appended from the second node on.
        """
        return self._draft.name

    def after(self, *nodes: Node[Any] | Nodes[Any], join: Join = "all") -> Self:
        """Make this node also wait for other nodes to complete. `join` is "all", "any", or the number of nodes that must complete.

        A map counts as one node; pass `*nodes` to count its members. Only one call per node can use a `join` other than "all".

        notified = wf.add(notify, order).after(paid, shipped, join="any")
        """
        parents = {parent.source: None for each in nodes if (parent := self._parent(each)) is not None}
        match join:
            case "all":
                for draft in self._waiting():
                    draft.required |= parents
            case "any":
                self._join(nodes, parents, 1)
            case int() if not isinstance(join, bool):
                self._join(nodes, parents, join)
            case _:
                guess = nearest(join, ["all", "any"]) if isinstance(join, str) else None
                fix = f"use {guess!r}" if guess else 'use "all", "any" or a number of nodes'
                rule = 'must be "all", "any" or a number'
                self._draft.problem("UNKNOWN_CHOICE", shown(join), rule, fix, what="join")
        return self

    def allow_failed(self) -> Self:
        """Run this node even if nodes passed to `after` fail or are skipped. To learn which ones, take their `.outcome` as arguments."""
        for draft in self._waiting():
            draft.tolerates = True
        return self

    def when(self, condition: bool, /) -> Self:
        """Run this node only if `condition`, a bool result of another node, is True. Otherwise, skip it.

        wf.add(refund, order).when(checked.result.is_paid)
        """
        return self._depend(condition, expects=True, what="when")

    def unless(self, condition: bool, /) -> Self:
        """Run this node only if `condition`, a bool result of another node, is False. Otherwise, skip it."""
        return self._depend(condition, expects=False, what="unless")

    def when_failed(self, *nodes: Node[Any] | Nodes[Any]) -> Self:
        """Run this node only if at least one of these nodes ends FAILED, EXPIRED or CANCELLED. Otherwise, skip it.

        Use it to handle a failure, and to undo what other nodes have done. The workflow still fails, unless success cases say otherwise.

        wf.add(refund, paid.result).when_failed(packed, shipped)
        """
        parents = [
            parent.source for each in nodes if (parent := self._parent(each, what="when_failed")) is not None
        ]
        if not nodes:
            rule, fix = (
                "names no node, so the node would never run",
                "name the nodes whose failure it handles",
            )
            self._draft.problem("EMPTY", "()", rule, fix, what="when_failed")
        elif parents:
            for draft in self._waiting():
                draft.handle(parents)
        return self

    def delayed(self, by: Duration, /) -> Self:
        """Start this node's task at the earliest `by` after the node became ready: after the nodes that it waits for have ended.

        wf.add(remind, order).after(shipped).delayed("3d")
        """
        delay_ms = _delay_ms(to_milliseconds(by, subject="delayed"), subject="delayed")
        for draft in self._waiting():
            if draft.task is None:
                rule = "delays a node that runs a workflow, and only tasks can be delayed"
                fix = "delay the first nodes of the inner workflow"
                draft.problem("NOT_A_TASK", shown(by), rule, fix, what="delayed")
            else:
                draft.task = replace(draft.task, delay_ms=delay_ms)
        return self

    def named(self, name: str, /) -> Self:
        """Set the node's name in the workflow. The members of a map are named `name[0]`, `name[1]` and so on."""
        if is_node_name(name):
            self._draft.owner.rename(self._draft, name)
        else:
            problem = wrong_name(shown(name), subject=f"name of {self._draft.title}", where=place_of_caller())
            self._draft.owner.take([problem])
        return self

    def _waiting(self) -> list[NodeDraft]:
        """Return the drafts to which conditions and parents are added."""
        return [self._draft]

    def _parent(self, given: object, *, what: str = "after") -> NodeDraft | None:
        if not isinstance(given, _Waiting):
            rule = f"must be a node, not a {type(given).__name__}"
            fix = "pass the result of wf.add(...) or wf.map(...)"
            self._draft.problem("WRONG_TYPE", shown(given), rule, fix, what=what)
            return None
        other = given._draft
        if other.owner is not self._draft.owner:
            rule = f"is of another workflow, not of {self._draft.owner.name!r}"
            fix = "add both to the same workflow"
            self._draft.problem("OTHER_WORKFLOW", shown(given), rule, fix, what=what)
            return None
        return other

    def _join(self, given: tuple[object, ...], parents: dict[int, None], count: int) -> None:
        if len(given) == 1 and isinstance(given[0], Nodes):
            rule = "counts the map as one node, so there is no choice"
            fix = "write .after(*nodes, join=...) to count its members"
            self._draft.problem("IMPOSSIBLE_QUORUM", shown(count), rule, fix, what="join")
        else:
            for draft in self._waiting():
                draft.join(parents, count)

    def _depend(self, condition: object, *, expects: bool, what: str) -> Self:
        promise = promise_of(condition)
        draft = self._draft
        if promise is None:
            rule = "must be the result of a node, which is known when the workflow runs"
            fix = f"write .{what}(node.result), or decide with `if` what to add"
            draft.problem("WRONG_TYPE", shown(condition), rule, fix, what=what)
        elif draft.owner.is_ours(draft, promise, what=what):
            misfit = _unfit_condition(promise)
            if misfit is not None:
                draft.problem("WRONG_TYPE", repr(promise), *misfit, what=what)
            else:
                path = tuple(map(str, promise.path))
                for each in self._waiting():
                    each.conditions.append(Condition(promise.origin.source, path, expects))
        return self


@public
class Node(_Waiting, Generic[R_co]):
    """A node of a workflow. `result` and `outcome` are placeholders to pass as arguments to other nodes.

    packed = wf.add(pack, paid.result)
    notified = wf.add(notify, packed.outcome)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Node {self.name!r} of workflow {self._draft.owner.name!r}>"

    @property
    def result(self) -> R_co:
        """Return a placeholder for the node's result.

        A node that takes the placeholder, or an attribute or item of it, waits until this node completes.
        """
        return cast(R_co, Placeholder(Promise(origin=self._draft, shape=self._draft.shape)))

    @property
    def outcome(self) -> Completed[R_co] | Failed:
        """Return a placeholder for the node's outcome, `Completed` or `Failed`. A node that takes it waits until this node finishes."""
        shape = outcome_shape(NONE if self._draft.ignores_result else self._draft.shape)
        promise = Promise(origin=self._draft, wants="outcome", shape=shape, whole=_WHOLE_OUTCOME)
        return cast(Completed[R_co], Placeholder(promise))

    def read_result(self, text: str, /) -> R_co:
        """Return the node's result, decoded from JSON. Raises PayloadError if the result no longer matches its annotation."""
        return cast(R_co, self._draft.read(text))


@public
class Nodes(_Waiting, Generic[R_co]):
    """The nodes of a map, in the order of its items. Each method applies to all of them.

    If the items are the result of a node, the nodes do not exist until the workflow runs.
    """

    __slots__ = ("_members",)

    def __init__(self, draft: NodeDraft, members: list[NodeDraft] | None) -> None:
        super().__init__(draft)
        self._members = members

    def __repr__(self) -> str:
        count = "" if self._members is None else f", {amount(len(self._members), 'node')}"
        return f"<Nodes {self.name!r} of workflow {self._draft.owner.name!r}{count}>"

    @property
    def results(self) -> list[R_co]:
        """Return a placeholder for the list of the nodes' results. A node that takes it waits until all of these nodes complete."""
        return cast(list[R_co], self._placeholder("value", self._draft.shape))

    @property
    def outcomes(self) -> list[Completed[R_co] | Failed]:
        """Return a placeholder for the list of the nodes' outcomes. A node that takes it waits until all of these nodes finish."""
        assert isinstance(self._draft.shape, types.ListType)
        item = NONE if self._draft.ignores_result else self._draft.shape.item_type
        shape = types.ListType(outcome_shape(item))
        return cast(list[Completed[R_co] | Failed], self._placeholder("outcome", shape))

    def read_result(self, text: str, /) -> list[R_co]:
        """Return the nodes' results, decoded from a JSON list. Raises PayloadError if a result no longer matches its annotation."""
        return cast(list[R_co], self._draft.read(text))

    def __len__(self) -> int:
        return len(self._known("measured"))

    def __iter__(self) -> Iterator[Node[R_co]]:
        return map(Node[R_co], self._known("looped over"))

    def __getitem__(self, index: int, /) -> Node[R_co]:
        return Node(self._known("taken apart")[index])

    def _placeholder(self, wants: Wanted, shape: types.Type) -> Placeholder:
        return Placeholder(Promise(origin=self._draft, wants=wants, shape=shape, whole=_WHOLE_LIST))

    def _known(self, use: str) -> list[NodeDraft]:
        if self._members is None:
            fix = "pass its .results or .outcomes, or give wf.map a list that is known when the workflow is built"
            raise PlaceholderUsed(repr(self), use, fix=fix)
        return self._members

    def _waiting(self) -> list[NodeDraft]:
        # A map without members must itself wait, because its dependents wait only for the map.
        return self._members or [self._draft]


def results(nodes: Iterable[Node[R]], /) -> list[R]:
    """Return a list of placeholders for the results of several nodes, to pass as an argument.

    total = wf.add(sum_all, results([first, second]))
    """
    return nodes.results if isinstance(nodes, Nodes) else [node.result for node in nodes]


def outcomes(nodes: Iterable[Node[R]], /) -> list[Completed[R] | Failed]:
    """Return a list of placeholders for the outcomes of several nodes, to pass as an argument."""
    return nodes.outcomes if isinstance(nodes, Nodes) else [node.outcome for node in nodes]


def first(nodes: Iterable[Node[R]], /) -> R:
    """Return a placeholder for the result of the node that completes first. A node that takes it waits until one of them completes.

    The other nodes continue. If none of them completes, the node that takes the placeholder is skipped. Raises ConfigurationError if
    `nodes` is empty or contains something other than nodes of one workflow with the same type of result.

    shown = wf.add(show, first([from_cache, from_source]))
    """
    given = [*nodes]
    drafts = [each._draft for each in given if isinstance(each, Node)]
    odd = next((each for each in given if not isinstance(each, Node)), None)
    if odd is not None or not drafts:
        rule = (
            "names no node"
            if odd is None
            else f"contains a {type(odd).__name__}, and only nodes have results"
        )
        fix = "pass nodes that wf.add(...) returned; of a map over a known list, pass [*nodes]"
        raise refused(
            odd if odd is not None else given, subject="first", code="WRONG_TYPE", rule=rule, fix=fix
        )
    shapes = [draft.shape for draft in drafts]
    if any(shape != shapes[0] for shape in shapes) or any(
        draft.owner is not drafts[0].owner for draft in drafts
    ):
        rule = "are nodes of different workflows, or have results of different types"
        fix = "name nodes of one workflow whose tasks return the same type"
        raise refused(given, subject="first", code="WRONG_TYPE", rule=rule, fix=fix)
    among = tuple(dict.fromkeys(draft.source for draft in drafts))
    return cast(R, Placeholder(Promise(origin=drafts[0], among=among, shape=shapes[0])))


def draft_of(given: object, owner: Draft) -> NodeDraft | None:
    """Return the draft of `given` if it is a node of this workflow, else None."""
    return given._draft if isinstance(given, _Waiting) and given._draft.owner is owner else None


def outcome_shape(value: types.Type) -> types.Type:
    """Return the shape of `Completed[T] | Failed`, given the shape of T."""
    union = shape_of(Completed[Any] | Failed)
    assert isinstance(union, types.UnionType)
    completed, failed = union.types
    assert isinstance(completed, types.StructType)
    (field,) = completed.fields
    return types.UnionType((replace(completed, fields=(replace(field, type=value),)), failed))


def _unfit_condition(promise: Promise) -> tuple[str, str] | None:
    """Return the violated rule and a fix if the placeholder cannot be a condition, else None."""
    is_bool = isinstance(promise.shape, types.BoolType) or (
        isinstance(promise.shape, types.LiteralType) and set(map(type, promise.shape.values)) == {bool}
    )
    if not is_bool:
        fix = "annotate it bool where it is returned, or add a task that returns a bool"
        return f"is {promise.type_name}, and a condition must be annotated bool", fix
    if promise.among:
        fix = "add a task that takes it and returns a bool"
        return "is the first of several results, and a condition must be the result of one node", fix
    if promise.origin.source < 0:
        fix = "add a task that takes it and returns a bool, or decide where the workflow is added"
        return "is an argument of the workflow, and a condition must be the result of a node", fix
    if not all(isinstance(step, str) for step in promise.path):
        fix = "return it in a separate field, or add a task that returns it"
        return "is an item of a list in JSON, and a condition can only be found by field names", fix
    return None
