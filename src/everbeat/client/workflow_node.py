"""What users hold of a node of a workflow: its placeholders, and what it waits for.

What lives here: `Node`, `Nodes`, `results`, `outcomes`. What may not: adding nodes (`workflow`), what they become (`workflow_draft`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, Generic, Literal, Self, TypeAlias, TypeVar, cast

from msgspec import inspect as types
from msgspec.structs import replace

from everbeat.client.workflow_draft import Condition, Draft, NodeDraft
from everbeat.domain.gathering import place_of_caller
from everbeat.domain.graph import Wanted
from everbeat.domain.graph_checks import is_node_name, wrong_name
from everbeat.domain.outcome import Completed, Failed
from everbeat.domain.placeholder import Placeholder, Promise, promise_of
from everbeat.domain.settings import shown
from everbeat.domain.shapes import shape_of
from everbeat.errors import PlaceholderUsed, nearest

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Join: TypeAlias = Literal["all", "any"] | int

_WHOLE_LIST: Final = (
    "it is put together when all members have ended; take nodes[0].result of one of them, or the whole list"
)
_WHOLE_OUTCOME: Final = (
    "whether it is Completed or Failed is known when it is handed over; match it in the task that takes it"
)


class _Waiting:
    """What a node and the nodes of a map have in common: what they wait for."""

    __slots__ = ("_draft",)

    def __init__(self, draft: NodeDraft) -> None:
        self._draft = draft

    @property
    def name(self) -> str:
        """Its name in the workflow: that of its task, `#2` and so on after it where others have the same, unless it was given one."""
        return self._draft.name

    def after(self, *nodes: Node[Any] | Nodes[Any], join: Join = "all") -> Self:
        """Waits for other nodes as well: for all of them, or with `join` for any one or so many to complete.

        A map counts as one; with `*nodes` each of its members does. A node has at most one group that joins.

        told = wf.add(notify, order).after(paid, shipped, join="any")
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
        """Runs also if nodes that were named in `after` failed or were skipped; take `.outcome` to learn which."""
        for draft in self._waiting():
            draft.tolerates = True
        return self

    def when(self, condition: bool, /) -> Self:
        """Runs only if this result of another node, annotated bool, is True; is skipped otherwise.

        wf.add(refund, order).when(checked.result.is_paid)
        """
        return self._depend(condition, expects=True, what="when")

    def unless(self, condition: bool, /) -> Self:
        """Runs only if this result of another node, annotated bool, is False; is skipped otherwise."""
        return self._depend(condition, expects=False, what="unless")

    def named(self, name: str, /) -> Self:
        """Gives it a name in the workflow; members of a map are `name[0]` and so on."""
        if is_node_name(name):
            self._draft.owner.rename(self._draft, name)
        else:
            problem = wrong_name(shown(name), subject=f"name of {self._draft.title}", where=place_of_caller())
            self._draft.owner.take([problem])
        return self

    def _waiting(self) -> list[NodeDraft]:
        """Who of the graph waits for what this is to wait for."""
        return [self._draft]

    def _parent(self, given: object) -> NodeDraft | None:
        if not isinstance(given, _Waiting):
            rule = f"must be a node, not a {type(given).__name__}"
            fix = "pass what wf.add(...) or wf.map(...) gave"
            self._draft.problem("WRONG_TYPE", shown(given), rule, fix, what="after")
            return None
        other = given._draft
        if other.owner is not self._draft.owner:
            rule = f"is of another workflow, not of {self._draft.owner.name!r}"
            fix = "add both to the same workflow"
            self._draft.problem("OTHER_WORKFLOW", shown(given), rule, fix, what="after")
            return None
        return other

    def _join(self, given: tuple[object, ...], parents: dict[int, None], count: int) -> None:
        if self._draft.joining or self._draft.quorum is not None:
            rule = "is the second group that joins; a node has at most one"
            fix = "name all of them in one .after(..., join=...), or put a node between"
            self._draft.problem("DUPLICATE", shown(count), rule, fix, what="join")
        elif len(given) == 1 and isinstance(given[0], Nodes):
            rule = "counts the map as one node, of which there is nothing to choose"
            fix = "write .after(*nodes, join=...) to count its members"
            self._draft.problem("IMPOSSIBLE_QUORUM", shown(count), rule, fix, what="join")
        else:
            for draft in self._waiting():
                draft.joining |= parents
                draft.quorum = count

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


class Node(_Waiting, Generic[R_co]):
    """A node of a workflow. `result` and `outcome` stand for what it will return, and are handed on as arguments of others.

    packed = wf.add(pack, paid.result)
    told = wf.add(notify, packed.outcome)
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Node {self.name!r} of workflow {self._draft.owner.name!r}>"

    @property
    def result(self) -> R_co:
        """Stands for what it returns; whoever takes it waits for it to complete. Its attributes and items may be handed on, too."""
        return cast(R_co, Placeholder(Promise(origin=self._draft, shape=self._draft.shape)))

    @property
    def outcome(self) -> Completed[R_co] | Failed:
        """Stands for how it ends, `Completed` or `Failed`; whoever takes it waits for any end."""
        shape = outcome_shape(self._draft.shape)
        promise = Promise(origin=self._draft, wants="outcome", shape=shape, whole=_WHOLE_OUTCOME)
        return cast(Completed[R_co], Placeholder(promise))

    def read_result(self, text: str, /) -> R_co:
        """What it returned, from its JSON; raises PayloadError if its annotation no longer fits."""
        return cast(R_co, self._draft.read(text))


class Nodes(_Waiting, Generic[R_co]):
    """The nodes of a map, in the order of its items; what is asked of them applies to each. Without a list of items when the
    workflow is built, they are known only when it runs.
    """

    __slots__ = ("_members",)

    def __init__(self, draft: NodeDraft, members: list[NodeDraft] | None) -> None:
        super().__init__(draft)
        self._members = members

    def __repr__(self) -> str:
        count = "" if self._members is None else f", {len(self._members)} nodes"
        return f"<Nodes {self.name!r} of workflow {self._draft.owner.name!r}{count}>"

    @property
    def results(self) -> list[R_co]:
        """Stands for the list of what they return; whoever takes it waits for all of them to complete."""
        return cast(list[R_co], self._placeholder("value", self._draft.shape))

    @property
    def outcomes(self) -> list[Completed[R_co] | Failed]:
        """Stands for the list of how they end; whoever takes it waits for any end of each."""
        assert isinstance(self._draft.shape, types.ListType)
        shape = types.ListType(outcome_shape(self._draft.shape.item_type))
        return cast(list[Completed[R_co] | Failed], self._placeholder("outcome", shape))

    def read_result(self, text: str, /) -> list[R_co]:
        """What they returned, from the JSON of the list; raises PayloadError if their annotation no longer fits."""
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
            fix = "hand on its .results or .outcomes, or give wf.map a list that is known when the workflow is built"
            raise PlaceholderUsed(repr(self), use, fix=fix)
        return self._members

    def _waiting(self) -> list[NodeDraft]:
        # Without members, the map itself waits: its dependents wait only for it.
        return self._members or [self._draft]


def results(nodes: Iterable[Node[R]], /) -> list[R]:
    """A list that stands for what several nodes return, to be handed on.

    total = wf.add(sum_all, results([first, second]))
    """
    return nodes.results if isinstance(nodes, Nodes) else [node.result for node in nodes]


def outcomes(nodes: Iterable[Node[R]], /) -> list[Completed[R] | Failed]:
    """A list that stands for how several nodes end, to be handed on."""
    return nodes.outcomes if isinstance(nodes, Nodes) else [node.outcome for node in nodes]


def draft_of(given: object, owner: Draft) -> NodeDraft | None:
    """The draft behind a node of this workflow; None for anything else."""
    return given._draft if isinstance(given, _Waiting) and given._draft.owner is owner else None


def outcome_shape(value: types.Type) -> types.Type:
    """The shape of `Completed[T] | Failed` for the shape of T."""
    union = shape_of(Completed[Any] | Failed)
    assert isinstance(union, types.UnionType)
    completed, failed = union.types
    assert isinstance(completed, types.StructType)
    (field,) = completed.fields
    return types.UnionType((replace(completed, fields=(replace(field, type=value),)), failed))


def _unfit_condition(promise: Promise) -> tuple[str, str] | None:
    """Rule and fix, if this cannot be a condition."""
    is_bool = isinstance(promise.shape, types.BoolType) or (
        isinstance(promise.shape, types.LiteralType) and set(map(type, promise.shape.values)) == {bool}
    )
    if not is_bool:
        fix = "annotate it bool where it is returned, or add a task that returns a bool"
        return f"is {promise.type_name}, and a condition must be annotated bool", fix
    if promise.origin.source < 0:
        fix = "add a task that takes it and returns a bool, or decide where the workflow is added"
        return "is an argument of the workflow, and a condition must be what a node returns", fix
    if not all(isinstance(step, str) for step in promise.path):
        fix = "return it in a field of its own, or add a task that returns it"
        return "is an item of a list in JSON, and a condition is found by names of fields only", fix
    return None
