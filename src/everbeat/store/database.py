"""A small connection pool for clients. It is safe for use by many threads and event loops, and after a fork."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, finalize

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor, Connection, RawCursor

from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.store.announcer import FLUSH_S, Announcer, announcement
from everbeat.store.connection import EndsAt, WatchedAsyncConnection, WatchedConnection
from everbeat.store.patience import (
    DEFAULT_PATIENCE_S,
    LoopConnectionWatch,
    Patience,
    SignsOfLife,
    ThreadConnectionWatch,
    all_busy,
    pause_before_repeat,
    repeat_backoff,
)
from everbeat.store.refusals import is_alive
from everbeat.store.retention import LeftSessions
from everbeat.store.rows import Row
from everbeat.store.session import RunStatement
from everbeat.store.statement import Statement, has_rows, request
from everbeat.store.target import Target, atransaction, is_pooled, transaction

MOST_CONNECTIONS: Final = 8


class LoopConnections:
    """The pooled connections of one event loop."""

    def __init__(self, connections: int) -> None:
        self.idle: list[WatchedAsyncConnection] = []
        self.free = asyncio.Semaphore(connections)
        self.until_loop_ends: AsyncGenerator[None] | None = None
        self._is_over = False

    async def put_back(self, connection: WatchedAsyncConnection) -> None:
        """Return a connection to the pool, or close it if the pool is closed."""
        if self._is_over:
            await connection.close()
        elif not connection.closed:
            self.idle.append(connection)

    async def close(self) -> None:
        """Close the idle connections now. A connection that is in use is closed when the task that uses it returns it."""
        self._is_over = True
        await self.close_idle()

    async def close_idle(self) -> None:
        """Close the connections that no task is currently using."""
        while self.idle:
            await self.idle.pop().close()


T = TypeVar("T")
C = TypeVar("C", WatchedConnection, WatchedAsyncConnection)
_SLOT_POLL_S: Final = 0.1


class Database:
    """Runs statements for clients. A statement is repeated after a lost connection or a refused write.

    The repetition stops `patience_s` seconds after the last sign of life from a server that accepts writes (see `store.patience`).
    `connections` is the maximum for each event loop, and for all threads together.
    """

    def __init__(
        self,
        target: Target,
        *,
        application_name: str = "everbeat client",
        patience_s: float = DEFAULT_PATIENCE_S,
        signs: SignsOfLife | None = None,
        connections: int = MOST_CONNECTIONS,
    ) -> None:
        self.target = target
        self._connections = connections
        self._application_name = application_name
        self._patience_s = patience_s
        self._random = Random()
        self._signs = signs or SignsOfLife()
        self._has_connected = False
        self._new_process()

    def _new_process(self) -> None:
        # After a fork, the connections belong to the parent, so the child discards them without sending anything. A lock that another
        # thread held during the fork would stay locked in the child, so the objects with locks are created anew.
        self._pid = os.getpid()
        self._hosts = self.target.hosts
        self._left = LeftSessions()
        self._idle: list[WatchedConnection] = []
        finalize(self, _close_all, self._idle, self._pid)
        self.announcer = Announcer()
        finalize(self, self.announcer.flush)
        self._free = threading.BoundedSemaphore(self._connections)
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()

    def run(self, statement: Statement[T], *, patience_s: float | None = None, is_final: bool = False) -> T:
        """Run one statement and return its result. If `patience_s` is None, the database's own patience applies.

        Raises DatabaseError on failure.

        If `is_final` is set, the call gives up after `patience_s` seconds even if the server is still working on the statement.
        """
        return self._repeated(lambda patience: self._once(statement, patience), patience_s, is_final=is_final)

    def transact(
        self, body: Callable[[Callable[[Statement[Any]], Any]], T], *, patience_s: float | None = None
    ) -> T:
        """Run the statements of `body` in one transaction, and repeat the whole transaction after a lost reply.

        `body` receives a function that runs a statement. Raises DatabaseError on failure.
        """
        return self._repeated(lambda patience: self._transacted(body, patience), patience_s)

    async def arun(
        self, statement: Statement[T], *, patience_s: float | None = None, is_final: bool = False
    ) -> T:
        """The asynchronous counterpart of `run`."""
        return await self._arepeated(
            lambda patience: self._aonce(statement, patience), patience_s, is_final=is_final
        )

    async def atransact(
        self, body: Callable[[RunStatement], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """The asynchronous counterpart of `transact`."""
        return await self._arepeated(lambda patience: self._atransacted(body, patience), patience_s)

    def on_own_connection(
        self,
        application_name: str,
        work: Callable[[WatchedConnection], T],
        *,
        patience_s: float | None = None,
    ) -> T:
        """Run `work` on a separate connection, then close the connection. After a lost reply, repeat everything on a new connection.

        Raises DatabaseError on failure.
        """

        def once(patience: Patience) -> T:
            with self._connect(patience, application_name) as connection:
                watch = self._watched(connection, patience)
                try:
                    return work(connection)
                except BaseException as problem:
                    if connection.closed or isinstance(problem, DatabaseReadOnly):
                        self._lost(connection, is_stalled=watch.is_stalled)
                    raise

        return self._repeated(once, patience_s)

    def _repeated(
        self, once: Callable[[Patience], T], patience_s: float | None, *, is_final: bool = False
    ) -> T:
        patience, backoff = self._patience(patience_s, is_final=is_final), repeat_backoff(self._random)
        while True:
            try:
                return once(patience)
            except (psycopg.Error, DatabaseUnreachable, DatabaseReadOnly) as problem:
                delay_s = pause_before_repeat(
                    problem, self.target, patience, delay_s=backoff.next(), has_connected=self._has_connected
                )
            time.sleep(delay_s)

    async def _arepeated(
        self, once: Callable[[Patience], Awaitable[T]], patience_s: float | None, *, is_final: bool = False
    ) -> T:
        patience, backoff = self._patience(patience_s, is_final=is_final), repeat_backoff(self._random)
        while True:
            try:
                return await once(patience)
            except (psycopg.Error, DatabaseUnreachable, DatabaseReadOnly) as problem:
                delay_s = pause_before_repeat(
                    problem, self.target, patience, delay_s=backoff.next(), has_connected=self._has_connected
                )
            await asyncio.sleep(delay_s)

    def _patience(self, patience_s: float | None, *, is_final: bool) -> Patience:
        seconds = self._patience_s if patience_s is None else patience_s
        return Patience(seconds, self._signs, is_final=is_final)

    def _once(self, statement: Statement[T], patience: Patience) -> T:
        with self._connection(patience) as connection:
            found = self._rows(connection, statement)
            if statement.hints and (due := self.announcer.take(statement.hints, self._announce)):
                began_at = time.monotonic()
                try:
                    self._rows(connection, announcement(due, channel=self.target.channel))
                    self.announcer.done(time.monotonic() - began_at)
                except psycopg.Error as problem:
                    self.announcer.failed(problem)
            return statement.read(found)

    def _transacted(self, body: Callable[[Callable[[Statement[Any]], Any]], T], patience: Patience) -> T:
        with self._connection(patience) as connection, transaction(connection):
            return body(lambda statement: statement.read(self._rows(connection, statement)))

    def _rows(self, connection: Connection[Any], statement: Statement[Any]) -> Sequence[Row]:
        if statement.of_sessions and is_pooled(connection):
            return []
        cursor = RawCursor(connection).execute(*request(statement, self.target.schema))
        return cursor.fetchall() if has_rows(cursor) else []

    @contextmanager
    def _connection(self, patience: Patience) -> Iterator[WatchedConnection]:
        if self._pid != os.getpid():
            self._new_process()
        self._take_slot(patience)
        try:
            connection = _popped(self._idle) or self._connect(patience, self._application_name)
            watch = self._watched(connection, patience)
            try:
                yield connection
            except BaseException as problem:
                refused = self.target.refused_write(problem, connection)
                if is_alive(problem) and not connection.closed:
                    self._idle.append(connection)
                else:
                    if _is_lost(connection, problem):
                        self._lost(connection, is_stalled=watch.is_stalled)
                        _close_all(self._idle, self._pid)
                    connection.close()
                if refused is not None:
                    raise refused from problem
                raise
            patience.answered()
            if not connection.closed:
                self._idle.append(connection)
        finally:
            self._free.release()

    def _watched(self, connection: WatchedConnection, patience: Patience) -> ThreadConnectionWatch:
        watch = ThreadConnectionWatch(self.target, connection, patience, other_hosts=len(self._hosts) > 1)
        connection.watch = watch
        return watch

    def _take_slot(self, patience: Patience) -> None:
        if self._free.acquire(blocking=False):
            return
        while not self._free.acquire(timeout=_SLOT_POLL_S):
            patience.follow_others()
            if patience.is_over:
                raise all_busy(self.target, patience, connections=self._connections)
        patience.follow_others()

    def _connect(self, patience: Patience, application_name: str) -> WatchedConnection:
        connection = self.target.connect(application_name, hosts=self._hosts, ends_at=patience.ends_at)
        self._has_connected = True
        if (question := self._left.question(connection)) is not None:
            connection.watch = EndsAt(connection, patience.ends_at)
            try:
                self._left.require_room(connection, self._rows(connection, question))
            except BaseException:
                connection.close()
                raise
        return connection

    def _lost(self, connection: WatchedConnection | WatchedAsyncConnection, *, is_stalled: bool) -> None:
        """Move the connection's host to the end of the order. Remember a stalled session, because the server keeps it."""
        if connection.host is not None:
            self._hosts.failed(connection.host)
        if is_stalled:
            self._left.add(connection)

    async def _aonce(self, statement: Statement[T], patience: Patience) -> T:
        async with self._aconnection(patience) as connection:
            found = await self._arows(connection, statement)
            if statement.hints and (due := self.announcer.take(statement.hints, self._announce)):
                began_at = time.monotonic()
                try:
                    await self._arows(connection, announcement(due, channel=self.target.channel))
                    self.announcer.done(time.monotonic() - began_at)
                except psycopg.Error as problem:
                    self.announcer.failed(problem)
            return statement.read(found)

    async def _atransacted(self, body: Callable[[RunStatement], Awaitable[T]], patience: Patience) -> T:
        async with self._aconnection(patience) as connection:

            async def run(statement: Statement[Any]) -> Any:
                return statement.read(await self._arows(connection, statement))

            async with atransaction(connection):
                return await body(run)

    async def _arows(self, connection: AsyncConnection[Any], statement: Statement[Any]) -> Sequence[Row]:
        if statement.of_sessions and is_pooled(connection):
            return []
        cursor = await AsyncRawCursor(connection).execute(*request(statement, self.target.schema))
        return await cursor.fetchall() if has_rows(cursor) else []

    @asynccontextmanager
    async def _aconnection(self, patience: Patience) -> AsyncIterator[WatchedAsyncConnection]:
        if self._pid != os.getpid():
            self._new_process()
        pool = self._loops.get(asyncio.get_running_loop()) or await self._new_pool()
        await self._atake_slot(pool, patience)
        try:
            connection = _popped(pool.idle) or await self._aconnect(patience)
            watch = LoopConnectionWatch(self.target, connection, patience, other_hosts=len(self._hosts) > 1)
            connection.watch = watch
            try:
                yield connection
            except BaseException as problem:
                refused = self.target.refused_write(problem, connection)
                if connection.closed or not is_alive(problem):
                    if _is_lost(connection, problem):
                        self._lost(connection, is_stalled=watch.is_stalled)
                        await pool.close_idle()
                    await connection.close()
                await pool.put_back(connection)
                if refused is not None:
                    raise refused from problem
                raise
            patience.answered()
            await pool.put_back(connection)
        finally:
            pool.free.release()

    async def _atake_slot(self, pool: LoopConnections, patience: Patience) -> None:
        if not pool.free.locked():
            await pool.free.acquire()
            return
        while True:
            try:
                async with asyncio.timeout(max(patience.remaining_s, _SLOT_POLL_S)):
                    await pool.free.acquire()
                break
            except TimeoutError:
                patience.follow_others()
                if patience.is_over:
                    raise all_busy(self.target, patience, connections=self._connections) from None
        patience.follow_others()

    async def _aconnect(self, patience: Patience) -> WatchedAsyncConnection:
        connection = await self.target.aconnect(
            self._application_name, hosts=self._hosts, ends_at=patience.ends_at
        )
        self._has_connected = True
        if (question := self._left.question(connection)) is not None:
            connection.watch = EndsAt(connection, patience.ends_at)
            try:
                self._left.require_room(connection, await self._arows(connection, question))
            except BaseException:
                await connection.close()
                raise
        return connection

    async def _new_pool(self) -> LoopConnections:
        for other in [other for other in self._loops if other.is_closed()]:
            del self._loops[other]  # the loop was closed without closing its connections
        loop = asyncio.get_running_loop()
        pool = self._loops[loop] = LoopConnections(self._connections)
        pool.until_loop_ends = self._close_with(loop, pool)
        await anext(pool.until_loop_ends)
        return pool

    async def _close_with(
        self, loop: asyncio.AbstractEventLoop, pool: LoopConnections
    ) -> AsyncGenerator[None]:
        # An event loop closes its asynchronous generators when it shuts down, as at the end of asyncio.run.
        try:
            yield
        finally:
            if self._loops.get(loop) is pool:
                del self._loops[loop]
            if self._pid == os.getpid():
                await pool.close()

    def _announce(self, hints: Sequence[str]) -> None:
        began_at = time.monotonic()
        try:
            self.run(announcement(hints, channel=self.target.channel), patience_s=FLUSH_S, is_final=True)
            self.announcer.done(time.monotonic() - began_at)
        except DatabaseError as problem:
            self.announcer.failed(problem)

    def close(self) -> None:
        """Announce the last sends, and close the connections that no thread is currently using."""
        self.announcer.flush()
        _close_all(self._idle, self._pid)

    async def aclose(self) -> None:
        """Announce the last sends, and close the connections of the running event loop and the idle connections of threads."""
        if not self.announcer.is_idle:
            await asyncio.to_thread(self.announcer.flush)
        pool = self._loops.get(asyncio.get_running_loop())
        if pool is not None and pool.until_loop_ends is not None:
            await pool.until_loop_ends.aclose()
        self.close()


def _is_lost(connection: WatchedConnection | WatchedAsyncConnection, problem: BaseException) -> bool:
    return connection.closed or (isinstance(problem, psycopg.Error) and not is_alive(problem))


def _popped(idle: list[C]) -> C | None:
    try:
        return idle.pop()
    except IndexError:
        return None


def _close_all(idle: list[WatchedConnection], pid: int) -> None:
    if pid == os.getpid():
        while (connection := _popped(idle)) is not None:
            connection.close()
