"""Building workflows: `app.workflow` and `@app.define_workflow`.

What lives here: `Workflow`, to which nodes are added, and `WorkflowDefinition`, which makes one for given arguments. What may not: what
users hold of a node (`workflow_node`), how a task becomes one (`workflow_adding`), what becomes of nodes (`workflow_draft`), starting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec

from everbeat.client.task import Task
from everbeat.client.workflow_adding import (
    Giver,
    WorkflowBackend,
    add_map,
    add_members,
    add_task,
    composed_bound,
    known_items,
)
from everbeat.client.workflow_draft import Draft, NodeDraft
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.client.workflow_node import Node, Nodes, draft_of
from everbeat.client.workflow_signature import (
    OWN_TRANSACTION,
    StartOptions,
    codec_of,
    require_promised,
    start_options,
)
from everbeat.client.workflow_starting import Startable
from everbeat.domain.checks import one_of, task_name
from everbeat.domain.duration import Duration
from everbeat.domain.gathering import place_of_caller
from everbeat.domain.graph import INPUT, Graph, OnError
from everbeat.domain.graph_checks import DEEPEST
from everbeat.domain.placeholder import Placeholder, Promise, promise_of
from everbeat.domain.settings import refused, shown
from everbeat.domain.shapes import NONE, shape_of
from everbeat.domain.signature import location_of
from everbeat.errors import ConfigurationError, PayloadError, Problem, nearest

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")


class Workflow(Startable):
    """A workflow while it is built: nodes are added, and nothing is stored before it is started.

    Arguments are checked when they are added, everything else by `graph()`, at once. Raises ConfigurationError for a wrong name or
    `on_error`: "fail" lets what does not depend on a failed node finish and then fails, "pause" stops at once, "continue" passes over failures.

    wf = app.workflow("order")
    paid = wf.add(charge, order)
    packed = wf.add(pack, paid.result)
    """

    def __init__(
        self,
        name: str,
        *,
        on_error: OnError = "fail",
        backend: WorkflowBackend,
        within: tuple[WorkflowDefinition[..., Any], ...] = (),
        level: int = 1,
    ) -> None:
        self.name: str = task_name(name, subject="name of the workflow")
        self.on_error: OnError = one_of("fail", "pause", "continue")(
            on_error, subject=f"on_error of workflow {name!r}"
        )
        self._backend = backend
        self._within = within
        self._level = level
        self._draft = Draft(self.name, on_error=self.on_error)

    def __repr__(self) -> str:
        return f"<Workflow {self.name!r}, {len(self._draft.nodes)} nodes>"

    def add(
        self, task: Task[P, R] | WorkflowDefinition[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Node[R]:
        """Adds a node that runs a task, or a workflow within this one; raises PayloadError for arguments that do not fit.

        An argument may be, or hold in lists, tuples and dicts, the `.result` or `.outcome` of other nodes, for which it then waits.

        packed = wf.add(pack.with_options(queue="big"), paid.result).named("pack")
        """
        if isinstance(task, WorkflowDefinition):
            return Node(self._add_workflow(task, args, kwargs))
        return Node(add_task(self._draft, self._backend, task, args, kwargs))

    def map(
        self, task: Task[Concatenate[A, P], R], items: Iterable[A], /, *args: P.args, **kwargs: P.kwargs
    ) -> Nodes[R]:
        """Adds a node for each item, which the task gets as its first argument; the others are shared. Raises PayloadError.

        Items are a list, or the result of a node that returns one: then the nodes are made when the workflow runs.

        sizes = wf.map(measure, files)
        wf.add(report, sizes.results)
        """
        if isinstance(task, WorkflowDefinition):
            raise refused(
                task,
                subject="wf.map.task",
                code="WRONG_TYPE",
                rule="is a workflow, and only tasks are mapped",
                fix="write [wf.add(definition, item) for item in items], where the items are known",
            )
        promise = promise_of(items)
        if promise is not None:
            return Nodes(add_map(self._draft, self._backend, task, promise, args, kwargs), None)
        whole, members = add_members(self._draft, self._backend, task, known_items(items), args, kwargs)
        return Nodes(whole, members)

    def succeeds_when(self, *nodes: Node[Any] | Nodes[Any]) -> None:
        """Lets the workflow complete when all of these nodes have, whatever else failed; each call adds one such case."""
        found = [draft_of(each, self._draft) for each in nodes]
        for each, draft in zip(nodes, found, strict=True):
            if draft is None:
                self._note_stranger(each, what="success case")
        if not nodes:
            rule, fix = "names no node, so it would be met at once", "name the nodes that must complete"
            self._draft.note("EMPTY", self._subject("success case"), "()", rule, fix, where=place_of_caller())
        self._draft.cases.append(tuple(each.source for each in found if each is not None))

    def graph(self, output: Node[Any] | Nodes[Any] | None = None) -> Graph:
        """The workflow as it is stored, with the node whose value is its own; raises ConfigurationError with everything that is wrong."""
        found = draft_of(output, self._draft)
        problems = [] if found is not None or output is None else [self._stranger(output, what="output")]
        return self._draft.graph(found, problems=problems)

    def made(self, output: object) -> tuple[Graph, Callable[[str], Any]]:
        """The graph, and how the value of its output is read."""
        found = draft_of(output, self._draft)
        return self.graph(output), msgspec.json.decode if found is None else found.read  # type: ignore[arg-type]

    def _subject(self, what: str) -> str:
        return f"{what} of workflow {self.name!r}"

    def _note_stranger(self, given: object, *, what: str) -> None:
        self._draft.take([self._stranger(given, what=what)])

    def _stranger(self, given: object, *, what: str) -> Problem:
        """The problem of what should be a node of this workflow."""
        rule, fix = f"must be a node, not a {type(given).__name__}", "pass what wf.add(...) gave"
        if isinstance(given, Node | Nodes):
            rule, fix = f"is a node of another workflow, not of {self.name!r}", "pass a node of this one"
        elif isinstance(given, str):
            guess = nearest(given, self._draft.names())
            rule = "must be a node, not the name of one"
            fix = f"pass the node {guess!r} itself" if guess else fix
        elif promise_of(given) is not None:
            fix = "pass the node itself, without .result"
        return Problem(
            code="UNKNOWN_NODE",
            subject=self._subject(what),
            value=shown(given),
            rule=rule,
            fix=fix,
            where=place_of_caller(),
        )

    def _add_workflow(
        self, definition: WorkflowDefinition[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> NodeDraft:
        self._require_end(definition)
        codec = definition.codec
        bound = codec.bind(args, kwargs)
        composed = composed_bound(codec, bound, only_open=True)
        child = Workflow(
            definition.name,
            on_error=definition.on_error,
            backend=self._backend,
            within=(*self._within, definition),
            level=self._level + 1,
        )
        for name in composed.open_names:
            giver = Giver(child._draft, INPUT, f"parameter {name!r} of workflow {definition.name!r}")
            promise = Promise(origin=giver, path=(name,), shape=shape_of(codec.annotations[name]))
            setattr(bound, name, Placeholder(promise))
        positional, named = codec.call(bound)
        output = definition.function(child, *positional, **named)
        require_promised(definition.function, definition.name, output)
        found = draft_of(output, child._draft)
        node = self._draft.add(
            definition.name,
            kind="workflow",
            composed=composed,
            shape=NONE if found is None else found.shape,
            read=msgspec.json.decode if found is None else found.read,
        )
        try:
            node.graph = child.graph(output)
        except ConfigurationError as error:
            self._draft.take(error.problems, where=node.where)
        self._draft.place(node, composed.placed)
        return node

    def _require_end(self, definition: WorkflowDefinition[..., Any]) -> None:
        path = " -> ".join(each.name for each in (*self._within, definition))
        if definition in self._within:
            rule, code = "is a workflow within itself, which has no end", "RECURSION"
            fix = "loop in a task, or start the workflow anew from a task"
        elif self._level >= DEEPEST:
            rule, code = (
                f"would be level {self._level + 1} of workflows within workflows; there may be {DEEPEST}",
                "TOO_DEEP",
            )
            fix = "add tasks where workflows are not needed"
        else:
            return
        raise ConfigurationError(
            [
                Problem(
                    code=code,
                    subject=self._subject("wf.add"),
                    value=path,
                    rule=rule,
                    fix=fix,
                    where=place_of_caller(),
                )
            ]
        )


class WorkflowDefinition(Generic[P, R_co]):
    """A function that adds the nodes of a workflow: `build` makes one for given arguments, and `wf.add` puts one into another."""

    def __init__(
        self, function: Callable[..., Any], /, *, name: str, on_error: OnError, backend: WorkflowBackend
    ) -> None:
        self.name: str = task_name(name, subject="name of the workflow")
        self.on_error: OnError = one_of("fail", "pause", "continue")(
            on_error, subject=f"on_error of workflow {name!r}"
        )
        self.function = function
        self.where = location_of(function)
        self.codec = codec_of(function, self.name, leading=Workflow)
        self._backend = backend
        self._options = StartOptions()
        self.__doc__ = function.__doc__
        self.__wrapped__ = function

    def __repr__(self) -> str:
        return f"<WorkflowDefinition {self.name!r}>"

    def with_options(
        self,
        *,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
    ) -> WorkflowDefinition[P, R_co]:
        """The same definition with options for what is started through it, as those of `Workflow.start`; raises ConfigurationError.

        order.with_options(key="order-17").start(17)
        """
        chosen = copy(self)
        chosen._options = start_options(key=key, connection=connection, patience=patience)
        return chosen

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R_co]:
        """Builds and starts a workflow of these arguments; raises as `build` and `Workflow.start`.

        order.start(17).result(timeout="5m")
        """
        graph, read = self._made(args, kwargs)
        return self._backend.start(graph, self._options, decode=read)

    async def astart(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R_co]:
        """As `start`, to await."""
        graph, read = self._made(args, kwargs)
        return await self._backend.astart(graph, self._options, decode=read)

    def build(self, /, *args: P.args, **kwargs: P.kwargs) -> Graph:
        """The workflow of these arguments as it is stored. Raises PayloadError for arguments that do not fit, ConfigurationError."""
        return self._made(args, kwargs)[0]

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graph, Callable[[str], Any]]:
        bound = self.codec.bind(args, kwargs)
        opened = composed_bound(self.codec, bound).open_names
        if opened:
            text = f"Argument {min(opened)!r} of {self.codec.owner} holds the result of a node, which is known in its own workflow only."
            raise PayloadError(
                text, parameter=min(opened), fix="write wf.add(definition, ...) in that workflow."
            )
        workflow = Workflow(self.name, on_error=self.on_error, backend=self._backend, within=(self,))
        positional, named = self.codec.call(bound)
        output = self.function(workflow, *positional, **named)
        require_promised(self.function, self.name, output)
        return workflow.made(output)


class WorkflowDecorator(Protocol):
    """`@app.define_workflow(...)`: what the function returns is the node whose value is the workflow's."""

    @overload
    def __call__(
        self, function: Callable[Concatenate[Workflow, P], None], /
    ) -> WorkflowDefinition[P, None]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Workflow, P], Nodes[R]], /
    ) -> WorkflowDefinition[P, list[R]]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[Workflow, P], Node[R] | None], /
    ) -> WorkflowDefinition[P, R]: ...
