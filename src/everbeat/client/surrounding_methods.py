"""The `App` methods that register functions around the work: resources, middleware and recovery hooks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, TypeAlias, TypeVar, overload

from everbeat.client.registry import (
    DecidingHook,
    HookRegistry,
    InterruptedHook,
    RecoveredHook,
    callback_problem,
)
from everbeat.client.send_call import AroundSend
from everbeat.client.sender import CallSender
from everbeat.domain.settings.settings import StandIn, make_or_gather
from everbeat.domain.task.context import Context
from everbeat.domain.task.middleware import Middleware, around_run
from everbeat.domain.task.signature import is_async_function, location_of
from everbeat.domain.tracing.tracing import Tracing
from everbeat.domain.user_context_managers import ManagerFactory, manager_factory
from everbeat.errors import RegistrationError
from everbeat.runtime.blocking import refuse_in_loop
from everbeat.runtime.resources import Resource, ResourceSet

T = TypeVar("T")
AroundRun: TypeAlias = Callable[
    [Context],
    Iterator[None]
    | AsyncIterator[None]
    | AbstractContextManager[object, bool | None]
    | AbstractAsyncContextManager[object, bool | None],
]
AroundRunT = TypeVar("AroundRunT", bound=AroundRun)
AroundSendT = TypeVar("AroundSendT", bound=AroundSend)
DecidingT = TypeVar("DecidingT", bound=DecidingHook)
InterruptedT = TypeVar("InterruptedT", bound=InterruptedHook)
RecoveredT = TypeVar("RecoveredT", bound=RecoveredHook)


class Surroundings:
    """The resources and the middleware of an app, in the order of their declaration."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.resources = ResourceSet()
        self._tracing = tracing
        self._around_run: list[ManagerFactory] = []

    @property
    def middleware(self) -> Middleware:
        """Return the tracers, and the middleware that has been registered so far."""
        return Middleware(tuple(self._around_run), self._tracing)

    def add_resource(self, function: Any) -> Resource[Any]:
        """Add the resource that a user's function opens. Raises RegistrationError if the function is unsuitable."""
        resource: Resource[Any] = Resource(
            manager_factory(function, what="a resource", parameters=0, takes="no parameter")
        )
        self.resources.add(resource)
        return resource

    def add_around_run(self, function: Any) -> None:
        """Add a middleware inside all earlier ones. Raises RegistrationError if the function is unsuitable."""
        self._around_run.append(around_run(function))


class SurroundingMethods:
    """The `App` methods for resources, middleware and recovery hooks."""

    _hooks: HookRegistry
    _sender: CallSender
    _surroundings: Surroundings

    @overload
    def resource(self, function: Callable[[], AsyncIterator[T]], /) -> Resource[T]: ...
    @overload
    def resource(self, function: Callable[[], Iterator[T]], /) -> Resource[T]: ...
    @overload
    def resource(self, function: Callable[[], AbstractAsyncContextManager[T, Any]], /) -> Resource[T]: ...
    @overload
    def resource(self, function: Callable[[], AbstractContextManager[T, Any]], /) -> Resource[T]: ...
    def resource(self, function: Callable[[], Any], /) -> Any:
        """Register a generator function that opens an object for all tasks of a process, such as a pool. Use this as a decorator.

        Each worker process and each task process opens the resources in the order of their declaration before it runs code. It closes
        them in reverse order. Raises RegistrationError if the function is unsuitable.

        @app.resource
        async def pool() -> AsyncIterator[Pool]:
            async with make_pool() as opened:
                yield opened
        """
        return make_or_gather(lambda: self._surroundings.add_resource(function), otherwise=StandIn())

    def resources(self) -> AbstractContextManager[None]:
        """Return a context manager that opens the app's resources in a program without a worker, such as a test.

        Raises ResourceFailed if a resource is async or cannot be opened.

        with app.resources():
            pool.value.execute("select 1")
        """
        refuse_in_loop("App.resources", instead="write `async with app.aresources():`")
        return self._surroundings.resources.opened()

    def aresources(self) -> AbstractAsyncContextManager[None]:
        """Async version of `resources` that also opens async resources, on the running event loop."""
        return self._surroundings.resources.aopened()

    def around_run(self, function: AroundRunT, /) -> AroundRunT:
        """Register a generator function that runs around the code of each attempt. Use this as a decorator.

        The function gets the Context of the attempt; its one `yield` stands for the code. A sync function runs where the code runs: in
        the thread, in the task process, or on the event loop, where it must not block. An async function applies to async tasks only.
        The function declared first is the outermost. Raises RegistrationError if the function is unsuitable.

        @app.around_run
        def close_connections(ctx: Context) -> Iterator[None]:
            close_old_connections()
            try:
                yield
            finally:
                close_old_connections()
        """
        make_or_gather(lambda: self._surroundings.add_around_run(function), otherwise=None)
        return function

    def around_send(self, function: AroundSendT, /) -> AroundSendT:
        """Register a function that sees each task before it is stored. Use this as a decorator.

        The function returns a SendCall with other options, or None to leave the call unchanged. If it raises an exception, nothing is
        sent. It runs in the sender's thread, also on event loops, so it must not wait. It sees sends, scheduled sends and children, but
        not the nodes of workflows or the ticks of schedules. Raises RegistrationError if the function is unsuitable.

        @app.around_send
        def by_region(call: SendCall) -> SendCall | None:
            return call.with_options(queue="eu") if call.arguments.get("region") == "eu" else None
        """
        make_or_gather(lambda: self._add_around_send(function), otherwise=None)
        return function

    def _add_around_send(self, function: AroundSend) -> None:
        problem = "it is async" if is_async_function(function) else callback_problem(function)
        if problem is not None:
            raise RegistrationError(
                f"{function!r} cannot be a function around sends: {problem}.",
                fix="write a `def` with one parameter, the SendCall, that returns a SendCall or None.",
                where=location_of(function) if callable(function) else None,
            )
        self._sender.around_send.append(function)

    @overload
    def on_recovery(self, function: DecidingT, /) -> DecidingT: ...
    @overload
    def on_recovery(self, /, *, task: str | None = None) -> Callable[[DecidingT], DecidingT]: ...
    def on_recovery(self, function: DecidingT | None = None, /, *, task: str | None = None) -> Any:
        """Register the function that decides how to recover a dead worker's task. Use this method as a decorator.

        If `task` is set, the function decides only on tasks with that name, and takes precedence over the function for all tasks.

        @app.on_recovery(task="render")
        def later(context: RecoveryContext) -> Reschedule:
            return Reschedule(run_at=timedelta(minutes=10))
        """
        return self._hooks.deciding(function, task=task)

    def on_interrupted(self, function: InterruptedT, /) -> InterruptedT:
        """Register a function that is called for each recovered task, after its recovery is committed. Use this method as a decorator."""
        return self._hooks.other("on_interrupted", function)

    def on_recovered(self, function: RecoveredT, /) -> RecoveredT:
        """Register a function that is called after each recovery pass that recovered tasks. Use this method as a decorator."""
        return self._hooks.other("on_recovered", function)
