"""Connections whose waits can be watched, and attempts to connect that end in time.

psycopg waits for a server in steps of 0.1 s. The classes here use these steps to ask a watch whether to wait any longer.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

import psycopg
from msgspec import Struct
from psycopg import AsyncConnection, BaseConnection, Connection
from psycopg.waiting import READY_R

from everbeat.runtime.shutting_down import shut_down
from everbeat.store.connection import OwnAsyncConnection, OwnConnection
from everbeat.store.hosts import Host

T = TypeVar("T")
_SHORTEST_SHARE_S: Final = 0.25


class Watch(Protocol):
    """Decides how long a silent statement is waited for. `begin` and `end` enclose each wait; `arrived` follows each piece of an answer."""

    def begin(self) -> None: ...

    def silent(self) -> None: ...

    def arrived(self) -> None: ...

    def end(self) -> None: ...


class Limit(Struct):
    """Until when a connection must be made; the time left is shared evenly by the hosts that were not tried yet."""

    ends_at: float
    hosts: int

    def next_share_s(self) -> float:
        """The seconds that the next host gets: even the last try of a call, when its time is over, can succeed."""
        share = (self.ends_at - monotonic()) / max(self.hosts, 1)
        self.hosts -= 1
        return max(share, _SHORTEST_SHARE_S)


_LIMIT: Final[ContextVar[Limit | None]] = ContextVar("everbeat_connect_limit", default=None)


@contextmanager
def limited(limit: Limit | None) -> Iterator[None]:
    """Within the block, each attempt to connect ends when its share of the limit is used up; None sets no limit."""
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


class _Watched(BaseConnection[Any]):
    """A connection with a watch. `server_pid` is the pid that the server itself told."""

    watch: Watch | None = None
    host: Host | None = None
    server_pid = 0

    @classmethod
    def _connect_gen(cls, *arguments: Any, **named: Any) -> Any:
        return _in_time(super()._connect_gen(*arguments, **named))


class WatchedConnection(_Watched, OwnConnection):
    """A connection that asks `watch` at every tenth of a second without data."""

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, and watch."""
        if self.watch is None:
            return super().wait(gen, *args, **kwargs)
        self.watch.begin()
        try:
            return super().wait(_interrupted(gen, self.watch.silent, self.watch), *args, **kwargs)
        finally:
            self.watch.end()


class WatchedAsyncConnection(_Watched, OwnAsyncConnection):
    """The twin of `WatchedConnection` for event loops; its watch sets timers of its own."""

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, and watch."""
        if self.watch is None:
            return await super().wait(gen, *args, **kwargs)
        self.watch.begin()
        try:
            return await super().wait(_interrupted(gen, self.watch.silent, self.watch), *args, **kwargs)
        finally:
            self.watch.end()


class EndsAt:
    """Hangs up on a connection whose server is silent at a moment of the monotonic clock."""

    def __init__(self, connection: Connection[Any] | AsyncConnection[Any], ends_at: float) -> None:
        self._connection = connection
        self._ends_at = ends_at
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """On a loop, where `silent` is never called, set a timer."""
        if isinstance(self._connection, AsyncConnection):
            delay_s = max(self._ends_at - monotonic(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, hang_up, self._connection)

    def silent(self) -> None:
        """Hang up if it is time."""
        if monotonic() >= self._ends_at:
            hang_up(self._connection)

    def arrived(self) -> None:
        """Change nothing: data does not move the moment."""

    def end(self) -> None:
        """Remove the timer."""
        if self._timer is not None:
            self._timer.cancel()


def hang_up(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """End a connection under the code that waits for it, which sees it as lost at once. Closing it is left to its owner."""
    with suppress(psycopg.Error, OSError):
        shut_down(connection.fileno())


def has_news(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether data, or the end of the connection, waits to be read."""
    found = select.poll()
    with suppress(psycopg.Error, OSError):
        found.register(connection.fileno(), select.POLLIN)
        return bool(found.poll(0))
    return False


def _in_time(gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    limit = _LIMIT.get()
    if limit is None:
        return gen
    share_s = limit.next_share_s()
    ends_at = monotonic() + share_s

    def give_up() -> None:
        if monotonic() >= ends_at:
            raise psycopg.errors.ConnectionTimeout(
                f"the server did not complete the connection within {share_s:.1f} s"
            )

    return _interrupted(gen, give_up)


def _interrupted(
    gen: Generator[Any, Any, T], on_nothing: Callable[[], None], watch: Watch | None = None
) -> Generator[Any, Any, T]:
    """The same generator; `on_nothing` is called whenever it is resumed because time has passed; a watch is told of arriving data."""
    ready: Any = None
    while True:
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            value: T = end.value
            return value
        if watch is not None and ready and ready & READY_R:
            watch.arrived()  # data, because the end of the connection would have raised an error
        ready = yield wanted
        if not ready:
            on_nothing()
