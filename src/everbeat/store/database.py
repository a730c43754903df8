"""Connections for clients: a few, reused, safe from many threads and event loops and after a fork; statements as in `store.session`."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from random import Random
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary, finalize

import psycopg
from psycopg import AsyncConnection, Connection

from everbeat.errors import DatabaseUnreachable
from everbeat.store.session import Run, is_alive
from everbeat.store.statement import Row, Statement, compose, has_rows
from everbeat.store.target import Target, is_repeatable
from everbeat.store.transaction import atransaction, transaction

T = TypeVar("T")
_MOST_CONNECTIONS: Final = 8
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class Database:
    """The client's door. Statements are repeated over a lost connection for `patience_s` seconds, because they may be."""

    def __init__(
        self, target: Target, *, application_name: str = "everbeat client", patience_s: float = 5.0
    ) -> None:
        self.target = target
        self._application_name = application_name
        self._patience_s = patience_s
        self._random = Random()
        self._new_process()

    def _new_process(self) -> None:
        # After a fork the parent's connections are the parent's: they are forgotten here without a word to the server.
        self._pid = os.getpid()
        self._idle: list[Connection[Any]] = []
        finalize(self, _close_all, self._idle, self._pid)
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        self._loops: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopConnections] = WeakKeyDictionary()

    def run(self, statement: Statement[T]) -> T:
        """Runs one statement. Raises a DatabaseError that says what to do."""
        return self._repeated(lambda: self._once(statement))

    def transact(self, body: Callable[[Callable[[Statement[Any]], Any]], T]) -> T:
        """Runs the statements of `body` in one transaction, all of it again after a lost reply; `body` gives each of them to what it is
        called with. Raises a DatabaseError."""
        return self._repeated(lambda: self._transacted(body))

    async def arun(self, statement: Statement[T]) -> T:
        """The twin of `run` for event loops."""
        return await self._arepeated(lambda: self._aonce(statement))

    async def atransact(self, body: Callable[[Run], Awaitable[T]]) -> T:
        """The twin of `transact` for event loops."""
        return await self._arepeated(lambda: self._atransacted(body))

    def _repeated(self, once: Callable[[], T]) -> T:
        give_up_at, pause = monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return once()
            except (psycopg.Error, DatabaseUnreachable) as problem:
                self._judge(problem, give_up_at)
            time.sleep(pause * (0.5 + self._random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    async def _arepeated(self, once: Callable[[], Awaitable[T]]) -> T:
        give_up_at, pause = monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return await once()
            except (psycopg.Error, DatabaseUnreachable) as problem:
                self._judge(problem, give_up_at)
            await asyncio.sleep(pause * (0.5 + self._random.random()))
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    def _judge(self, problem: psycopg.Error | DatabaseUnreachable, give_up_at: float) -> None:
        if isinstance(problem, DatabaseUnreachable):
            if monotonic() >= give_up_at:
                raise problem
        elif not is_repeatable(problem) or monotonic() >= give_up_at:
            raise self.target.explain(problem) from problem

    def _once(self, statement: Statement[T]) -> T:
        with self._connection() as connection:
            return statement.read(self._rows(connection, statement))

    def _transacted(self, body: Callable[[Callable[[Statement[Any]], Any]], T]) -> T:
        with self._connection() as connection, transaction(connection):
            return body(lambda statement: statement.read(self._rows(connection, statement)))

    def _rows(self, connection: Connection[Any], statement: Statement[Any]) -> Sequence[Row]:
        cursor = connection.execute(compose(statement.name, self.target.schema), statement.parameters)
        return cursor.fetchall() if has_rows(cursor) else []

    @contextmanager
    def _connection(self) -> Iterator[Connection[Any]]:
        if self._pid != os.getpid():
            self._new_process()
        with self._free:
            try:
                connection = self._idle.pop()
            except IndexError:
                connection = self.target.connect(self._application_name)
            try:
                yield connection
            except BaseException as problem:
                if connection.closed or not is_alive(problem):
                    connection.close()
                else:
                    self._idle.append(connection)
                raise
            self._idle.append(connection)

    async def _aonce(self, statement: Statement[T]) -> T:
        async with self._aconnection() as connection:
            return statement.read(await self._arows(connection, statement))

    async def _atransacted(self, body: Callable[[Run], Awaitable[T]]) -> T:
        async with self._aconnection() as connection:

            async def run(statement: Statement[Any]) -> Any:
                return statement.read(await self._arows(connection, statement))

            async with atransaction(connection):
                return await body(run)

    async def _arows(self, connection: AsyncConnection[Any], statement: Statement[Any]) -> Sequence[Row]:
        cursor = await connection.execute(compose(statement.name, self.target.schema), statement.parameters)
        return await cursor.fetchall() if has_rows(cursor) else []

    @asynccontextmanager
    async def _aconnection(self) -> AsyncIterator[AsyncConnection[Any]]:
        if self._pid != os.getpid():
            self._new_process()
        pool = self._loops.get(asyncio.get_running_loop()) or await self._new_pool()
        async with pool.free:
            connection = pool.idle.pop() if pool.idle else None
            if connection is None:
                connection = await self.target.aconnect(self._application_name)
            try:
                yield connection
            except BaseException as problem:
                if not is_alive(problem):
                    await connection.close()
                await pool.put_back(connection)
                raise
            await pool.put_back(connection)

    async def _new_pool(self) -> _LoopConnections:
        for other in [other for other in self._loops if other.is_closed()]:
            del self._loops[other]  # ended without a word, its connections with it
        loop = asyncio.get_running_loop()
        pool = self._loops[loop] = _LoopConnections()
        pool.until_loop_ends = self._close_with(loop, pool)
        await anext(pool.until_loop_ends)
        return pool

    async def _close_with(
        self, loop: asyncio.AbstractEventLoop, pool: _LoopConnections
    ) -> AsyncGenerator[None]:
        # Asynchronous generators are what a loop tells that it ends, as at the end of asyncio.run.
        try:
            yield
        finally:
            if self._loops.get(loop) is pool:
                del self._loops[loop]
            if self._pid == os.getpid():
                await pool.close()

    def close(self) -> None:
        """Closes the connections that no thread is using."""
        while self._idle:
            self._idle.pop().close()

    async def aclose(self) -> None:
        """Closes the running loop's connections, and those of threads."""
        pool = self._loops.get(asyncio.get_running_loop())
        if pool is not None and pool.until_loop_ends is not None:
            await pool.until_loop_ends.aclose()
        self.close()


class _LoopConnections:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self.idle: list[AsyncConnection[Any]] = []
        self.free = asyncio.Semaphore(_MOST_CONNECTIONS)
        self.until_loop_ends: AsyncGenerator[None] | None = None
        self._is_over = False

    async def put_back(self, connection: AsyncConnection[Any]) -> None:
        """A task is done with it."""
        if self._is_over:
            await connection.close()
        elif not connection.closed:
            self.idle.append(connection)

    async def close(self) -> None:
        """Closes the connections that no task is using; the others follow when they are put back."""
        self._is_over = True
        while self.idle:
            await self.idle.pop().close()


def _close_all(idle: list[Connection[Any]], pid: int) -> None:
    if pid == os.getpid():
        while idle:
            idle.pop().close()
