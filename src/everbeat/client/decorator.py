"""The types of `@app.task` and the making of a task object from a function.

What lives here: the overloads that carry a function's parameters and result over to its task, and
`make_task`. What may not: the registry, which is the app's.

    class App:
        @property
        def task(self) -> TaskFactory: ...
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, final, overload

from everbeat.client.task import AsyncTask, Sender, SyncTask
from everbeat.domain.codec import CallCodec
from everbeat.domain.context import Context
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.duration import Duration
from everbeat.domain.policy import TaskOptions
from everbeat.domain.retry import RetryPolicy
from everbeat.domain.signature import is_async_function, location_of
from everbeat.domain.typed_json import LARGEST_BYTES
from everbeat.errors import RegistrationError

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@final
class _Open:
    """Nobody can make one, so only Any, object and unannotated parameters accept it."""


class _OpenFirst(Protocol[P, R_co]):
    """A function whose first parameter takes anything, and therefore is no Context.

    Without it `f(payload: Any)` would match the overload for a leading Context and lose its parameter. An
    overloaded protocol is an intersection, so P keeps every parameter.
    """

    @overload
    def __call__(self, first: _Open, /, *args: Any, **kwargs: Any) -> R_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


class TaskDecorator(Protocol):
    """Makes a task of a function: AsyncTask of `async def`, SyncTask of `def`; a leading Context is not
    sent.
    """

    @overload
    def __call__(self, function: _OpenFirst[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: _OpenFirst[P, R], /) -> SyncTask[P, R]: ...  # type: ignore[overload-overlap]
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


class TaskFactory(Protocol):
    """`@app.task` with or without options; the options are those of TaskOptions."""

    @overload
    def __call__(self, function: _OpenFirst[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, function: _OpenFirst[P, R], /) -> SyncTask[P, R]: ...  # type: ignore[overload-overlap]
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
    @overload
    def __call__(
        self,
        *,
        name: str | None = None,
        queue: str = "default",
        priority: int = 0,
        timeout: Duration | None = None,
        retry: RetryPolicy | None = None,
        run_in: Literal["async", "thread", "process"] | None = None,
        on_crash: Literal["fail", "retry"] | None = None,
        max_crashes: int | None = None,
        max_losses: int | None = None,
        stall_timeout: Duration | None = None,
        flags: Iterable[str] | Mapping[str, bool] = (),
        serial: bool = False,
        exception_codes: Mapping[type[BaseException], str] = ...,
    ) -> TaskDecorator: ...


def make_task(
    function: Callable[..., Any], /, *, options: TaskOptions, sender: Sender, largest: int = LARGEST_BYTES
) -> SyncTask[..., Any] | AsyncTask[..., Any]:
    """The task object of a function; raises RegistrationError for functions that cannot be one."""
    definition = define(function, options=options, largest=largest)
    return (AsyncTask if definition.is_async else SyncTask)(definition, sender=sender)


def define(
    function: Callable[..., Any], /, *, options: TaskOptions, largest: int = LARGEST_BYTES
) -> TaskDefinition:
    """What a worker needs of a function and its options; raises RegistrationError."""
    where = location_of(function)
    name: str = options.name or str(getattr(function, "__name__", type(function).__name__))
    if name == "<lambda>":
        reason = "A lambda has no name by which a worker could find it."
        raise RegistrationError(reason, fix='write a `def`, or give it one: name="...".', where=where)
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
