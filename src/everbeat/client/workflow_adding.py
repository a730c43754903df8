"""From a task and its arguments to nodes of a workflow: one node, or those of a map.

What lives here: encoding arguments, refusing what only a send may have, the three shapes of nodes of tasks. What may not: types of users'
code (`workflow`), workflows within workflows (`workflow_definition`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from msgspec import inspect as types

from everbeat.client.task import Task
from everbeat.client.workflow_draft import Draft, NodeDraft
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.client.workflow_node import Node, Nodes
from everbeat.client.workflow_signature import StartOptions
from everbeat.domain.codec import CallCodec
from everbeat.domain.composing import Composed, Placed, compose, leaves
from everbeat.domain.gathering import place_of_caller
from everbeat.domain.graph import ITEM, Graph, Hole, TaskSpec, Template
from everbeat.domain.graph import items_of as texts_of
from everbeat.domain.placeholder import Placeholder, Promise, promise_of
from everbeat.domain.settings import refused, shown
from everbeat.domain.shapes import ANY, items_of, shape_of
from everbeat.errors import ConfigurationError, PayloadError


class WorkflowBackend(Protocol):
    """What the app does for workflows."""

    def spec(self, task: Task[..., Any], /) -> TaskSpec:
        """How a node sends this task; raises ConfigurationError."""
        ...

    def start(
        self, graph: Graph, options: StartOptions, *, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """Stores it; `decode` reads its result. Raises BlockingCallInLoop, a DatabaseError."""
        ...

    async def astart(
        self, graph: Graph, options: StartOptions, *, decode: Callable[[str], Any]
    ) -> WorkflowHandle[Any]:
        """The twin of `start`."""
        ...


class Giver(Struct, frozen=True):
    """Where a placeholder comes from that no node gives."""

    owner: Draft
    source: int
    title: str


def add_task(
    draft: Draft, backend: WorkflowBackend, task: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> NodeDraft:
    """A node of one task; raises PayloadError."""
    known = require_task(task, call="wf.add")
    composed = composed_call(known.definition.codec, args, kwargs)
    codec = known.definition.codec
    node = draft.add(known.name, composed=composed, shape=shape_of(codec.returns), read=codec.decode_result)
    node.task = _spec(node, backend, known)
    draft.place(node, composed.placed)
    return node


def add_members(
    draft: Draft,
    backend: WorkflowBackend,
    task: object,
    items: Sequence[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[NodeDraft, list[NodeDraft]]:
    """The node of a map whose items are known, and after it its members; raises PayloadError that names the item."""
    known = require_task(task, call="wf.map")
    composed: list[Composed] = []
    for number, item in enumerate(items):
        try:
            composed.append(composed_call(known.definition.codec, (item, *args), kwargs))
        except PayloadError as error:
            message = f"Item {number} of the map: {error.message}"
            raise PayloadError(message, parameter=error.parameter, fix=error.fix) from None
    if not composed:
        return _add_empty(draft, backend, known, args, kwargs), []
    shape, read = shape_of(known.definition.codec.returns), known.definition.codec.decode_result
    whole = draft.add(
        known.name, kind="map", members=len(items), shape=types.ListType(shape), read=_reader_of_list(read)
    )
    spec = _spec(whole, backend, known)
    members: list[NodeDraft] = []
    for each in composed:
        member = draft.add(
            known.name,
            task=spec,
            composed=each,
            shape=shape,
            read=read,
            member_of=whole.source,
            where=whole.where,
        )
        draft.place(member, each.placed)
        members.append(member)
    return whole, members


def add_map(
    draft: Draft,
    backend: WorkflowBackend,
    task: object,
    items: Promise,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NodeDraft:
    """The node of a map whose items another node returns; raises PayloadError."""
    known = require_task(task, call="wf.map")
    item = items_of(items.shape)
    one = Giver(draft, ITEM, f"an item of {items!r}")
    template: Template = (Hole(items.origin.source, items.wants, items.path),)
    node, composed = _collector(
        draft,
        backend,
        known,
        template,
        Promise(origin=one, shape=ANY if item is None else item),
        args,
        kwargs,
    )
    if item is None:
        rule = f"is {items.type_name}, and only a list has items"
        fix = "hand on a list, or write wf.add(task, ...) for one"
        node.problem("WRONG_TYPE", repr(items), rule, fix, what="items")
    whole = Placed(promise=items, parameter="items", place="items", wanted=ANY)
    draft.place(node, [whole, *composed.placed])
    return node


def _add_empty(
    draft: Draft,
    backend: WorkflowBackend,
    task: Task[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> NodeDraft:
    """A map over no items. It has no members that could wait, so the map itself waits for what they would wait for."""
    item = Promise(origin=Giver(draft, ITEM, "an item of an empty list"), shape=ANY)
    node, composed = _collector(draft, backend, task, ("[]",), item, args, kwargs)
    draft.place(node, composed.placed)
    return node


def _collector(
    draft: Draft,
    backend: WorkflowBackend,
    task: Task[..., Any],
    items: Template,
    item: Promise,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[NodeDraft, Composed]:
    """The node of a map whose members are made when it runs, and the arguments of each; raises PayloadError."""
    codec = task.definition.codec
    composed = composed_call(codec, (Placeholder(item), *args), kwargs)
    node = draft.add(
        task.name,
        kind="map",
        composed=composed,
        shape=types.ListType(shape_of(codec.returns)),
        read=_reader_of_list(codec.decode_result),
    )
    node.task = _spec(node, backend, task)
    node.items = items
    return node, composed


def require_task(task: object, *, call: str) -> Task[..., Any]:
    """The task; raises ConfigurationError for anything else."""
    if isinstance(task, Task):
        return task
    raise refused(
        task,
        subject=f"{call}.task",
        code="WRONG_TYPE",
        rule=f"must be a task, not a {type(task).__name__}",
        fix="decorate the function with @app.task, and pass what that gives",
    )


def composed_call(codec: CallCodec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Composed:
    """The arguments of a node; raises PayloadError."""
    return composed_bound(codec, codec.bind(args, kwargs))


def composed_bound(codec: CallCodec, bound: msgspec.Struct, *, only_open: bool = False) -> Composed:
    """The arguments of a bound call; raises PayloadError, also for placeholders and nodes where they cannot be put in."""
    try:
        return compose(codec, bound, only_open=only_open)
    except PayloadError as error:
        hidden = _hidden(bound, error.parameter)
        if hidden is None:
            raise
        message, fix = hidden
        text = f"Argument {error.parameter!r} of {codec.owner} {message}."
        raise PayloadError(text, parameter=error.parameter, fix=f"{fix}.") from None


def _reader_of_list(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [read(each) for each in texts_of(text)]


def _hidden(bound: msgspec.Struct, parameter: str | None) -> tuple[str, str] | None:
    """What is wrong and what helps, if it is a node, or a placeholder where none can be filled."""
    if parameter is None:
        return None
    for leaf, is_hidden in leaves(getattr(bound, parameter, None)):
        if isinstance(leaf, Nodes):
            return f"is or holds {leaf!r}, not what they return", "pass its .results, or its .outcomes"
        if isinstance(leaf, Node):
            return f"is or holds {leaf!r}, not what it returns", "pass its .result, or its .outcome"
        if is_hidden and promise_of(leaf) is not None:
            message = f"holds {leaf!r} in an object, in a set or as a key, where nothing can be put in later"
            return message, "put it into a list, tuple or dict, or add a task that makes the object"
    return None


def _spec(node: NodeDraft, backend: WorkflowBackend, task: Task[..., Any]) -> TaskSpec:
    """How the node sends its task; notes options that only a send may have, and what a send would refuse."""
    if task.settings.key is not None:
        rule = "keeps at most one such task waiting, and a node whose task is another's would never end"
        fix = "leave the key out; start the workflow once instead"
        node.problem("NOT_FOR_NODES", shown(task.settings.key), rule, fix, what="key")
    if task.connection is not None:
        rule = "is the transaction of one send, and a node's task is sent when its parents have ended"
        fix = "leave it out"
        node.problem("NOT_FOR_NODES", shown(task.connection), rule, fix, what="connection")
    try:
        return backend.spec(task)
    except ConfigurationError as error:
        node.owner.take(error.problems, where=place_of_caller())
        return TaskSpec(name=task.name, queue=task.settings.queue)


def known_items(items: object) -> list[Any]:
    """The items of a map that is known now; raises ConfigurationError for what has none, and for texts and mappings."""
    rule, fix = "must be a list of items, or the result of a node that returns one", "pass a list or tuple"
    if not isinstance(items, str | bytes | bytearray | Mapping | Node):
        try:
            return [*items]  # type: ignore[misc] # what cannot be looped over says so
        except TypeError:
            pass
    if isinstance(items, Node):
        fix = "pass its .result"
    raise refused(items, subject="wf.map.items", code="WRONG_TYPE", rule=rule, fix=fix)
