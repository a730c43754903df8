"""Adds nodes to a workflow: tasks, child workflows, and maps of tasks or child workflows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.client.task import Task
from everbeat.client.workflow.draft import Draft, NodeDraft
from everbeat.client.workflow.node import Node, Nodes, draft_of
from everbeat.client.workflow.sender import WorkflowSender
from everbeat.domain.settings.settings import place_of_caller, refused, shown
from everbeat.domain.task.definition import CallCodec
from everbeat.domain.workflow.graph import INPUT, ITEM, NodeKind, TaskSpec
from everbeat.domain.workflow.graph import items_of as texts_of
from everbeat.domain.workflow.placeholders import (
    Composed,
    Placed,
    Placeholder,
    Promise,
    compose,
    leaves,
    promise_of,
)
from everbeat.domain.workflow.shapes import ANY, NONE, items_of, shape_of
from everbeat.errors import ConfigurationError, PayloadError

if TYPE_CHECKING:
    from everbeat.client.workflow.definition import Workflow, WorkflowDefinition


class InputOrigin(Struct, frozen=True):
    """The origin of a placeholder whose value is not a node's result: an item of a map, or a parameter of a workflow."""

    owner: Draft
    source: int
    title: str


class Addition(Struct, frozen=True):
    """A node to add: its arguments, the shape of its result, and the function that decodes the result."""

    composed: Composed
    shape: types.Type
    read: Callable[[str], Any]
    fill: Callable[[NodeDraft], None]
    """Sets the node's task or workflow and records its problems."""


class NodeAdder(ABC):
    """Adds nodes for one task or one child workflow to a draft. Raises PayloadError if the arguments do not match the signature."""

    _kind: NodeKind

    def __init__(self, draft: Draft, name: str, codec: CallCodec) -> None:
        self._draft = draft
        self._name = name
        self._codec = codec

    def add(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NodeDraft:
        """Add one node and return its draft."""
        return self._node(self._addition(args, kwargs))

    def add_members(
        self, items: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[NodeDraft, list[NodeDraft]]:
        """Add the node of a map whose items are known, followed by its member nodes.

        Raises PayloadError, which gives the number of the item, if the arguments do not match the signature.
        """
        if not items:
            return self._map(None, self._without_items(args, kwargs)), []
        additions: list[Addition] = []
        for number, item in enumerate(items):
            with of_item(number):
                additions.append(self._addition((item, *args), kwargs))
        shapes = [each.shape for each in additions]
        whole = self._draft.add(
            self._name,
            kind="map",
            members=len(items),
            # The nodes that a workflow function adds can differ from item to item.
            shape=types.ListType(shapes[0] if all(each == shapes[0] for each in shapes) else ANY),
            read=reader_of_list([each.read for each in additions]),
        )
        self._prepare(whole)
        return whole, [self._node(each, member_of=whole.source, where=whole.where) for each in additions]

    def add_map(self, items: Promise, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NodeDraft:
        """Add the node of a map whose items another node returns. The map's members are created when the map node runs."""
        return self._map(items, self._addition((Placeholder(item_of(self._draft, items)), *args), kwargs))

    def _map(self, items: Promise | None, addition: Addition) -> NodeDraft:
        node = self._draft.add(
            self._name,
            kind="map",
            composed=addition.composed,
            shape=types.ListType(addition.shape),
            read=reader_of_list(repeat(addition.read)),
        )
        self._prepare(node)
        addition.fill(node)
        place_items(node, items, addition.composed)
        return node

    def _node(self, addition: Addition, **facts: Any) -> NodeDraft:
        node = self._draft.add(
            self._name,
            kind=self._kind,
            composed=addition.composed,
            shape=addition.shape,
            read=addition.read,
            **facts,
        )
        self._prepare(node)
        addition.fill(node)
        self._draft.place(node, addition.composed.placed)
        return node

    def _without_items(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Addition:
        """Return the addition for a map over an empty list.

        Because the map has no members, the map node itself waits for the other arguments.
        """
        return self._addition((Placeholder(item_of(self._draft, None)), *args), kwargs)

    def _prepare(self, node: NodeDraft) -> None:
        """Called for each new node. A subclass can record, on the first node only, the problems that all its nodes share."""
        del node

    @abstractmethod
    def _addition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Addition:
        """Return the addition for a node with these arguments. Raises PayloadError if the arguments are invalid."""


class TaskAdder(NodeAdder):
    """Adds nodes that run a task. Raises ConfigurationError if `task` is not a task."""

    _kind = "task"

    def __init__(self, draft: Draft, task: object, *, backend: WorkflowSender, call: str) -> None:
        self._task = require_task(task, call=call)
        self._backend = backend
        self._spec: TaskSpec | None = None
        super().__init__(draft, self._task.name, self._task._definition.codec)

    def _addition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Addition:
        composed = composed_bound(self._codec, self._codec.bind(args, kwargs))
        return Addition(composed, shape_of(self._codec.returns), self._codec.decode_result, self._fill)

    def _fill(self, node: NodeDraft) -> None:
        node.task = self._spec

    def _prepare(self, node: NodeDraft) -> None:
        node.ignores_result = self._task._definition.options.ignore_result
        if self._spec is None:
            self._spec = _spec(node, self._backend, self._task)


class WorkflowAdder(NodeAdder):
    """Adds nodes that run workflows built by one definition. `make` returns an empty workflow."""

    _kind = "workflow"

    def __init__(
        self, draft: Draft, definition: WorkflowDefinition[..., Any], *, make: Callable[[], Workflow]
    ) -> None:
        self._definition = definition
        self._make = make
        super().__init__(draft, definition.name, definition.codec)

    def _addition(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Addition:
        """Return the addition, with the child workflow built for these arguments. Arguments not yet known become the workflow's input."""
        definition, codec = self._definition, self._codec
        bound = codec.bind(args, kwargs)
        composed = composed_bound(codec, bound, only_open=True)
        inner = self._make()
        for name in composed.open_names:
            origin = InputOrigin(inner._draft, INPUT, f"parameter {name!r} of workflow {definition.name!r}")
            promise = Promise(origin=origin, path=(name,), shape=shape_of(codec.annotations[name]))
            setattr(bound, name, Placeholder(promise))
        positional, named = codec.call(bound)
        output = definition.function(inner, *positional, **named)
        require_promised(definition.function, definition.name, output)
        result = draft_of(output, inner._draft)

        def fill(node: NodeDraft) -> None:
            try:
                node.graph = inner.graph(output)
            except ConfigurationError as error:
                node.owner.take(error.problems, where=node.where)

        if result is None:
            return Addition(composed, NONE, msgspec.json.decode, fill)
        return Addition(composed, result.shape, result.read, fill)

    def _without_items(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Addition:
        # The workflow function is not called, because it might use an item.
        bound = self._codec.bind((Placeholder(item_of(self._draft, None)), *args), kwargs)
        composed = composed_bound(self._codec, bound, only_open=True)
        return Addition(composed, ANY, msgspec.json.decode, lambda _: None)


def item_of(draft: Draft, items: Promise | None) -> Promise:
    """Return a placeholder for the item of a map member. The item becomes known when the workflow runs.

    If `items` is None, the list of items is empty.
    """
    title = "an item of an empty list" if items is None else f"an item of {items!r}"
    shape = None if items is None else items_of(items.shape)
    return Promise(origin=InputOrigin(draft, ITEM, title), shape=ANY if shape is None else shape)


def place_items(node: NodeDraft, items: Promise | None, composed: Composed) -> None:
    """Set the items of a map node, and make the node wait for the items and for the shared arguments of its members.

    If `items` is None, the list of items is empty.
    """
    placed = list(composed.placed)
    if items is None:
        node.items = ("[]",)
    else:
        node.items = (items.hole(),)
        placed.insert(0, Placed(promise=items, parameter="items", place="items", expected=ANY))
        if items_of(items.shape) is None:
            rule = f"is {items.type_name}, and only a list has items"
            fix = "pass a list, or write wf.add(task, ...) for one"
            node.problem("WRONG_TYPE", repr(items), rule, fix, what="items")
    node.owner.place(node, placed)


@contextmanager
def of_item(number: int) -> Iterator[None]:
    """Add the number of the item to any PayloadError that the `with` block raises."""
    try:
        yield
    except PayloadError as error:
        message = f"Item {number} of the map: {error.message}"
        raise PayloadError(message, parameter=error.parameter, fix=error.fix) from None


def require_task(task: object, *, call: str) -> Task[..., Any]:
    """Return `task` if it is a task. Raises ConfigurationError if it is not."""
    if isinstance(task, Task):
        return task
    raise refused(
        task,
        subject=f"{call}.task",
        code="WRONG_TYPE",
        rule=f"must be a task, not a {type(task).__name__}",
        fix="decorate the function with @app.task, and pass the result",
    )


def composed_bound(codec: CallCodec, bound: msgspec.Struct, *, only_open: bool = False) -> Composed:
    """Return the composed arguments of a bound call.

    Raises PayloadError if an argument cannot be encoded, is a node, or has a placeholder in a position that cannot be filled.
    """
    try:
        return compose(codec, bound, only_open=only_open)
    except PayloadError as error:
        hidden = _hidden(bound, error.parameter)
        if hidden is None:
            raise
        message, fix = hidden
        text = f"Argument {error.parameter!r} of {codec.owner} {message}."
        raise PayloadError(text, parameter=error.parameter, fix=f"{fix}.") from None


def reader_of_list(reads: Iterable[Callable[[str], Any]]) -> Callable[[str], list[Any]]:
    """Return a function that decodes each item of a JSON list with the reader at the same position."""
    return lambda text: [read(each) for read, each in zip(reads, texts_of(text), strict=False)]


def _hidden(bound: msgspec.Struct, parameter: str | None) -> tuple[str, str] | None:
    """Return a problem and its fix if the argument contains a node, or a placeholder in a position that cannot be filled."""
    if parameter is None:
        return None
    for leaf, is_hidden in leaves(getattr(bound, parameter, None)):
        if isinstance(leaf, Nodes):
            return f"is or contains {leaf!r}, not their results", "pass its .results, or its .outcomes"
        if isinstance(leaf, Node):
            return f"is or contains {leaf!r}, not its result", "pass its .result, or its .outcome"
        if is_hidden and promise_of(leaf) is not None:
            message = f"holds {leaf!r} in an object, in a set or as a key, which cannot be filled later"
            return message, "put it into a list, tuple or dict, or add a task that creates the object"
    return None


def _spec(node: NodeDraft, backend: WorkflowSender, task: Task[..., Any]) -> TaskSpec:
    """Return the specification of the task that the node sends.

    Records a problem for each option that is valid only in a send, or that a send would refuse.
    """
    if task._settings.key is not None:
        rule = "allows one waiting task, and a node that finds the task of another node would never end"
        fix = "leave the key out; start the workflow once instead"
        node.problem("NOT_FOR_NODES", shown(task._settings.key), rule, fix, what="key")
    if task._connection is not None:
        rule = "is the transaction of one send, but a node sends its task when its parents have ended"
        fix = "leave it out"
        node.problem("NOT_FOR_NODES", shown(task._connection), rule, fix, what="connection")
    try:
        return backend.spec(task)
    except ConfigurationError as error:
        node.owner.take(error.problems, where=place_of_caller())
        return TaskSpec(name=task.name, queue=task._settings.queue)


def known_items(items: object) -> list[Any]:
    """Return the known items of a map as a list. Raises ConfigurationError if `items` is not iterable, or is a string or a mapping."""
    rule, fix = "must be a list of items, or the result of a node that returns one", "pass a list or tuple"
    if not isinstance(items, str | bytes | bytearray | Mapping | Node):
        try:
            return [*items]  # type: ignore[misc] # a TypeError is handled
        except TypeError:
            pass
    if isinstance(items, Node):
        fix = "pass its .result"
    raise refused(items, subject="wf.map.items", code="WRONG_TYPE", rule=rule, fix=fix)


def require_promised(function: Callable[..., Any], name: str, output: object) -> None:
    """Raise ConfigurationError if the workflow function returned None although it is annotated to return a node."""
    promised = getattr(function, "__annotations__", {}).get("return")
    if output is None and promised not in (None, "None", type(None)):
        raise refused(
            None,
            subject=f"output of workflow {name!r}",
            code="WRONG_TYPE",
            rule=f"is not of the annotated type, {shown(promised)}",
            fix="return the node whose result is that of the workflow, or annotate -> None",
        )
