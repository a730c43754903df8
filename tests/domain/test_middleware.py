"""Test the order in which middleware runs, what it sees, and what its errors mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

import pytest

from everbeat import Cancel, Context, RetryLater, TaskError, TaskStopped
from everbeat.client.task import local_context
from everbeat.domain.task.middleware import (
    AsyncSurrounded,
    Middleware,
    MiddlewareFailed,
    Surrounded,
    around_run,
)
from everbeat.errors import MIDDLEWARE_FAILED, RegistrationError, TaskSuspended

CONTEXT = local_context(task_id=uuid4(), name="pack", queue="default")
TENANT: ContextVar[str] = ContextVar("TENANT", default="none")


def run(code: Callable[[], Any], *functions: Any, is_async: bool) -> Any:
    """Run the code inside the functions, as the executors of sync and of async task functions do."""
    applied = Middleware(tuple(map(around_run, functions))).applied_to(is_async=is_async)
    if not is_async:
        return Surrounded(applied, CONTEXT, code)()

    async def acode() -> Any:
        await asyncio.sleep(0)  # it waits once
        return code()

    return asyncio.run(AsyncSurrounded(applied, CONTEXT, acode)())


def noting(log: list[str], name: str) -> Callable[[Context], Iterator[None]]:
    def note(ctx: Context) -> Iterator[None]:
        log.append(f"{name} before {ctx.name}")
        try:
            yield
            log.append(f"{name} after")
        except BaseException as error:
            log.append(f"{name} saw {type(error).__name__}")
            raise
        finally:
            log.append(f"{name} finally")

    return note


def raising(error: BaseException) -> Callable[[], Any]:
    def code() -> Any:
        raise error

    return code


@pytest.mark.parametrize("is_async", [False, True])
def test_the_first_declared_is_the_outermost_and_the_result_passes_through(is_async: bool) -> None:
    log: list[str] = []
    assert run(lambda: 42, noting(log, "a"), noting(log, "b"), is_async=is_async) == 42
    wanted = ["a before pack", "b before pack", "b after", "b finally", "a after", "a finally"]
    assert log == wanted


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        TaskError("NO_STOCK"),
        RetryLater("5s"),
        Cancel("withdrawn"),
        TaskStopped("timed_out", task_id=uuid4()),
        asyncio.CancelledError(),
    ],
)
def test_every_middleware_sees_the_exception_of_the_code_and_it_passes_through_unchanged(
    error: BaseException, is_async: bool
) -> None:
    log: list[str] = []
    with pytest.raises(type(error)) as found:
        run(raising(error), noting(log, "a"), noting(log, "b"), is_async=is_async)
    assert found.value is error or isinstance(error, asyncio.CancelledError)  # asyncio.run makes its own
    name = type(error).__name__
    assert log[2:] == [f"b saw {name}", "b finally", f"a saw {name}", "a finally"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_middleware_does_not_see_a_suspension_as_an_exception(grouped: bool, is_async: bool) -> None:
    log: list[str] = []
    suspended: BaseException = TaskSuspended(task_id=uuid4())
    if grouped:
        suspended = BaseExceptionGroup("steps", [suspended])
    with pytest.raises(type(suspended)) as found:
        run(raising(suspended), noting(log, "a"), noting(log, "b"), is_async=is_async)
    assert found.value is suspended
    assert log[2:] == ["b after", "b finally", "a after", "a finally"]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_middleware_can_replace_an_exception_but_not_suppress_it(is_async: bool) -> None:
    def replaces(ctx: Context) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise TaskError("NO_STOCK", "none left") from error

    def suppresses(ctx: Context) -> Iterator[None]:
        try:
            yield
        except KeyError:
            return

    with pytest.raises(TaskError) as replaced:
        run(raising(KeyError("pear")), replaces, is_async=is_async)
    assert (replaced.value.code, type(replaced.value)) == ("NO_STOCK", TaskError)
    with pytest.raises(KeyError):
        run(raising(KeyError("pear")), suppresses, is_async=is_async)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("phase", ["before", "after"])
def test_an_error_of_the_middleware_itself_names_it_and_its_phase(phase: str, is_async: bool) -> None:
    log: list[str] = []

    def breaks(ctx: Context) -> Iterator[None]:
        if phase == "before":
            raise ConnectionError("no broker")
        yield
        raise ConnectionError("no broker")

    with pytest.raises(MiddlewareFailed) as found:
        run(lambda: log.append("code"), noting(log, "outer"), breaks, is_async=is_async)
    error = found.value
    assert error.code == MIDDLEWARE_FAILED
    assert error.data == {"middleware": "breaks", "where": error.data["where"], "phase": phase}
    assert error.data["where"].startswith(__file__)
    assert f"raised ConnectionError {phase} the code: no broker" in error.message
    assert isinstance(error.cause, ConnectionError)
    assert ("code" in log) == (phase == "after")
    assert log[-2:] == ["outer saw MiddlewareFailed", "outer finally"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("error", [RetryLater("5s"), Cancel("no"), TaskError("CLOSED")])
def test_a_middleware_can_decide_itself_how_the_attempt_ends(error: Exception, is_async: bool) -> None:
    def decides(ctx: Context) -> Iterator[None]:
        raise error
        yield

    with pytest.raises(type(error)) as found:
        run(lambda: 1, decides, is_async=is_async)
    assert found.value is error


@pytest.mark.parametrize("is_async", [False, True])
def test_a_generator_that_yields_never_or_twice_fails_the_attempt(is_async: bool) -> None:
    def never(ctx: Context) -> Iterator[None]:
        return
        yield

    def twice(ctx: Context) -> Iterator[None]:
        yield
        yield

    for function, phase in ((never, "before"), (twice, "after")):
        with pytest.raises(MiddlewareFailed) as found:
            run(lambda: 1, function, is_async=is_async)
        assert found.value.data["phase"] == phase


@pytest.mark.parametrize("is_async", [False, True])
def test_the_code_sees_context_variables_and_the_middleware_resets_them(is_async: bool) -> None:
    def tenant(ctx: Context) -> Iterator[None]:
        token = TENANT.set("blue")
        yield
        TENANT.reset(token)

    assert run(TENANT.get, tenant, is_async=is_async) == "blue"


def test_async_middleware_applies_to_async_functions_only_and_may_wait() -> None:
    log: list[str] = []

    async def waits(ctx: Context) -> AsyncIterator[None]:
        await asyncio.sleep(0)  # it waits once
        log.append("before")
        yield
        await asyncio.sleep(0)  # it waits once
        log.append("after")

    run(lambda: log.append("code"), waits, is_async=True)
    assert log == ["before", "code", "after"]
    run(lambda: log.append("sync code"), waits, is_async=False)
    assert log[3:] == ["sync code"]


def test_factories_of_context_managers_are_accepted() -> None:
    log: list[str] = []

    class Spans:
        def __init__(self, ctx: Context) -> None:
            log.append(ctx.name)

        def __enter__(self) -> None:
            log.append("entered")

        def __exit__(self, *_: object) -> None:
            log.append("left")

    sync = contextmanager(noting(log, "m"))
    run(lambda: log.append("code"), Spans, sync, is_async=False)
    assert log == ["pack", "entered", "m before pack", "code", "m after", "m finally", "left"]

    @asynccontextmanager
    async def later(ctx: Context) -> AsyncIterator[None]:
        yield

    assert around_run(later).is_async
    assert not around_run(sync).is_async


@pytest.mark.parametrize("wrong", [lambda ctx: None, 3, int, "pool"])
def test_a_function_that_makes_no_context_manager_is_rejected(wrong: Any) -> None:
    with pytest.raises(RegistrationError, match="cannot be a middleware around runs: it is neither"):
        around_run(wrong)


def test_a_generator_function_without_a_parameter_is_rejected() -> None:
    def nothing() -> Iterator[None]:
        yield

    with pytest.raises(RegistrationError, match="cannot be called with one parameter, the Context"):
        around_run(nothing)
