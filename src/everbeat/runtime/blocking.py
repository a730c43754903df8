"""Calls between blocking code and event loops: threads, time limits, and an error for blocking calls inside a loop."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from everbeat.errors import BlockingCallInLoop
from everbeat.runtime.fork import Descriptor

T = TypeVar("T")


def refuse_in_loop(name: str, *, twin: str | None = None, instead: str | None = None) -> None:
    """Raise BlockingCallInLoop if an event loop is running in this thread. `twin` names the method to await, `instead` another fix."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCallInLoop(name, twin, instead=instead)


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` until it finishes, even if the caller is cancelled in the meantime. The cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as problem:
            cancelled = problem
    if cancelled is not None:
        task.cancelled() or task.exception()  # retrieve it, so that asyncio does not warn about it
        raise cancelled
    return task.result()


async def in_time(awaitable: Awaitable[T], *, timeout_s: float, late: str) -> T:
    """Return the result of `awaitable`. After `timeout_s` seconds, cancel it and raise TimeoutError with the message `late`.

    A TimeoutError raised by `awaitable` itself is passed on unchanged.
    """
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            return await awaitable
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(late) from error.__cause__
        raise


def hang_up(owner: Descriptor) -> None:
    """Shut down a socket, so that code waiting on it notices at once. The owner must still close the socket.

    The descriptor is not duplicated, because the process might have none left.
    """
    with suppress(Exception):  # already closed: each type of owner raises a different error
        line = socket.socket(fileno=owner.fileno())
        try:
            line.shutdown(socket.SHUT_RDWR)
        finally:
            line.detach()


def strand() -> int:
    """Return a number that identifies the current asyncio task or, outside a task, the current thread.

    The number is unique while that task or thread exists.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no loop is running in this thread
        task = None
    return threading.get_ident() if task is None else id(task)


P = ParamSpec("P")
R = TypeVar("R")


class LastingExecutor(ThreadPoolExecutor):
    """A thread pool that still runs calls after Python has closed all pools at the end of the main thread.

    From then on, it runs each call in a separate thread. A worker in another thread may outlive the program's main thread. Without this
    pool, such a worker could no longer resolve host names and could not shut down cleanly.
    """

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `function` in a thread and return its future."""
        try:
            return super().submit(function, *args, **kwargs)
        except RuntimeError:
            future: Future[R] = Future()

            def call() -> None:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(*args, **kwargs))
                    except BaseException as error:  # noqa: BLE001 - the caller gets every error
                        future.set_exception(error)

            threading.Thread(target=call, name="everbeat-call", daemon=True).start()
            return future
