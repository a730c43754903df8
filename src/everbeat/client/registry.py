"""Registries for an app's tasks and hooks, the type of its task decorator, and calls by name."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeAlias, TypeVar, cast, final, overload

from everbeat.client.options import SendOptions, SendSettings, patience_of
from everbeat.client.sender import CallSender
from everbeat.client.task import AsyncTask, Call, SyncTask, Task
from everbeat.domain.recovery.hooks import Hook, HookAnswer, HookKind, HookSet, RecoveryContext, SweepSummary
from everbeat.domain.settings.checks import task_name
from everbeat.domain.settings.settings import StandIn, make_or_gather, raise_or_gather, shown
from everbeat.domain.settings.units import When, to_when
from everbeat.domain.task.context import Context
from everbeat.domain.task.definition import CallCodec, TaskDefinition, encode_any
from everbeat.domain.task.failure_handler import StoredHandler
from everbeat.domain.task.policy import TaskOptions
from everbeat.domain.task.signature import is_async_function, location_of
from everbeat.domain.tracing.tracing import Tracing
from everbeat.domain.typed_json import LARGEST_BYTES, encode_json
from everbeat.errors import PayloadError, RegistrationError
from everbeat.errors.wording import nearest

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@final
class _Open:
    """A private marker type. Only parameters that are unannotated, or annotated as Any or object, accept it."""


class OpenFirst(Protocol[P, R_co]):
    """A function whose first parameter accepts any value and is therefore not a Context.

    Without this type, `f(payload: Any)` would match the overload for a leading Context, and its first parameter would be dropped.
    An overloaded protocol is an intersection, so P keeps every parameter.
    """

    @overload
    def __call__(self, first: _Open, /, *args: Any, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class TaskDecorator(Protocol):
    """The type of `@app.task(...)`, which turns an `async def` function into an AsyncTask and a `def` function into a SyncTask.

    A leading Context parameter is not an argument of the task.
    """

    @overload
    def __call__(self, function: OpenFirst[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: OpenFirst[P, R], /) -> SyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, function: Callable[Concatenate[Context, P], Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> SyncTask[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...


def make_task(
    function: Callable[..., Any], /, *, options: TaskOptions, sender: CallSender, largest: int = LARGEST_BYTES
) -> SyncTask[..., Any] | AsyncTask[..., Any]:
    """Return the task object for a function. Raises RegistrationError if the function cannot be a task."""
    definition = define(function, options=options, largest=largest)
    return (AsyncTask if definition.is_async else SyncTask)(definition, sender=sender)


def define(
    function: Callable[..., Any], /, *, options: TaskOptions, largest: int = LARGEST_BYTES
) -> TaskDefinition:
    """Return the definition that a worker needs to run the function. Raises RegistrationError if the function cannot be a task."""
    where = location_of(function)
    name: str = options.name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        reason = "A lambda has no name by which a worker can find it."
        raise RegistrationError(reason, fix='write a `def`, or give it a name: name="...".', where=where)
    codec = CallCodec.from_function(function, task_name=name, largest=largest)
    is_async = is_async_function(function)
    match options.run_in, is_async:
        case "async", False:
            reason = f"Task {name!r} is a `def`, which would block the event loop with run_in='async'."
            raise RegistrationError(reason, fix="write `async def`, or leave run_in out.", where=where)
        case "thread", True:
            reason = f"Task {name!r} is an `async def`, which does not run in a thread."
            raise RegistrationError(reason, fix="write `def`, or leave run_in out.", where=where)
        case _:
            pass
    return TaskDefinition(
        name=name, function=function, is_async=is_async, codec=codec, options=options, where=where or ""
    )


class Registry(Mapping[str, TaskDefinition]):
    """The value of `app.tasks`: a mapping from names to task definitions, in the order of registration."""

    def __init__(self, sender: CallSender) -> None:
        self._sender = sender
        self._tasks = sender.handlers.tasks
        self.payload_limit = sender.payload_limit

    @property
    def queues(self) -> set[str]:
        """Return the queues of the registered tasks, unless a send chooses another one."""
        return {each.options.queue for each in self.values()}

    def register(
        self, function: Callable[..., Any], options: TaskOptions
    ) -> SyncTask[..., Any] | AsyncTask[..., Any]:
        """Register a function and return its task. Raises RegistrationError if the function is invalid or its name is taken."""
        return make_or_gather(lambda: self._registered(function, options), otherwise=StandIn())

    def _registered(
        self, function: Callable[..., Any], options: TaskOptions
    ) -> SyncTask[..., Any] | AsyncTask[..., Any]:
        task = make_task(function, options=options, sender=self._sender, largest=self.payload_limit)
        where = task._definition.where or None
        other = self._tasks.get(task.name)
        if other is not None:
            raise RegistrationError(
                f"Task {task.name!r} is already registered, by {other._definition.where}.",
                fix="rename one of the functions, or give one of them another name: @app.task(name=...).",
                where=where,
            )
        if options.queue != "default":
            self._sender.require_queue(options.queue, subject=f"queue of task {task.name!r}")
        if isinstance(options.on_failure, Task):
            self._sender.handlers.of(task.name, options)
        self._sender.limits.register(task._definition)
        self._tasks[task.name] = task
        return task

    def failure_handlers(self) -> dict[str, StoredHandler]:
        """Return the failure handlers by the names of their tasks. Raises ConfigurationError if a handler is not registered."""
        found = {name: self._sender.handlers.of(name, each.options) for name, each in self.items()}
        return {name: handler for name, handler in found.items() if handler is not None}

    def task(self, name: str) -> Task[..., Any] | None:
        """Return the task with this name, or None if the name is not registered."""
        return self._tasks.get(name)

    def __getitem__(self, name: str) -> TaskDefinition:
        return self._tasks[name]._definition

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def call_by_name(
    registry: Registry,
    name: str,
    arguments: Mapping[str, Any] | None,
    *,
    when: When | None,
    options: SendOptions,
) -> Call[Any]:
    """Return a call of the task `name`. If the task is registered, the arguments are checked against its signature.

    Raises PayloadError if the arguments are invalid, and ConfigurationError if the name or an option is invalid.
    """
    given = {} if arguments is None else arguments
    if not isinstance(given, Mapping):
        raise PayloadError(
            f"The arguments {shown(given)} of task {name!r} are a {type(given).__name__}, not a mapping.",
            fix='name them by parameter: {"user_id": 42}.',
        )
    task = registry.task(name)
    moment = None if when is None else to_when(when, subject="when")
    if task is not None:
        chosen = task.with_options(**options) if options else task
        return chosen._call_of(_checked(chosen, given), when=moment)
    checked_name = task_name(name, subject="name of the task")
    payload = encode_any(given, task_name=checked_name, largest=registry.payload_limit)
    settings = SendSettings.of_options(options, SendSettings())
    return Call(
        name=checked_name,
        payload=payload,
        settings=settings,
        when=moment,
        connection=options.get("connection"),
        patience_s=patience_of(options),
    )


def _checked(task: Task[..., Any], arguments: Mapping[str, Any]) -> bytes:
    """Return the arguments, encoded in the same way as by `send`.

    The arguments are first decoded in the same way as by a worker, so both JSON values and Python values are accepted.
    """
    try:
        plain = encode_json(dict(arguments))
    except Exception:  # noqa: BLE001 - any class can raise any error; encode_any names the argument
        plain = encode_any(arguments, task_name=task.name)
    codec = task._definition.codec
    try:
        args, kwargs = codec.decode(plain)
    except PayloadError as error:
        # The codec's message refers to stored arguments, but these arguments have not been stored yet.
        guilty, rest = error.parameter, error.message.partition(" do not fit its signature")[2]
        subject, fits = "The arguments", "do"
        if guilty is not None and guilty in arguments:
            subject, fits = f"Argument {guilty!r} = {shown(arguments[guilty])}", "does"
        message = f"{subject} of task {task.name!r} {fits} not fit its signature{rest}"
        if guilty in arguments and guilty in codec.parameters:
            fix = f"pass {guilty} as it is declared: {task.name}{codec.signature}."
            raise PayloadError(message, parameter=guilty, fix=fix) from None
        takes = ", ".join(codec.parameters) or "none"
        fix = f"name them by parameter; {task.name} takes: {takes}."
        if guilty in arguments:
            message = f"Task {task.name!r} has no parameter {guilty!r}; it takes: {takes}."
            guess = nearest(str(guilty), codec.parameters)
            fix = f"did you mean {guess!r}?" if guess else "leave it out, or use the name of a parameter."
        raise PayloadError(message, parameter=guilty, fix=fix) from None
    return codec.encode(args, kwargs)


DecidingHook: TypeAlias = Callable[[RecoveryContext], HookAnswer | Awaitable[HookAnswer]]
InterruptedHook: TypeAlias = Callable[[RecoveryContext], object]
RecoveredHook: TypeAlias = Callable[[SweepSummary], object]

D = TypeVar("D", bound=DecidingHook)
F = TypeVar("F", bound=Callable[..., Any])

_GIVEN: Final[Mapping[HookKind, str]] = {
    "on_recovery": "RecoveryContext",
    "on_interrupted": "RecoveryContext",
    "on_recovered": "SweepSummary",
}


class HookRegistry:
    """The registry of an app's recovery hooks. The `tracing` of the app is passed on with the hooks."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self._tracing = tracing
        self._recovery: dict[str | None, Hook] = {}
        self._others: dict[HookKind, Hook] = {}

    def hooks(self) -> HookSet:
        """Return the hooks that have been registered so far."""
        return HookSet(
            recovery=dict(self._recovery),
            interrupted=self._others.get("on_interrupted"),
            recovered=self._others.get("on_recovered"),
            tracing=self._tracing,
        )

    def deciding(self, function: D | None = None, /, *, task: str | None = None) -> Any:
        """Register an `on_recovery` hook. Use as a decorator, with or without a task name.

        Raises RegistrationError if the function cannot be a hook, or another hook is already registered.
        """
        if task is not None:
            make_or_gather(lambda: task_name(task, subject="on_recovery.task"), otherwise=task)

        def register(hook: D) -> D:
            made = _hook("on_recovery", hook, task=task)
            scope = "for all tasks" if task is None else f"for task {task!r}"
            if made is not None and self._is_free(made, self._recovery.get(task), scope):
                self._recovery[task] = made
            return hook if callable(hook) else cast(D, StandIn())

        return register if function is None else register(function)

    def other(self, kind: HookKind, function: F) -> F:
        """Register a hook whose return value is ignored.

        Raises RegistrationError if the function cannot be a hook, or another hook is already registered.
        """
        made = _hook(kind, function)
        if made is not None and self._is_free(made, self._others.get(kind), "of this app"):
            self._others[kind] = made
        return function

    def _is_free(self, hook: Hook, taken: Hook | None, scope: str) -> bool:
        if taken is None:
            return True
        raise_or_gather(
            RegistrationError(
                f"There is already an {hook.kind} hook {scope}: {taken.name}, by {taken.where}.",
                fix="let one function decide, or limit one of them to a task: @app.on_recovery(task=...)."
                if hook.kind == "on_recovery"
                else "let one function call the others.",
                where=hook.where,
            )
        )
        return False


def _hook(kind: HookKind, function: Callable[..., Any], *, task: str | None = None) -> Hook | None:
    where = location_of(function) if callable(function) else None
    problem = callback_problem(function)
    if problem is not None:
        raise_or_gather(
            RegistrationError(
                f"{function!r} cannot be an {kind} hook: {problem}.",
                fix="name the task: @app.on_recovery(task=...)."
                if isinstance(function, str)
                else f"write a `def` or `async def` with one parameter, the {_GIVEN[kind]}.",
                where=where,
            )
        )
        return None
    return Hook(kind=kind, function=function, is_async=is_async_function(function), task=task, where=where)


def callback_problem(function: object) -> str | None:
    """Return why the function cannot be called back with one argument, or None if it can."""
    if not callable(function):
        return "it is not a function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "it is a generator"
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return "it cannot be called with one argument"
    return None
