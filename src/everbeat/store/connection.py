"""Connections whose waits can be observed, the hosts that they try, and the settings of their sessions."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from time import monotonic
from typing import Any, Final, Protocol, TypeVar

import psycopg
from msgspec import Struct
from psycopg import AsyncConnection, BaseConnection, Connection
from psycopg.waiting import READY_R, WAIT_R

from everbeat.runtime.blocking import hang_up
from everbeat.runtime.fork import close_in_forked_child


class _Own(BaseConnection[Any]):
    """A connection that everbeat itself opens.

    In a forked child, its socket is closed, because the child would otherwise keep the session open.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        close_in_forked_child(self)

    @classmethod
    def _connect_gen(cls, *arguments: Any, **named: Any) -> Any:
        return _watched(super()._connect_gen(*arguments, **named))


class OwnConnection(_Own, Connection[Any]):
    """A blocking connection that everbeat itself opens, for use in threads."""


class OwnAsyncConnection(_Own, AsyncConnection[Any]):
    """An asynchronous connection that everbeat itself opens, for use on event loops."""


class _ConnectingSocket:
    """The socket of a connection that is being established. libpq owns the socket and may replace it."""

    def __init__(self) -> None:
        self._number = -1
        self._identity: tuple[int, int] | None = None

    def is_at(self, number: int) -> None:
        """Record the descriptor on which libpq is currently waiting."""
        if number != self._number:
            self._number, self._identity = number, _identity_of(number)

    def fileno(self) -> int:
        """Return the descriptor, or -1 if libpq has closed it. Another file may then have the same number."""
        return self._number if self._identity == _identity_of(self._number) else -1


def _identity_of(number: int) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.fstat(number)
        return found.st_dev, found.st_ino
    return None


def _watched(connecting: Generator[tuple[int, Any], Any, Any]) -> Generator[tuple[int, Any], Any, Any]:
    attempt, answer = _ConnectingSocket(), None
    close_in_forked_child(attempt)
    while True:
        try:
            number, wanted = connecting.send(answer)
        except StopIteration as end:
            return end.value
        attempt.is_at(number)
        answer = yield number, wanted


class Host(Struct, frozen=True):
    """One host of a conninfo string: its entries in the lists `host`, `hostaddr` and `port`. A missing or empty entry is None."""

    host: str | None = None
    hostaddr: str | None = None
    port: str | None = None

    def settings(self) -> dict[str, str]:
        """Return the conninfo settings that select only this host."""
        given = {"host": self.host, "hostaddr": self.hostaddr, "port": self.port}
        return {key: value for key, value in given.items() if value is not None}

    def is_of(self, connection: Connection[Any] | AsyncConnection[Any]) -> bool:
        """Return whether this open connection is connected to this host."""
        info = connection.info
        same_place = self.host in (info.host, None) and self.hostaddr in (info.hostaddr, None)
        return same_place and str(info.port) == (self.port or "5432")


class Hosts:
    """The hosts of a URL, in the order in which connections try them. Thread-safe."""

    def __init__(self, given: dict[str, Any]) -> None:
        lists = [str(given.get(key) or "").split(",") for key in ("host", "hostaddr", "port")]
        count = max(len(lists[0]), len(lists[1]))
        if len(lists[2]) not in (1, count):
            count = 1  # libpq rejects such a URL with its own message
        self._order = [Host(*(_entry(each, number) for each in lists)) for number in range(count)]
        self._guard = threading.Lock()

    def __len__(self) -> int:
        return len(self._order)

    def settings(self) -> dict[str, str]:
        """Return the conninfo settings that list the hosts in their current order. The result is empty if there is only one host."""
        order = self._order
        if len(order) == 1:
            return {}
        columns = {
            "host": [each.host for each in order],
            "hostaddr": [each.hostaddr for each in order],
            "port": [each.port for each in order],
        }
        return {
            key: ",".join(entry or "" for entry in column)
            for key, column in columns.items()
            if any(entry is not None for entry in column)
        }

    def answered(self, connection: Connection[Any] | AsyncConnection[Any]) -> Host | None:
        """Move the connection's host to the front of the order and return the host. Return None if the URL does not contain this host."""
        found = next((each for each in self._order if each.is_of(connection)), None)
        if found is not None:
            self._move(found, last=False)
        return found

    def failed(self, host: Host) -> None:
        """Move this host to the end of the order."""
        self._move(host, last=True)

    def _move(self, host: Host, *, last: bool) -> None:
        with self._guard:
            others = [each for each in self._order if each != host]
            there = [each for each in self._order if each == host]
            self._order = [*others, *there] if last else [*there, *others]


def _entry(entries: list[str], number: int) -> str | None:
    return (entries[0] if len(entries) == 1 else entries[number]) or None


T = TypeVar("T")
_SHORTEST_SHARE_S: Final = 0.25


class Watch(Protocol):
    """Decides how long to wait for a statement that has not returned.

    `begin` and `end` are called around each wait, and `arrived` for each part of a reply. On a blocking connection, `silent` is called
    while no data arrives.
    """

    def begin(self) -> None: ...

    def silent(self) -> None: ...

    def arrived(self) -> None: ...

    def end(self) -> None: ...


class ConnectLimit(Struct):
    """The deadline for opening a connection. The remaining time is shared evenly among the hosts that have not been tried yet."""

    ends_at: float
    hosts: int

    def next_share_s(self) -> float:
        """Return how many seconds the next host has to complete the connection.

        The result is never 0, so the last try of a call can succeed even after the deadline.
        """
        share = (self.ends_at - monotonic()) / max(self.hosts, 1)
        self.hosts -= 1
        return max(share, _SHORTEST_SHARE_S)


_LIMIT: Final[ContextVar[ConnectLimit | None]] = ContextVar("everbeat_connect_limit", default=None)


@contextmanager
def limited(limit: ConnectLimit | None) -> Iterator[None]:
    """Within the block, abort each connection attempt that has used up its share of `limit`. None sets no limit."""
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


class _Watched(BaseConnection[Any]):
    """A connection with a watch. `server_pid` is the backend's pid as the server itself reported it."""

    watch: Watch | None = None
    host: Host | None = None
    server_pid = 0

    @classmethod
    def _connect_gen(cls, *arguments: Any, **named: Any) -> Any:
        return _in_time(super()._connect_gen(*arguments, **named))


class WatchedConnection(_Watched, OwnConnection):
    """A blocking connection that calls its watch after each tenth of a second without data."""

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, and call the watch in the meantime."""
        if self.watch is None:
            return super().wait(gen, *args, **kwargs)
        self.watch.begin()
        try:
            return super().wait(_interrupted(gen, self.watch.silent, self.watch), *args, **kwargs)
        finally:
            self.watch.end()


class WatchedAsyncConnection(_Watched, OwnAsyncConnection):
    """The asynchronous counterpart of `WatchedConnection`. Its watch sets its own timers."""

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        """Wait as psycopg does, and call the watch in the meantime."""
        if self.watch is None:
            return await super().wait(_unbroken(gen, self.pgconn.socket), *args, **kwargs)
        self.watch.begin()
        try:
            watched = _interrupted(gen, self.watch.silent, self.watch)
            return await super().wait(_unbroken(watched, self.pgconn.socket), *args, **kwargs)
        finally:
            self.watch.end()


class EndsAt:
    """A watch that aborts a connection whose wait continues past a deadline. `ends_at` is the deadline on the monotonic clock."""

    def __init__(self, connection: Connection[Any] | AsyncConnection[Any], ends_at: float) -> None:
        self._connection = connection
        self._ends_at = ends_at
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Set a timer if the connection is asynchronous, because `silent` is never called on an event loop."""
        if isinstance(self._connection, AsyncConnection):
            delay_s = max(self._ends_at - monotonic(), 0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, hang_up, self._connection)

    def silent(self) -> None:
        """Abort the connection if the deadline has passed."""
        if monotonic() >= self._ends_at:
            hang_up(self._connection)

    def arrived(self) -> None:
        """Do nothing: arriving data does not extend the deadline."""

    def end(self) -> None:
        """Cancel the timer."""
        if self._timer is not None:
            self._timer.cancel()


def has_news(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Return whether the connection has data to read or has been closed."""
    found = select.poll()
    with suppress(psycopg.Error, OSError):
        found.register(connection.fileno(), select.POLLIN)
        return bool(found.poll(0))
    return False


def _unbroken(gen: Generator[Any, Any, T], fileno: int) -> Generator[Any, Any, T]:
    """Wrap a connection's generator. Read the parts of a reply that have arrived without a wait for each.

    libpq returns a reply of 500 tasks in about nine parts, and each wait takes two turns of the event loop, in which other code runs.
    """
    ready: Any = None
    arrived: select.poll | None = None
    while True:
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            value: T = end.value
            return value
        if wanted == WAIT_R and ready and ready & READY_R:
            if arrived is None:
                arrived = select.poll()
                arrived.register(fileno, select.POLLIN)
            if arrived.poll(0):
                continue
        ready = yield wanted


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
    """Wrap a connection's generator. Call `on_nothing` whenever it resumes without data, and `watch.arrived` whenever data arrives."""
    ready: Any = None
    while True:
        try:
            wanted = gen.send(ready)
        except StopIteration as end:
            value: T = end.value
            return value
        if watch is not None and ready and ready & READY_R:
            watch.arrived()  # data, because a closed connection would have raised an error
        ready = yield wanted
        if not ready:
            on_nothing()


# everbeat's statements need the first five settings. At another isolation level, a statement that waits for a row lock would fail if the
# row is changed. With other values, dates near the year 10000 could not be read, and NULL in a list would be read as text. The server would
# also close idle sessions. The remaining settings limit what a frozen or lost client leaves behind on the server. A transaction that runs
# no statement for 10 s is rolled back: everbeat itself never pauses that long, and the step is repeated. A statement is cancelled when its
# client's socket is closed; only Linux servers can detect that. A session is closed when its network is silent, except on Unix sockets.
# Behind a transaction pooler, this statement sets nothing and returns false, because the settings would leak to other clients. The second
# parameter says whether the pooler keeps one session for each client.
OWN_SETTINGS: Final = b"""
select pg_backend_pid(), 0 < (
    select count(set_config(own.name, own.value, false))
    from (values
        ('default_transaction_isolation', 'read committed'), ('DateStyle', 'ISO'), ('TimeZone', 'UTC'), ('idle_session_timeout', '0'),
        ('array_nulls', 'on'), ('idle_in_transaction_session_timeout', '10s'),
        ('client_connection_check_interval', case when version() like '%%linux%%' then '2s' else '0' end),
        ('tcp_keepalives_idle', '5'), ('tcp_keepalives_interval', '2'), ('tcp_keepalives_count', '3'), ('tcp_user_timeout', '10s')
    ) as own (name, value)
    where pg_backend_pid() = %s or %s
)
"""

BOUND_TRANSACTION: Final = b"set local idle_in_transaction_session_timeout = '10s'"
"""The statement that limits the idle time of a single transaction, for use behind a transaction pooler."""

PATIENT_KEEPALIVES: Final = b"""
    set tcp_keepalives_idle = 60; set tcp_keepalives_interval = 120; set tcp_keepalives_count = 127; set tcp_user_timeout = 0"""
"""Settings for the session that holds a supervisor's session lock.

The server must close this session only if its socket was closed, never because the network is silent. Observers treat the loss of the lock
as the supervisor's death. So the number of probes is the largest that Linux allows. A host that was restarted replies to a probe within two
minutes, and the server then closes the old session.
"""
SILENCE_KEPT_MS: Final = 4 * 3_600_000
"""The minimum time for which the server keeps the session that holds a supervisor's lock while the network is silent.

60 s and 127 probes at intervals of 120 s add up to 4 h 15 min.
"""
