"""Hints by LISTEN, for an event loop and for a thread, each on a connection of its own.

What lives here: connecting again for ever, noticing a dead or useless connection. What may not: sending, which the
statements themselves do with pg_notify, in the transaction they are about.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection, Connection, sql

from everbeat.runtime.shutting_down import shut_down
from everbeat.wake import OnHint, OnState
from everbeat.wake.delivery import Delivery, Pauses

PROBE_INTERVAL_S: Final = 15.0
"""A connection is asked after this long without a hint, since a peer that vanished sends no farewell."""
FULL_PROBE_INTERVAL_S: Final = 1.0
"""The same while the queue of notifications has no room."""
NO_ROOM: Final = 0.5
"""From this used share of PostgreSQL's queue of notifications on, the statements do not notify."""
REPLY_TIMEOUT_S: Final = 10.0
_CONNECT_TIMEOUT_S: Final = 20.0

_WHOSE_BACKEND: Final = "SELECT pg_backend_pid(), pg_notification_queue_usage()"


class PoolerBetween(Exception):
    """A transaction pooler answers in the server's place; LISTEN through it hears nothing. Use a direct URL for it."""


class PostgresWake:
    """Hints from one channel. `connect` makes a connection that nobody else uses; it is closed here."""

    def __init__(
        self,
        connect: Callable[[], Awaitable[AsyncConnection[Any]]],
        channel: str,
        *,
        tells_ends: bool = True,
        random: Random | None = None,
        probe_interval_s: float = PROBE_INTERVAL_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._tells_ends = tells_ends
        self._pauses = Pauses(random or Random())
        self._probe_interval_s = probe_interval_s
        self._reply_timeout_s = reply_timeout_s

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        """Deliver hints until cancelled."""
        delivery = Delivery(self._channel, on_hint=on_hint, on_state=on_state, tells_ends=self._tells_ends)
        try:
            while True:
                try:
                    await self._listen_once(delivery)
                except PoolerBetween as problem:
                    delivery.lost(problem.__doc__)
                    await asyncio.Event().wait()
                except Exception as problem:  # noqa: BLE001  # whatever it is, polling goes on and so does trying
                    delivery.lost(problem)
                await asyncio.sleep(self._pauses.next())
        finally:
            delivery.ended()

    async def _listen_once(self, delivery: Delivery) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            connection = await self._connect()
        try:
            await connection.set_autocommit(True)
            used = await self._probe(connection)
            # What arrives with the answer to a statement.
            connection.add_notify_handler(lambda notification: delivery.payload(notification.payload))
            await connection.execute(_listen(self._channel))
            while True:
                _tell_room(delivery, used)
                # Not `connection.notifies()`, which looks ten times a second whether it has been interrupted.
                while await _is_readable(connection, within_s=_quiet_s(delivery, self._probe_interval_s)):
                    for payload in _arrived(connection):
                        delivery.payload(payload)
                    self._pauses.reset()
                    if not delivery.hears:
                        break
                used = await self._probe(connection)
                self._pauses.reset()
        finally:
            await connection.close()

    async def _probe(self, connection: AsyncConnection[Any]) -> float:
        # Not asyncio.timeout: psycopg answers a cancellation by asking the server, the very one that is silent.
        overdue = asyncio.get_running_loop().call_later(self._reply_timeout_s, _hang_up, connection)
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


class SyncPostgresWake:
    """The same in a daemon thread. `connect` is called in that thread."""

    def __init__(
        self,
        connect: Callable[[], Connection[Any]],
        channel: str,
        *,
        random: Random | None = None,
        probe_interval_s: float = PROBE_INTERVAL_S,
        reply_timeout_s: float = REPLY_TIMEOUT_S,
    ) -> None:
        self._connect = connect
        self._channel = channel
        self._pauses = Pauses(random or Random())
        self._probe_interval_s = probe_interval_s
        self._reply_timeout_s = reply_timeout_s
        self._stopping = threading.Event()
        self._guard = threading.Lock()
        self._connection: Connection[Any] | None = None
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def start(self, on_hint: OnHint, on_state: OnState) -> None:
        """Begin to deliver hints, in a thread; raises RuntimeError when called twice."""
        if self._thread is not None:
            raise RuntimeError(f"The listener on {self._channel!r} was started before; make a new one.")
        delivery = Delivery(self._channel, on_hint=on_hint, on_state=on_state)
        self._thread = threading.Thread(
            target=self._run, args=(delivery,), name="everbeat-hints", daemon=True
        )
        self._thread.start()

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End it, waiting at most `timeout_s` seconds for the thread; a second call does nothing."""
        if self._pid != os.getpid():
            return  # a forked child has a copy of the connection, which is still the parent's
        self._stopping.set()
        with self._guard:
            if self._connection is not None:
                _hang_up(self._connection)  # the thread waits in there and would not see the event
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self, delivery: Delivery) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    self._listen_once(delivery)
                except PoolerBetween as problem:
                    delivery.lost(problem.__doc__)
                    self._stopping.wait()
                except Exception as problem:  # noqa: BLE001  # whatever it is, polling goes on and so does trying
                    if not self._stopping.is_set():
                        delivery.lost(problem)
                self._stopping.wait(self._pauses.next())
        finally:
            delivery.ended()

    def _listen_once(self, delivery: Delivery) -> None:
        connection = self._connect()
        try:
            with self._guard:
                if self._stopping.is_set():
                    return
                self._connection = connection
            connection.autocommit = True
            used = self._probe(connection)
            connection.execute(_listen(self._channel))
            while not self._stopping.is_set():
                _tell_room(delivery, used)
                for notification in connection.notifies(timeout=_quiet_s(delivery, self._probe_interval_s)):
                    delivery.payload(notification.payload)
                    self._pauses.reset()
                    if not delivery.hears:
                        break
                used = self._probe(connection)
                self._pauses.reset()
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
                _hang_up(connection)


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel))


def _quiet_s(delivery: Delivery, interval_s: float) -> float:
    return interval_s if delivery.hears else min(interval_s, FULL_PROBE_INTERVAL_S)


def _tell_room(delivery: Delivery, used: float) -> None:
    """Tell whether the statements notify: with a queue that has no room they do not, and this connection is kept."""
    if used >= NO_ROOM:
        delivery.lost(
            f"PostgreSQL's queue of notifications is {used:.0%} full, so everbeat sends none;"
            " 'everbeat doctor' reports what keeps it full"
        )
    elif not delivery.hears:
        delivery.connected()


def _used(connection: Connection[Any] | AsyncConnection[Any], row: tuple[Any, ...] | None) -> float:
    """Return the used share of the queue of notifications. Raises PoolerBetween."""
    # A pooler gives clients pids of its own; where it keeps one session for each client, the server's is known from the greeting.
    pid = getattr(connection, "server_pid", connection.info.backend_pid)
    if row is None or row[0] != pid or connection.prepare_threshold is None:
        raise PoolerBetween
    return float(row[1])


def _hang_up(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    """End a connection under whoever waits for it, who sees it at once as lost. Closing it is left to its owner."""
    with suppress(psycopg.Error, OSError):
        shut_down(connection.fileno())
