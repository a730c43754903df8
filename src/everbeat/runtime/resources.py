"""Resources of an app: objects such as connection pools that each process opens once, before it runs code."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, Generic, NoReturn, TypeVar

from everbeat.domain.settings.checks import public
from everbeat.domain.user_context_managers import ManagerFactory
from everbeat.errors import ResourceFailed, ResourceNotOpen
from everbeat.errors.wording import class_name, safe_text
from everbeat.runtime.fork import call_in_forked_child
from everbeat.runtime.main_loop import coroutine_stack
from everbeat.runtime.task_scope import TaskScope

T_co = TypeVar("T_co", covariant=True)

OPEN_WITHIN_S: Final = 30.0
"""How long all resources of a process together can take to open, in seconds."""
CLOSE_WITHIN_S: Final = 5.0
"""How long all resources of a process together can take to close, in seconds."""
_POLL_S: Final = 0.01
_REASON_BYTES: Final = 2_048

_log = logging.getLogger("everbeat.runtime")


@public
class Resource(Generic[T_co]):
    """An object that each process opens once and all of its tasks share, such as a connection pool.

    `@app.resource` creates it from a generator function. A worker opens it before it claims tasks.
    """

    def __init__(self, factory: ManagerFactory) -> None:
        self._factory = factory
        self._opened: list[Any] = []

    def __repr__(self) -> str:
        return f"<Resource {self._factory}, {'open' if self._opened else 'not open'}>"

    @property
    def name(self) -> str:
        """Return the name of the function that opens the resource."""
        return self._factory.name

    @property
    def value(self) -> T_co:
        """Return the object that the function yielded in this process. Raises ResourceNotOpen if the resource is not open here."""
        try:
            value: T_co = self._opened[0]
        except IndexError:
            raise ResourceNotOpen(self._factory.name, is_async=self._factory.is_async) from None
        return value


class _ManagerThread:
    """Runs calls one after another in a thread. It is a daemon thread, because a call that hangs must not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="everbeat-resources", daemon=True).start()

    async def run(self, call: Callable[[], Any]) -> Any:
        done: Future[Any] = Future()
        self._calls.put((call, done))
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        self._calls.put(None)

    def _serve(self) -> None:
        while (order := self._calls.get()) is not None:
            call, done = order
            if not done.set_running_or_notify_cancel():
                continue
            try:
                done.set_result(call())
            except BaseException as problem:  # noqa: BLE001 - the caller gets every error
                done.set_exception(problem)


class ResourceSet:
    """The resources of an app in this process. Several workers and `with` blocks of one process share the opened resources.

    The resources open in the order of their declaration and close in reverse order, when the last user has left.
    """

    def __init__(self) -> None:
        self._resources: list[Resource[Any]] = []
        self._lock = threading.Lock()
        self._users = 0
        self._is_changing = False
        self._keeper: _Keeper | None = None
        self._left: list[tuple[Resource[Any], Any]] = []
        call_in_forked_child(self._forget)

    def __len__(self) -> int:
        return len(self._resources)

    def add(self, resource: Resource[Any]) -> None:
        """Add a resource, which opens after all earlier ones."""
        self._resources.append(resource)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the resources in this thread for a `with` block. Raises ResourceFailed if one is async or cannot be opened."""
        while not self._join():
            time.sleep(_POLL_S)
        if self._is_changing:
            self._open_here()
        try:
            yield
        finally:
            if self._leave():
                try:
                    self._close_here()
                finally:
                    self._ended(users=0)

    @asynccontextmanager
    async def aopened(self) -> AsyncIterator[None]:
        """Open the resources for an `async with` block. Raises ResourceFailed if one cannot be opened."""
        await self.aopen()
        try:
            yield
        finally:
            await self.aclose()

    async def aopen(
        self, *, within_s: float = OPEN_WITHIN_S, on_loop_ending: Callable[[], None] | None = None
    ) -> None:
        """Open the resources, unless they are open in this process. Raises ResourceFailed if one cannot be opened in time.

        The async ones belong to the running loop. `on_loop_ending` protects them as it protects the tasks of a `TaskScope`.
        """
        while not self._join():  # noqa: ASYNC110 - the other user can be a thread, which cannot set an asyncio.Event
            await asyncio.sleep(_POLL_S)
        if not self._is_changing:
            self._require_same_loop()
            return
        keeper = _Keeper(self._resources, on_loop_ending=on_loop_ending)
        try:
            await keeper.open(within_s)
        except BaseException:
            self._ended(users=0)
            raise
        self._keeper = keeper
        self._ended(users=1)

    async def aclose(self, *, within_s: float = CLOSE_WITHIN_S) -> None:
        """Close the resources if this was their last user. Failures, and resources that do not close in time, are logged."""
        if not self._leave():
            return
        keeper, self._keeper = self._keeper, None
        try:
            if keeper is not None:
                await keeper.close(within_s)
            else:
                _close_in_order(self._left)
        finally:
            self._ended(users=0)

    def leave_open(self) -> None:
        """Keep the resources open until their loop ends, because code that is still running might use them."""
        if self._keeper is not None:
            self._keeper.end_with_loop()

    def _join(self) -> bool:
        """Become a user of the open resources, or start to open them. Return False while another user is opening or closing them."""
        with self._lock:
            if self._is_changing:
                return False
            if self._users:
                self._users += 1
            else:
                self._is_changing = True
            return True

    def _ended(self, *, users: int) -> None:
        with self._lock:
            self._users, self._is_changing = users, False

    def _leave(self) -> bool:
        """Stop using the resources. Return whether they must be closed, because this was their last user."""
        with self._lock:
            self._users -= 1
            self._is_changing = self._users == 0
            return self._is_changing

    def _require_same_loop(self) -> None:
        keeper = self._keeper
        if keeper is None or keeper.loop is asyncio.get_running_loop():
            return
        if self._leave():
            self._ended(users=0)
        raise ResourceFailed(
            "The app's resources are open on another event loop of this process, and can be shared on that loop only.",
            fix="run the workers of a process on one event loop.",
        )

    def _open_here(self) -> None:
        try:
            for resource in self._resources:
                if resource._factory.is_async:
                    raise ResourceFailed(
                        f"Resource {resource._factory} is async, and app.resources() opens no async resources.",
                        fix="write `async with app.aresources():`.",
                    )
            for resource in self._resources:
                try:
                    manager = resource._factory.make()
                    resource._opened[:] = [manager.__enter__()]
                except Exception as problem:  # noqa: BLE001 - always raises
                    _raise_failed(resource, problem)
                self._left.append((resource, manager))
        except BaseException:
            _close_in_order(self._left)
            self._ended(users=0)
            raise
        self._ended(users=1)

    def _close_here(self) -> None:
        keeper, self._keeper = self._keeper, None
        if (
            keeper is not None and keeper.loop.is_running()
        ):  # the `async with` block that opened them has ended
            asyncio.run_coroutine_threadsafe(keeper.close(CLOSE_WITHIN_S), keeper.loop).result()
        _close_in_order(self._left)

    def _forget(self) -> None:
        # A forked child shares its parent's sockets, so it must not use them, and must not close them either.
        self._lock = threading.Lock()
        self._users, self._is_changing, self._keeper, self._left = 0, False, None, []
        for resource in self._resources:
            resource._opened.clear()


class _Keeper:
    """Opens and closes the resources in one asyncio task, because a task group or time limit in a generator requires this.

    Sync resources open and close in one thread, so that they never block the loop.
    """

    def __init__(self, resources: list[Resource[Any]], *, on_loop_ending: Callable[[], None] | None) -> None:
        self.loop = asyncio.get_running_loop()
        self._resources = tuple(resources)
        self._is_protected = True
        self._on_loop_ending = on_loop_ending
        sheltering = None if on_loop_ending is None else self._loop_ends
        self._scope = TaskScope(name="resources", on_loop_ending=sheltering)
        self._closing = asyncio.Event()
        self._is_open: asyncio.Future[None] = self.loop.create_future()
        self._current: Resource[Any] | None = None
        self._thread: _ManagerThread | None = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, within_s: float) -> None:
        """Open all resources. If one fails, close the earlier ones and raise ResourceFailed."""
        self._task = task = self._scope.start(self._keep(), name="resources")
        try:
            await asyncio.wait({self._is_open}, timeout=within_s)
        except asyncio.CancelledError:
            await self.close(CLOSE_WITHIN_S)
            raise
        if self._is_open.done():
            self._is_open.result()
            return
        current = self._current
        assert current is not None
        _log.error(
            "resource_hangs name=%s where=%s phase=open\n%s",
            current.name, current._factory.where, coroutine_stack(task),
        )  # fmt: skip
        await self.close(CLOSE_WITHIN_S)
        raise ResourceFailed(
            f"Resource {current._factory} did not open within {within_s:g} s.",
            fix="give its connections a shorter time limit, or open them on first use.",
        )

    def end_with_loop(self) -> None:
        """Let `asyncio.run` close the resources when it cancels the tasks of its loop. Otherwise, it would wait for them forever."""
        self._is_protected = False

    async def close(self, within_s: float) -> None:
        """Close all resources. After `within_s` seconds, log the one that does not close, and leave it and the others behind."""
        assert self._task is not None
        self._closing.set()
        if not self._is_open.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=within_s)
        if not self._task.done():
            if (current := self._current) is not None:
                _log.error(
                    "resource_hangs name=%s where=%s phase=close\n%s",
                    current.name, current._factory.where, coroutine_stack(self._task),
                )  # fmt: skip
            self._task.cancel()
        for resource in self._resources:
            resource._opened.clear()
        if self._thread is not None:
            self._thread.close()

    def _loop_ends(self) -> None:
        if not self._is_protected:
            self._closing.set()
        elif self._on_loop_ending is not None:
            self._on_loop_ending()

    async def _keep(self) -> None:
        opened: list[tuple[Resource[Any], Any]] = []
        try:
            for resource in self._resources:
                await self._open(resource, opened)
        except BaseException as problem:  # noqa: BLE001 - `open` raises it
            await self._close(opened)
            if not self._is_open.done():
                self._is_open.set_exception(problem)
                self._is_open.exception()  # retrieve it: after a cancellation, no code waits for it
            return
        self._current = None
        self._is_open.set_result(None)
        try:
            await self._closing.wait()
        finally:
            await self._close(opened)

    async def _open(self, resource: Resource[Any], opened: list[tuple[Resource[Any], Any]]) -> None:
        self._current, factory = resource, resource._factory
        try:
            if factory.is_async:
                manager = factory.make()
                value = await manager.__aenter__()
            else:
                manager, value = await self._in_thread(partial(_entered, factory))
        except asyncio.CancelledError:
            raise
        except BaseException as problem:  # noqa: BLE001 - a resource must not end the loop with SystemExit
            _raise_failed(resource, problem)
        opened.append((resource, manager))
        resource._opened[:] = [value]

    async def _close(self, opened: list[tuple[Resource[Any], Any]]) -> None:
        while opened:
            resource, manager = opened.pop()
            self._current = resource
            resource._opened.clear()
            try:
                if resource._factory.is_async:
                    await manager.__aexit__(None, None, None)
                else:
                    await self._in_thread(partial(manager.__exit__, None, None, None))
            except Exception:  # noqa: BLE001 - it is logged, and the others are closed
                _log_unclosed(resource)
        self._current = None

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = _ManagerThread()
        try:
            return await self._thread.run(call)
        except asyncio.CancelledError:
            self._thread = None  # the call hangs, and the other resources are closed in another thread
            raise


def _entered(factory: ManagerFactory) -> tuple[Any, Any]:
    manager = factory.make()
    return manager, manager.__enter__()


def _raise_failed(resource: Resource[Any], problem: BaseException) -> NoReturn:
    """Raise ResourceFailed, and log the traceback, which the error does not contain."""
    _log.error(
        "resource_failed name=%s where=%s phase=open",
        resource.name,
        resource._factory.where,
        exc_info=problem,
    )
    reason = safe_text(problem, limit=_REASON_BYTES).rstrip(".")
    raise ResourceFailed(
        f"Resource {resource._factory} cannot be opened: {class_name(type(problem))}: {reason}.",
        fix="see the traceback in the log of the process.",
    ) from problem


def _close_in_order(opened: list[tuple[Resource[Any], Any]]) -> None:
    while opened:
        resource, manager = opened.pop()
        resource._opened.clear()
        try:
            manager.__exit__(None, None, None)
        except Exception:  # noqa: BLE001 - as above
            _log_unclosed(resource)


def _log_unclosed(resource: Resource[Any]) -> None:
    _log.exception("resource_failed name=%s where=%s phase=close", resource.name, resource._factory.where)
