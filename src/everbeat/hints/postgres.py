"""Hints received through LISTEN, for an event loop or a thread. Each listener has its own connection."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

from psycopg import AsyncConnection, Connection, sql

from everbeat.hints import OnHint, OnState
from everbeat.hints.delivery import HintDispatcher, reconnect_backoff
from everbeat.runtime.blocking import hang_up

PROBE_INTERVAL_S: Final = 15.0
"""After this many seconds without a hint, the listener sends a query, because a peer that has vanished does not close its connection."""
FULL_PROBE_INTERVAL_S: Final = 1.0
"""The probe interval in seconds while PostgreSQL's notification queue is too full."""
NO_ROOM: Final = 0.5
"""Once this fraction of PostgreSQL's notification queue is in use, everbeat's statements send no notifications."""
REPLY_TIMEOUT_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 20.0

_WHOSE_BACKEND: Final = "SELECT pg_backend_pid(), pg_notification_queue_usage()"


class PoolerBetween(Exception):
    """A transaction pooler replies instead of the server, and LISTEN does not work through a pooler. Use a direct URL for LISTEN."""


class PostgresHintSource:
    """Hints from one channel. `connect` opens a connection for this listener only, and the listener closes the connection."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[AsyncConnection[Any]]],
        channel: str,
        *,
        ignores_ends: bool = False,
        random: Random | None = None,
        probe_interval_s: float = PROBE_INTERVAL_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._ignores_ends = ignores_ends
        self._backoff = reconnect_backoff(random or Random())
        self._probe_interval_s = probe_interval_s
        self._reply_timeout_s = reply_timeout_s

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        """Deliver hints until cancelled."""
        dispatcher = HintDispatcher(
            self._channel, on_hint=on_hint, on_state=on_state, ignores_ends=self._ignores_ends
        )
        try:
            while True:
                try:
                    await self._listen_once(dispatcher)
                except PoolerBetween as problem:
                    dispatcher.lost(problem)
                    await asyncio.Event().wait()
                except Exception as problem:  # noqa: BLE001  # after any error, polling continues and a retry follows
                    dispatcher.lost(problem)
                await asyncio.sleep(self._backoff.next())
        finally:
            dispatcher.ended()

    async def _listen_once(self, dispatcher: HintDispatcher) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            connection = await self._connect()
        try:
            await connection.set_autocommit(True)
            used = await self._probe(connection)
            # This handler gets notifications that arrive together with the reply to a statement.
            connection.add_notify_handler(lambda notification: dispatcher.payload(notification.payload))
            await connection.execute(_listen(self._channel))
            while True:
                _report_room(dispatcher, used)
                # `connection.notifies()` is not used, because it wakes up ten times a second to check for interrupts.
                while await _is_readable(connection, within_s=_quiet_s(dispatcher, self._probe_interval_s)):
                    for payload in _arrived(connection):
                        dispatcher.payload(payload)
                    self._backoff.reset()
                    if not dispatcher.is_listening:
                        break
                used = await self._probe(connection)
                self._backoff.reset()
        finally:
            await connection.close()

    async def _probe(self, connection: AsyncConnection[Any]) -> float:
        # asyncio.timeout is not used: on cancellation, psycopg sends a query to the server, but the server is the side that does not respond.
        overdue = asyncio.get_running_loop().call_later(self._reply_timeout_s, hang_up, connection)
        try:
            cursor = await connection.execute(_WHOSE_BACKEND)
            return _used(connection, await cursor.fetchone())
        finally:
            overdue.cancel()


async def _is_readable(connection: AsyncConnection[Any], *, within_s: float) -> bool:
    loop, readable, number = asyncio.get_running_loop(), asyncio.Event(), connection.fileno()
    loop.add_reader(number, readable.set)
    try:
        async with asyncio.timeout(within_s):
            await readable.wait()
    except TimeoutError:
        return False
    else:
        return True
    finally:
        loop.remove_reader(number)


def _arrived(connection: AsyncConnection[Any]) -> Iterator[str]:
    server = connection.pgconn
    server.consume_input()
    while (notification := server.notifies()) is not None:
        yield notification.extra.decode(connection.info.encoding)


class SyncPostgresHintSource:
    """Hints from one channel, and from the channels in `also`, delivered in a daemon thread. `connect` is called in that thread."""

    def __init__(
        self,
        connect: Callable[[], Connection[Any]],
        channel: str,
        *,
        also: Sequence[str] = (),
        random: Random | None = None,
        probe_interval_s: float = PROBE_INTERVAL_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._also = also
        self._backoff = reconnect_backoff(random or Random())
        self._probe_interval_s = probe_interval_s
        self._reply_timeout_s = reply_timeout_s
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._connection: Connection[Any] | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, on_hint: OnHint, on_state: OnState) -> None:
        """Start delivering hints in a thread. Raises RuntimeError if called twice."""
        if self._thread is not None:
            raise RuntimeError(f"The listener on {self._channel!r} was started before; make a new one.")
        dispatcher = HintDispatcher(self._channel, on_hint=on_hint, on_state=on_state)
        self._thread = threading.Thread(
            target=self._run, args=(dispatcher,), name="everbeat-hints", daemon=True
        )
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Stop, and wait up to `timeout_s` seconds for the thread. A second call does nothing."""
        if self._pid != os.getpid():
            return  # in a forked child, the connection still belongs to the parent
        self._stopping.set()
        with self._guard:
            if self._connection is not None:
                hang_up(
                    self._connection
                )  # the thread is waiting on this connection and would not notice the event
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self, dispatcher: HintDispatcher) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._listen_once(dispatcher)
                except PoolerBetween as problem:
                    dispatcher.lost(problem)
                    self._stopping.wait()
                except Exception as problem:  # noqa: BLE001  # after any error, polling continues and a retry follows
                    if not self._stopping.is_set():
                        dispatcher.lost(problem)
                self._stopping.wait(self._backoff.next())
        finally:
            dispatcher.ended()

    def _listen_once(self, dispatcher: HintDispatcher) -> None:
        connection = self._connect()
        try:
            with self._guard:
                if self._stopping.is_set():
                    return
                self._connection = connection
            connection.autocommit = True
            used = self._probe(connection)
            for channel in (self._channel, *self._also):
                connection.execute(_listen(channel))
            while not self._stopping.is_set():
                _report_room(dispatcher, used)
                for notification in connection.notifies(timeout=_quiet_s(dispatcher, self._probe_interval_s)):
                    dispatcher.payload(notification.payload)
                    self._backoff.reset()
                    if not dispatcher.is_listening:
                        break
                used = self._probe(connection)
                self._backoff.reset()
        finally:
            with self._guard:
                self._connection = None
                connection.close()

    def _probe(self, connection: Connection[Any]) -> float:
        overdue = threading.Timer(self._reply_timeout_s, self._hang_up_if_current, [connection])
        overdue.daemon = True
        overdue.start()
        try:
            return _used(connection, connection.execute(_WHOSE_BACKEND).fetchone())
        finally:
            overdue.cancel()

    def _hang_up_if_current(self, connection: Connection[Any]) -> None:
        with self._guard:
            if self._connection is connection:
                hang_up(connection)


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel))


def _quiet_s(dispatcher: HintDispatcher, interval_s: float) -> float:
    return interval_s if dispatcher.is_listening else min(interval_s, FULL_PROBE_INTERVAL_S)


def _report_room(dispatcher: HintDispatcher, used: float) -> None:
    """Report whether statements send notifications. They send none while the queue is too full, although this connection stays open."""
    if used >= NO_ROOM:
        dispatcher.lost(
            f"PostgreSQL's notification queue is {used:.0%} full, so everbeat sends none;"
            " 'everbeat doctor' reports what keeps it full"
        )
    elif not dispatcher.is_listening:
        dispatcher.connected()


def _used(connection: Connection[Any] | AsyncConnection[Any], row: tuple[Any, ...] | None) -> float:
    """Return the fraction of the notification queue that is in use. Raises PoolerBetween if a pooler replied."""
    # A pooler reports its own pids to clients. If it keeps one session per client, the greeting shows the server's pid.
    pid = getattr(connection, "server_pid", connection.info.backend_pid)
    if row is None or row[0] != pid or connection.prepare_threshold is None:
        raise PoolerBetween(
            "a transaction pooler replies instead of the server, and LISTEN does not work through it: use a direct URL"
        )
    return float(row[1])
