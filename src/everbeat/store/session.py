"""The database session of a long-lived process. It reconnects as often as needed and runs one statement at a time."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from random import Random
from time import monotonic
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncRawCursor

from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.blocking import hang_up
from everbeat.runtime.fork import generation
from everbeat.store.connection import PATIENT_KEEPALIVES, WatchedAsyncConnection
from everbeat.store.patience import LONGEST_PAUSE_S, given_up, repeat_backoff
from everbeat.store.refusals import is_alive, is_outage, is_repeatable, may_be_gone
from everbeat.store.statement import Statement, compose, has_rows, request
from everbeat.store.target import Target, atransaction, is_pooled


class _SessionNumbers:
    """Assigns numbers to the sessions of this process.

    No two open sessions with the same purpose share a number; released numbers are reused.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._taken: set[tuple[str, int]] = set()
        self._used: set[tuple[str, int]] = set()

    def take(self, purpose: str) -> tuple[int, bool]:
        """Reserve and return the first free number for this purpose. Also return whether an earlier session had the number."""
        with self._guard:
            number = next(each for each in count(1) if (purpose, each) not in self._taken)
            was_used = (purpose, number) in self._used
            self._taken.add((purpose, number))
            self._used.add((purpose, number))
        return number, was_used

    def give_back(self, purpose: str, number: int) -> None:
        """Release the number for use by a later session."""
        with self._guard:
            self._taken.discard((purpose, number))


_NUMBERS: Final = _SessionNumbers()


class SuccessiveConnections:
    """The successive connections of one session. They share one name on the server, which no other session has."""

    def __init__(self) -> None:
        self._number: tuple[str, int] | None = None
        self._has_earlier = False

    def name(self, purpose: str) -> str:
        """Return the name of the next connection: the purpose, the pid, and a number."""
        if self._number is None:
            number, self._has_earlier = _NUMBERS.take(purpose)
            self._number = purpose, number
        else:
            self._has_earlier = True
        return f"{self._number[0]} {os.getpid()}.{self._number[1]}"

    async def must_wait(self, connection: AsyncConnection[Any], *, schema: str) -> bool:
        """Terminate the session's earlier backends that are waiting for their client.

        Return whether this connection must wait until other backends have exited.
        """
        if not self._has_earlier or is_pooled(connection):
            return False
        cursor = await connection.execute(compose("worker/check_earlier_sessions", schema))
        must_wait, idle = await cursor.fetchone() or (False, None)
        if idle:
            # If the role is not allowed to call the function, the server closes the sessions once it notices that their clients are gone.
            with suppress(psycopg.errors.InsufficientPrivilege):
                await connection.execute(compose("worker/end_earlier_sessions", schema), {"pids": idle})
        return bool(must_wait)

    def end(self) -> None:
        """Release the name. The next session with this purpose takes the name and finds the backends that this session left behind."""
        if self._number is not None:
            _NUMBERS.give_back(*self._number)
            self._number = None


T = TypeVar("T")
RunStatement: TypeAlias = Callable[[Statement[Any]], Awaitable[Any]]
"""A function that runs one statement in a transaction."""
OnTry: TypeAlias = Callable[[Exception | None, float], None]
"""A callback that is called after each try, with the duration of the try in seconds.

The first argument is the problem if no writable database could be reached, else None.
"""
_ON_THE_WAY_S: Final = 5.0
_CANCEL_S: Final = 1.0
_SLOW_S: Final = 0.1
_REPLAN_S: Final = 1.0
_log = logging.getLogger("everbeat.store")

KEYED: Final = b"""
    set plan_cache_mode = force_generic_plan; set enable_hashjoin = off; set enable_mergejoin = off; set enable_seqscan = off;
    set jit = off"""
"""Settings for sessions whose statements look up each row by its key.

The planner cannot know how few rows a batch has. Without these settings, it read the whole table to join it with a few hundred ids, or
planned every batch again, which took longest (docs/performance.md).
"""


class Session:
    """A long-lived database session. `on_state(True)` is called after every connect, `on_state(False)` after every loss of the connection.

    Its name on the server is `application_name`, followed by the pid and a number. A statement is not repeated while the server still has
    two earlier backends of the session, or one that is waiting for a synchronous standby.

    `statement_timeout_ms` limits each statement on the server, so that no statement blocks the session forever. `reply_timeout_s` limits
    the wait for a reply or a connection that the network may have lost (None: a little longer than `statement_timeout_ms`).
    `longest_pause_s` is the maximum pause between two tries. `keyed`: all statements look up rows by key. `patient`: the server must not
    close the session because its network is silent.
    """

    def __init__(
        self,
        target: Target,
        application_name: str,
        *,
        random: Random | None = None,
        on_state: Callable[[bool], None] | None = None,
        statement_timeout_ms: int = 30_000,
        reply_timeout_s: float | None = None,
        longest_pause_s: float = LONGEST_PAUSE_S,
        keyed: bool = False,
        patient: bool = False,
        on_try: OnTry | None = None,
    ) -> None:
        self.target = target
        self.application_name = application_name
        self.pooled = False
        self._random = random or Random()
        self._on_state = on_state
        self._statement_timeout_ms = statement_timeout_ms
        self._keyed = keyed
        self._patient = patient
        self._on_try = on_try
        self._reply_timeout_s = (
            statement_timeout_ms / 1_000 + _ON_THE_WAY_S if reply_timeout_s is None else reply_timeout_s
        )
        self._longest_pause_s = longest_pause_s
        self._connection: AsyncConnection[Any] | None = None
        self._next: AsyncConnection[Any] | None = None
        self._connections = SuccessiveConnections()
        self._turn = asyncio.Lock()
        self._is_renamed = False
        self._generation = generation()
        self._was_slow = False
        self._replan_at = 0.0
        self.answers = 0
        self.tries = 0

    def rename(self, application_name: str) -> None:
        """Change the application name. The next statement opens a new connection with that name."""
        self.application_name = application_name
        self._is_renamed = True

    async def run(
        self,
        statement: Statement[T],
        *,
        patience_s: float | None = None,
        goes_on: Callable[[float], bool] | None = None,
    ) -> T:
        """Run one statement and repeat it across reconnects for `patience_s` seconds (None: forever; 0: one try).

        `goes_on` is called with the duration of each failed try in seconds. If it returns False, the statement is not repeated again.

        Raises DatabaseUnreachable or DatabaseReadOnly if the statement is no longer repeated. Raises DatabaseError or psycopg.DataError if
        the server refuses the statement.
        """
        return await self._repeated(lambda: self._once(statement), patience_s, goes_on)

    async def transact(
        self, body: Callable[[RunStatement], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """Run the statements of `body` in one transaction. Repeat the whole transaction after a lost reply, as `run` repeats a statement.

        `body` receives a function that runs a statement. `body` may be called several times.
        """
        return await self._repeated(lambda: self._transacted(body), patience_s)

    async def _repeated(
        self,
        once: Callable[[], Awaitable[T]],
        patience_s: float | None,
        goes_on: Callable[[float], bool] | None = None,
    ) -> T:
        give_up_at = None if patience_s is None else monotonic() + patience_s
        backoff = repeat_backoff(self._random, longest_s=self._longest_pause_s)
        while True:
            began_at = monotonic()
            try:
                async with self._turn:
                    answer = await once()
                self._tried(None, monotonic() - began_at)
                return answer
            except (psycopg.Error, DatabaseUnreachable, DatabaseReadOnly, TimeoutError) as problem:
                self._tried(problem, monotonic() - began_at)
                if isinstance(problem, psycopg.Error):
                    if isinstance(problem, psycopg.DataError):
                        raise
                    if not is_repeatable(problem):
                        raise self.target.explain(problem) from problem
                if (give_up_at is not None and monotonic() >= give_up_at) or (
                    goes_on is not None and not goes_on(monotonic() - began_at)
                ):
                    raise given_up(problem, self.target) from problem
            await asyncio.sleep(backoff.next())

    def _tried(self, problem: BaseException | None, took_s: float) -> None:
        if self._on_try is None:
            return
        if problem is not None and is_outage(problem):
            self._on_try(given_up(problem, self.target), took_s)
            return
        try:
            if self._connection is not None:
                self.target.check(self._connection)  # a server that refuses writes still replies to reads
        except DatabaseReadOnly as refusal:
            self._on_try(refusal, took_s)
        else:
            self._on_try(None, took_s)

    async def _once(self, statement: Statement[T]) -> T:
        async with self._trying() as connection:
            return await self._answer(connection, statement)

    async def _transacted(self, body: Callable[[RunStatement], Awaitable[T]]) -> T:
        async with self._trying() as connection:

            async def run(statement: Statement[Any]) -> Any:
                return await self._answer(connection, statement)

            async with atransaction(connection):
                return await body(run)

    async def _answer(self, connection: AsyncConnection[Any], statement: Statement[T]) -> T:
        if statement.of_sessions and is_pooled(connection):
            return statement.read([])
        began_at = monotonic()
        with self._bounded(connection):
            cursor = await AsyncRawCursor(connection).execute(*request(statement, self.target.schema))
            found = await cursor.fetchall() if has_rows(cursor) else []
            self.answers += 1
        self._was_slow |= monotonic() - began_at > _SLOW_S
        return statement.read(found)

    async def _replan(self, connection: AsyncConnection[Any]) -> None:
        # A plan that was made for a few rows may read a whole table that has grown since. The server keeps the plan until the table is
        # analyzed. With a suitable plan, none of these statements takes 0.1 s (docs/performance.md).
        if self._keyed and self._was_slow and not self.pooled and monotonic() >= self._replan_at:
            self._was_slow, self._replan_at = False, monotonic() + _REPLAN_S
            with self._bounded(connection):
                await connection.execute(b"discard plans")

    @asynccontextmanager
    async def _trying(self) -> AsyncIterator[AsyncConnection[Any]]:
        self.tries += 1
        connection = await self.connection()
        try:
            await self._replan(connection)
            yield connection
        except psycopg.Error as problem:
            refused = self.target.refused_write(problem, connection)
            if connection.closed or connection.broken or not is_alive(problem):
                await self.drop()
                if refused is not None:
                    raise refused from problem
            elif may_be_gone(problem) and await self._is_schema_gone(connection):
                raise self.target.gone(problem) from problem
            raise

    async def _is_schema_gone(self, connection: AsyncConnection[Any]) -> bool:
        try:
            with self._bounded(connection):
                cursor = await connection.execute(
                    compose("schema/is_gone", self.target.schema), [self.target.schema]
                )
                return await cursor.fetchone() == (True,)
        except psycopg.Error:
            await self.drop()  # the connection was lost in the meantime
            return False

    @contextmanager
    def _bounded(self, connection: AsyncConnection[Any]) -> Iterator[None]:
        # asyncio.timeout is not suitable: on a cancellation, psycopg asks the server to stop and waits for a reply. Over a dead network,
        # that takes as long as the statement. After the socket has been shut down, everything fails at once.
        timer = asyncio.get_running_loop().call_later(self._reply_timeout_s, hang_up, connection)
        try:
            yield
        finally:
            timer.cancel()

    async def open(self) -> AsyncConnection[Any]:
        """Return the open connection as `connection` does, but raise DatabaseError instead of psycopg.Error."""
        try:
            return await self.connection()
        except psycopg.Error as problem:
            raise self.target.explain(problem) from problem

    async def connection(self) -> AsyncConnection[Any]:
        """Return the open connection, or open a new one if there is none."""
        if generation() != self._generation:
            raise RuntimeError(
                "A forked child must not work in the name of its parent: this session belongs to the parent."
            )
        if self._is_renamed:
            await self.drop()
            self._is_renamed = False
        if self._connection is not None and not self._connection.closed:
            return self._connection
        connection, self._next = self._next or await self._open(), None
        try:
            with self._bounded(connection):
                must_wait = await self._connections.must_wait(connection, schema=self.target.schema)
        except BaseException:
            await connection.close()
            raise
        if must_wait:
            self._next = connection
            raise DatabaseUnreachable(
                f"The database at {self.target.shown!r} has not ended an earlier statement of this session.",
                fix="see what it waits for: 'everbeat doctor'.",
            )
        self._connection = connection
        self._report_state(True)
        return connection

    async def _open(self) -> AsyncConnection[Any]:
        name = self._connections.name(self.application_name)
        async with asyncio.timeout(self._reply_timeout_s):
            connection = await self.target.aopen(name)
        try:
            with self._bounded(connection):
                await self._prepare(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _prepare(self, connection: WatchedAsyncConnection) -> None:
        await self.target.agreet(connection)
        self.pooled = is_pooled(connection)
        if not self.pooled:
            await connection.execute(f"set statement_timeout = {int(self._statement_timeout_ms)}".encode())
            if self._keyed:
                await connection.execute(KEYED)
            if self._patient:
                await connection.execute(PATIENT_KEEPALIVES)

    async def interrupt(self) -> None:
        """Abort the running statement immediately, both here and on the server. `run` then repeats the statement within its patience."""
        if (connection := self._connection) is not None:
            with suppress(psycopg.Error, OSError):
                await connection.cancel_safe(timeout=_CANCEL_S)
            hang_up(connection)

    async def drop(self) -> None:
        """Close the connection. The next statement opens a new one."""
        connection, self._connection = self._connection, None
        if self._next is not None:
            await self._next.close()
            self._next = None
        if connection is not None:
            await connection.close()
            self._report_state(False)
        self._connections.end()

    def _report_state(self, connected: bool) -> None:
        if self._on_state is not None:
            self._on_state(connected)
