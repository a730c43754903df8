"""Middleware around the code of attempts: the order in which it runs, and what its errors mean."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Literal, NoReturn, TypeAlias

from msgspec import Struct

from everbeat.domain.task.context import Context
from everbeat.domain.task.context_backend import is_suspension
from everbeat.domain.task.ending import ending_of
from everbeat.domain.tracing.tracing import Tracing
from everbeat.domain.user_context_managers import ManagerFactory, manager_factory
from everbeat.errors import MIDDLEWARE_FAILED, TaskError
from everbeat.errors.wording import class_name, safe_text

Phase: TypeAlias = Literal["before", "after"]
_CAUSE_BYTES: Final = 2_048


class MiddlewareFailed(TaskError):
    """A middleware raised an exception before the code began, or after the code had succeeded. `cause` is that exception.

    An exception that a middleware raises in response to an exception of the code replaces that exception, and is not wrapped.
    """

    def __init__(self, factory: ManagerFactory, *, phase: Phase, cause: BaseException) -> None:
        kind = class_name(type(cause))
        super().__init__(
            MIDDLEWARE_FAILED,
            f"Middleware {factory} raised {kind} {phase} the code: {safe_text(cause, limit=_CAUSE_BYTES)}",
            {"middleware": factory.name, "where": factory.where, "phase": phase},
        )
        self.cause = cause


class Middleware(Struct, frozen=True):
    """The functions around the code of an app's attempts, in the order of their declaration: the first one is the outermost.

    `tracing`, if any, is around all of them.
    """

    around_run: tuple[ManagerFactory, ...] = ()
    tracing: Tracing | None = None

    def applied_to(self, *, is_async: bool) -> tuple[ManagerFactory, ...]:
        """Return the functions that apply to a task function: an async one applies to async task functions only."""
        return tuple(each for each in self.around_run if is_async or not each.is_async)


def around_run(function: Any) -> ManagerFactory:
    """Return the middleware that a user's function makes. Raises RegistrationError if the function is unsuitable."""
    return manager_factory(
        function, what="a middleware around runs", parameters=1, takes="one parameter, the Context"
    )


class Surrounded(Struct, frozen=True):
    """A call of a sync task function inside its middleware."""

    middleware: Sequence[ManagerFactory]
    context: Context
    code: Callable[[], Any]

    def __call__(self) -> Any:
        """Call the code inside the middleware and return its result."""
        return self._inside(0)

    def _inside(self, depth: int) -> Any:
        if depth == len(self.middleware):
            return self.code()
        factory = self.middleware[depth]
        try:
            manager = factory.make(self.context)
            manager.__enter__()
        except Exception as problem:  # noqa: BLE001 - always raises
            _raise_failure(factory, "before", problem)
        try:
            result = self._inside(depth + 1)
        except BaseException as error:
            if not _is_suspended(error):
                # A middleware that suppresses the exception has no result to put in its place, so the exception stands.
                manager.__exit__(type(error), error, error.__traceback__)
                raise
            self._leave(factory, manager)
            raise
        self._leave(factory, manager)
        return result

    def _leave(self, factory: ManagerFactory, manager: Any) -> None:
        try:
            manager.__exit__(None, None, None)
        except Exception as problem:  # noqa: BLE001 - always raises
            _raise_failure(factory, "after", problem)


class AsyncSurrounded(Struct, frozen=True):
    """A call of an async task function inside its middleware."""

    middleware: Sequence[ManagerFactory]
    context: Context
    code: Callable[[], Awaitable[Any]]

    async def __call__(self) -> Any:
        """Await the code inside the middleware and return its result."""
        return await self._inside(0)

    async def _inside(self, depth: int) -> Any:
        if depth == len(self.middleware):
            return await self.code()
        factory = self.middleware[depth]
        try:
            manager = factory.make(self.context)
            await manager.__aenter__() if factory.is_async else manager.__enter__()
        except Exception as problem:  # noqa: BLE001 - always raises
            _raise_failure(factory, "before", problem)
        try:
            result = await self._inside(depth + 1)
        except BaseException as error:
            if not _is_suspended(error):
                await _exit(factory, manager, error)
                raise  # as above
            await self._leave(factory, manager)
            raise
        await self._leave(factory, manager)
        return result

    async def _leave(self, factory: ManagerFactory, manager: Any) -> None:
        try:
            await _exit(factory, manager, None)
        except Exception as problem:  # noqa: BLE001 - always raises
            _raise_failure(factory, "after", problem)


async def _exit(factory: ManagerFactory, manager: Any, error: BaseException | None) -> None:
    given = (None, None, None) if error is None else (type(error), error, error.__traceback__)
    if factory.is_async:
        await manager.__aexit__(*given)
    else:
        manager.__exit__(*given)


def _is_suspended(error: BaseException) -> bool:
    """Return whether the code released its slot, which a middleware sees as an ordinary end: nothing failed."""
    try:
        return is_suspension(error)
    except Exception:  # noqa: BLE001 - a user's exception class may break anything
        return False


def _raise_failure(factory: ManagerFactory, phase: Phase, problem: Exception) -> NoReturn:
    """Raise the exception with which the attempt ends. A TaskError, RetryLater or Cancel decides this itself."""
    if isinstance(problem, TaskError) or ending_of(problem) is not None:
        raise problem
    raise MiddlewareFailed(factory, phase=phase, cause=problem) from problem
