"""Workflow builders: the classes behind `app.workflow` and `@app.define_workflow`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from typing import Any, Concatenate, Final, Generic, ParamSpec, Protocol, TypeVar, Unpack, cast, overload
from uuid import UUID

import msgspec

from everbeat.client.options import OWN_TRANSACTION, StartOptions, StartSettings
from everbeat.client.task import Task
from everbeat.client.workflow.adding import (
    NodeAdder,
    TaskAdder,
    WorkflowAdder,
    composed_bound,
    known_items,
    require_promised,
)
from everbeat.client.workflow.draft import Draft
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.client.workflow.node import Node, Nodes, draft_of
from everbeat.client.workflow.sender import WorkflowCall, WorkflowSender, digest_of_graph
from everbeat.domain.labels import NO_LABELS, Labels, checked_labels, encode_labels
from everbeat.domain.settings.checks import one_of, public, task_name
from everbeat.domain.settings.settings import StandIn, make_or_gather, place_of_caller, shown
from everbeat.domain.settings.units import Duration
from everbeat.domain.task.argument_digest import digest_of_values
from everbeat.domain.task.context_backend import NewWorkflow
from everbeat.domain.task.definition import CallCodec
from everbeat.domain.task.signature import is_async_function, location_of, read_signature
from everbeat.domain.workflow.graph import DEEPEST, Graph, OnError
from everbeat.domain.workflow.placeholders import promise_of
from everbeat.errors import ConfigurationError, PayloadError, Problem, RegistrationError
from everbeat.errors.wording import amount, nearest

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
A = TypeVar("A")


_REST: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _codec_of(function: Callable[..., Any], name: str, *, leading: type[Any]) -> CallCodec:
    """Return a codec for all parameters except the first, which has type `leading`. Raises RegistrationError for unsuitable functions."""
    owner, where = f"Workflow {name!r}", location_of(function)
    if is_async_function(function):
        reason = f"{owner} is an `async def`, but a function that builds a workflow cannot wait."
        raise RegistrationError(reason, fix="write `def`.", where=where)
    read = read_signature(function, owner=owner, leading=leading, sends_result=False)
    if not read.takes_context:
        reason = f"{owner} has no first parameter that is annotated as Workflow."
        raise RegistrationError(reason, fix="write def name(wf: Workflow, ...).", where=where)
    for each in read.parameters:
        if each.kind in _REST:
            reason = f"{owner} takes any number of arguments ({each}), but each argument of a workflow needs a name."
            raise RegistrationError(reason, fix="name each parameter, or take a list.", where=where)
    return CallCodec(read, owner=f"workflow {name!r}", name=name)


def _checked(name: str, on_error: OnError) -> tuple[str, OnError]:
    checked = task_name(name, subject="name of the workflow")
    return checked, one_of("fail", "pause", "continue")(on_error, subject=f"on_error of workflow {name!r}")


@public
class Workflow:
    """A workflow under construction. Add nodes, and then call `start`. Nothing is stored until then.

    `add` and `map` check the arguments of a node. `graph`, `call` and `start` report all other problems together.

    wf = app.workflow("order")
    paid = wf.add(charge, order)
    packed = wf.add(pack, paid.result)
    """

    def __init__(
        self,
        name: str,
        *,
        on_error: OnError = "fail",
        labels: Labels = NO_LABELS,
        backend: WorkflowSender,
        within: tuple[WorkflowDefinition[..., Any], ...] = (),
        level: int = 1,
    ) -> None:
        self.name, self.on_error = _checked(name, on_error)
        self._backend = backend
        self._within = within
        self._level = level
        self.labels = checked_labels(labels, subject="Workflow.labels")
        self._draft = Draft(self.name, on_error=self.on_error, labels=encode_labels(self.labels))

    def __repr__(self) -> str:
        return f"<Workflow {self.name!r}, {amount(len(self._draft.nodes), 'node')}>"

    def add(
        self, task: Task[P, R] | WorkflowDefinition[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> Node[R]:
        """Add a node that runs a task or a child workflow. Raises PayloadError if the arguments do not match the signature.

        An argument can be the `.result` or `.outcome` of another node, or a list, tuple or dict that contains one. The new node then waits
        for the other node.

        packed = wf.add(pack.with_options(queue="big"), paid.result).named("pack")
        """
        return Node(self._adder(task, call="wf.add").add(args, kwargs))

    def map(
        self,
        task: Task[Concatenate[A, P], R] | WorkflowDefinition[Concatenate[A, P], R],
        items: Iterable[A],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Nodes[R]:
        """Add one node for each item. The item is the node's first argument, and all nodes share the other arguments.

        `items` is a list, or the result of a node that returns a list. In the second case, the nodes are created when the workflow runs.
        Raises PayloadError if the arguments do not match the signature.

        sizes = wf.map(measure, files)
        wf.add(report, sizes.results)
        """
        promise = promise_of(items)
        adder = self._adder(task, call="wf.map")
        if promise is not None:
            return Nodes(adder.add_map(promise, args, kwargs), None)
        return Nodes(*adder.add_members(known_items(items), args, kwargs))

    def succeeds_when(self, *nodes: Node[Any] | Nodes[Any]) -> None:
        """Let the workflow complete if all of these nodes complete, even if other nodes fail. Each call adds an alternative condition."""
        found = [draft_of(each, self._draft) for each in nodes]
        for each, draft in zip(nodes, found, strict=True):
            if draft is None:
                self._note_stranger(each, what="success case")
        if not nodes:
            rule, fix = (
                "names no node, so the workflow would complete at once",
                "name the nodes that must complete",
            )
            self._draft.note("EMPTY", self._subject("success case"), "()", rule, fix, where=place_of_caller())
        self._draft.cases.append(tuple(each.source for each in found if each is not None))

    def graph(self, output: Node[Any] | Nodes[Any] | None = None) -> Graph:
        """Return the workflow in its stored form. The result of the node `output` becomes the result of the workflow.

        Raises ConfigurationError, which lists all problems, if the workflow is invalid.
        """
        found = draft_of(output, self._draft)
        problems = [] if found is not None or output is None else [self._stranger(output, what="output")]
        return self._draft.graph(found, problems=problems)

    def _made(self, output: object) -> tuple[Graph, Callable[[str], Any]]:
        """Return the graph and the function that decodes the result of `output`."""
        found = draft_of(output, self._draft)
        return self.graph(output), msgspec.json.decode if found is None else found.read  # type: ignore[arg-type]

    @overload
    def call(self, *, output: Nodes[R], key: str | None = None) -> WorkflowCall[list[R]]: ...
    @overload
    def call(self, *, output: Node[R], key: str | None = None) -> WorkflowCall[R]: ...
    @overload
    def call(self, *, key: str | None = None) -> WorkflowCall[None]: ...
    def call(self, *, output: Any = None, key: str | None = None) -> WorkflowCall[Any]:
        """Return a snapshot of the workflow, to pass to `Context.start`.

        Raises ConfigurationError, which lists all problems, if the workflow is invalid.

        handle = ctx.start(wf.call(output=packed))
        """
        options = StartSettings.checked(key=key, connection=OWN_TRANSACTION, patience=None)
        graph, read = self._made(output)
        return WorkflowCall(
            graph, options=options, decode=read, digest=digest_of_graph(graph), backend=self._backend
        )

    def _as_started_by(self, task_name: str, labels: Mapping[str, str], /) -> NewWorkflow:
        return self.call()._as_started_by(task_name, labels)

    def _handle_of(self, workflow_id: UUID, /) -> WorkflowHandle[None]:
        return self._backend.handle(workflow_id, decode=msgspec.json.decode)

    @overload
    def start(self, *, output: Nodes[R], **options: Unpack[StartOptions]) -> WorkflowHandle[list[R]]: ...
    @overload
    def start(self, *, output: Node[R], **options: Unpack[StartOptions]) -> WorkflowHandle[R]: ...
    @overload
    def start(self, **options: Unpack[StartOptions]) -> WorkflowHandle[None]: ...
    def start(
        self,
        *,
        output: Any = None,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
        labels: Labels = NO_LABELS,
    ) -> WorkflowHandle[Any]:
        """Start the workflow by storing it in one statement, and return its handle. Without a `key`, each call starts a new workflow.

        `output`: the node whose result becomes the result of the workflow. `key`: at most one workflow with this name and key can be live
        at a time; starting another one returns the live workflow. `connection`: start the workflow in the transaction of this connection.
        `patience`: how long to wait for a database that does not respond; ignored if `connection` is set. `labels`: more labels for the
        workflow. Raises ConfigurationError, which lists all problems, if the workflow is invalid. Raises BlockingCallInLoop on an event loop, and
        DatabaseError if the database fails.

        handle = wf.start(output=packed, key=f"order-{order.id}")
        """
        options = StartSettings.checked(key=key, connection=connection, patience=patience, labels=labels)
        graph, read = self._made(output)
        return self._backend.start(graph, options, decode=read)

    @overload
    async def astart(
        self, *, output: Nodes[R], **options: Unpack[StartOptions]
    ) -> WorkflowHandle[list[R]]: ...
    @overload
    async def astart(self, *, output: Node[R], **options: Unpack[StartOptions]) -> WorkflowHandle[R]: ...
    @overload
    async def astart(self, **options: Unpack[StartOptions]) -> WorkflowHandle[None]: ...
    async def astart(
        self,
        *,
        output: Any = None,
        key: str | None = None,
        connection: object = OWN_TRANSACTION,
        patience: Duration | None = None,
        labels: Labels = NO_LABELS,
    ) -> WorkflowHandle[Any]:
        """Async version of `start` that does not block the running event loop."""
        options = StartSettings.checked(key=key, connection=connection, patience=patience, labels=labels)
        graph, read = self._made(output)
        return await self._backend.astart(graph, options, decode=read)

    def _subject(self, what: str) -> str:
        return f"{what} of workflow {self.name!r}"

    def _note_stranger(self, given: object, *, what: str) -> None:
        self._draft.take([self._stranger(given, what=what)])

    def _stranger(self, given: object, *, what: str) -> Problem:
        """Return the problem to report for a value that is not a node of this workflow."""
        rule, fix = f"must be a node, not a {type(given).__name__}", "pass the result of wf.add(...)"
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

    def _adder(self, given: object, *, call: str) -> NodeAdder:
        """Return the adder for a task or a definition. Raises ConfigurationError if workflows are recursive or nested too deeply."""
        if not isinstance(given, WorkflowDefinition):
            return TaskAdder(self._draft, given, backend=self._backend, call=call)
        if given in self._within:
            rule, code = "is a workflow that contains itself and would never end", "RECURSION"
            fix = "loop in a task, or start the workflow again from a task"
        elif self._level >= DEEPEST:
            level, code = self._level + 1, "TOO_DEEP"
            rule = f"would be level {level} of workflows within workflows; at most {DEEPEST} are allowed"
            fix = "add tasks instead of workflows where possible"
        else:
            return WorkflowAdder(self._draft, given, make=lambda: self._inner(given))
        path = " -> ".join(each.name for each in (*self._within, given))
        problem = Problem(
            code=code, subject=self._subject(call), value=path, rule=rule, fix=fix, where=place_of_caller()
        )
        raise ConfigurationError([problem])

    def _inner(self, definition: WorkflowDefinition[..., Any]) -> Workflow:
        return Workflow(
            definition.name,
            on_error=definition.on_error,
            labels=definition.labels,
            backend=self._backend,
            within=(*self._within, definition),
            level=self._level + 1,
        )


@public
class WorkflowDefinition(Generic[P, R_co]):
    """A registered function that builds a workflow. `start` builds and starts the workflow; `wf.add` adds it to another workflow."""

    def __init__(
        self,
        function: Callable[..., Any],
        /,
        *,
        name: str,
        on_error: OnError,
        labels: Labels = NO_LABELS,
        backend: WorkflowSender,
    ) -> None:
        self.name, self.on_error = _checked(name, on_error)
        self.labels = checked_labels(labels, subject="Workflow.labels")
        self.function = function
        self.where = location_of(function)
        self.codec = _codec_of(function, self.name, leading=Workflow)
        self._backend = backend
        self._options = StartSettings()
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
        labels: Labels = NO_LABELS,
    ) -> WorkflowDefinition[P, R_co]:
        """Return a copy of this definition with different start options. Raises ConfigurationError if an option is invalid.

        See `Workflow.start` for the options.

        order.with_options(key="order-17").start(17)
        """
        chosen = copy(self)
        chosen._options = StartSettings.checked(
            key=key, connection=connection, patience=patience, labels=labels
        )
        return chosen

    def start(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R_co]:
        """Build and start a workflow with these arguments. Raises the same errors as `build` and `Workflow.start`.

        order.start(17).result(timeout="5m")
        """
        graph, read = self._made(args, kwargs)
        return self._backend.start(graph, self._options, decode=read)

    async def astart(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowHandle[R_co]:
        """Async version of `start` that does not block the running event loop."""
        graph, read = self._made(args, kwargs)
        return await self._backend.astart(graph, self._options, decode=read)

    def call(self, /, *args: P.args, **kwargs: P.kwargs) -> WorkflowCall[R_co]:
        """Build a workflow with these arguments, to pass to `Context.start`. Raises the same errors as `build`.

        handle = ctx.start(order.call(17))
        """
        graph, read = self._made(args, kwargs)
        positional, named = self.codec.call(self.codec.bind(args, kwargs))
        return WorkflowCall(
            graph,
            options=self._options,
            decode=read,
            digest=digest_of_values((self.name, *positional), named),
            backend=self._backend,
        )

    def build(self, /, *args: P.args, **kwargs: P.kwargs) -> Graph:
        """Build a workflow with these arguments and return its stored form.

        Raises PayloadError if the arguments do not match the signature, and ConfigurationError if the workflow is invalid.
        """
        return self._made(args, kwargs)[0]

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graph, Callable[[str], Any]]:
        bound = self.codec.bind(args, kwargs)
        opened = composed_bound(self.codec, bound).open_names
        if opened:
            text = f"Argument {min(opened)!r} of {self.codec.owner} holds the result of a node, which only its own workflow knows."
            raise PayloadError(
                text, parameter=min(opened), fix="write wf.add(definition, ...) in that workflow."
            )
        workflow = Workflow(
            self.name, on_error=self.on_error, labels=self.labels, backend=self._backend, within=(self,)
        )
        positional, named = self.codec.call(bound)
        output = self.function(workflow, *positional, **named)
        require_promised(self.function, self.name, output)
        return workflow._made(output)


class WorkflowDecorator(Protocol):
    """The type of `@app.define_workflow(...)`.

    The decorated function returns the node whose result becomes the result of the workflow, or None.
    """

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


def definition_decorator(
    name: str,
    *,
    on_error: OnError,
    labels: Labels = NO_LABELS,
    backend: WorkflowSender,
    known: dict[str, WorkflowDefinition[..., Any]],
) -> WorkflowDecorator:
    """Return a decorator that adds a definition to `known`, the app's definitions by name.

    Raises RegistrationError if the function is unsuitable or the name is taken.
    """
    if callable(name):
        reason = f"@app.define_workflow is used without parentheses for {getattr(name, '__name__', name)!r}."
        raise RegistrationError(reason, fix='write @app.define_workflow("name").', where=location_of(name))

    def define(function: Callable[..., Any]) -> WorkflowDefinition[..., Any]:
        definition = WorkflowDefinition[..., Any](
            function, name=name, on_error=on_error, labels=labels, backend=backend
        )
        if (other := known.get(definition.name)) is not None:
            reason = f"Workflow {name!r} is already defined, by {other.where}."
            raise RegistrationError(reason, fix="give one of them another name.", where=definition.where)
        known[definition.name] = definition
        return definition

    return cast(
        WorkflowDecorator, lambda function: make_or_gather(lambda: define(function), otherwise=StandIn())
    )
