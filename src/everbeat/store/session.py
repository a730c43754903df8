"""A session: one connection of a long-lived process, reopened for ever, on which statements run one at a time and are
repeated after a lost reply. Worker processes and supervisors use it; clients use `store.database`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from time import monotonic
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
from psycopg import AsyncConnection

from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.fork import generation
from everbeat.store.giving_up import given_up
from everbeat.store.own_settings import PATIENT_KEEPALIVES
from everbeat.store.refusals import is_alive, is_outage, is_repeatable, may_be_gone
from everbeat.store.silence import WatchedAsyncConnection, hang_up
from everbeat.store.statement import Statement, compose, has_rows
from everbeat.store.succession import Succession
from everbeat.store.target import Target, is_pooled
from everbeat.store.transaction import atransaction

T = TypeVar("T")
Run: TypeAlias = Callable[[Statement[Any]], Awaitable[Any]]
"""Runs a statement of a transaction."""
OnTry: TypeAlias = Callable[[Exception | None, float], None]
"""Called after each try with its seconds, and the problem if the database could not be reached, or accepts no writes."""
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_ON_THE_WAY_S: Final = 5.0
_CANCEL_S: Final = 1.0
_SLOW_S: Final = 0.1
_REPLAN_S: Final = 1.0
_log = logging.getLogger("everbeat.store")

KEYED: Final = b"""
    set plan_cache_mode = force_generic_plan; set enable_hashjoin = off; set enable_mergejoin = off; set enable_seqscan = off;
    set jit = off"""
"""For statements that look each row up by its key. The planner cannot know how few rows a batch is: it read the whole table to join
it with some hundred ids, or planned every batch anew, which took longer than all the rest (docs/performance.md)."""


class Session:
    """One connection. `on_state(True)` follows every connect, `on_state(False)` every loss.

    On the server it bears `application_name` with the pid and a number. A statement is not repeated while the server still has two
    earlier backends of the session, or one that waits for a synchronous standby.

    `statement_timeout_ms` bounds each statement on the server, so that a session never hangs in one; `reply_timeout_s` bounds
    the wait for its answer, and for a connection, where the network may have swallowed it (None: a little longer than the
    statement may take). `longest_pause_s`: between two tries. `keyed`: all its statements look rows up by keys. `patient`: the
    server must not end it because its network is silent.
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
        longest_pause_s: float = _LONGEST_PAUSE_S,
        keyed: bool = False,
        patient: bool = False,
        on_try: OnTry | None = None,
    ) -> None:
        self.target = target
        self.application_name = application_name
        self.connected = False
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
        self._succession = Succession()
        self._turn = asyncio.Lock()
        self._is_renamed = False
        self._generation = generation()
        self._was_slow = False
        self._replan_at = 0.0
        self.answers = 0
        self.tries = 0

    def rename(self, application_name: str) -> None:
        """Bear another application name from the next statement on, on a new connection."""
        self.application_name = application_name
        self._is_renamed = True

    async def run(
        self,
        statement: Statement[T],
        *,
        patience_s: float | None = None,
        goes_on: Callable[[float], bool] | None = None,
    ) -> T:
        """Runs one statement, repeating it over reconnects for `patience_s` seconds (None: for ever; 0: one try).

        `goes_on` is asked after a try that failed, with the seconds that it took: False ends the patience.

        Raises DatabaseUnreachable or DatabaseReadOnly when patience ends, DatabaseError or psycopg.DataError when the server
        refuses the statement.
        """
        return await self._repeated(lambda: self._once(statement), patience_s, goes_on)

    async def transact(self, body: Callable[[Run], Awaitable[T]], *, patience_s: float | None = None) -> T:
        """Runs the statements of `body` in one transaction, all of it again after a lost reply, as `run` does with one statement.

        `body` may be called several times, and gives each of its statements to what it is called with.
        """
        return await self._repeated(lambda: self._transacted(body), patience_s)

    async def _repeated(
        self,
        once: Callable[[], Awaitable[T]],
        patience_s: float | None,
        goes_on: Callable[[float], bool] | None = None,
    ) -> T:
        give_up_at = None if patience_s is None else monotonic() + patience_s
        pause = min(_FIRST_PAUSE_S, self._longest_pause_s)
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
            await asyncio.sleep(pause * (0.5 + self._random.random()))
            pause = min(pause * 2, self._longest_pause_s)

    def _tried(self, problem: BaseException | None, took_s: float) -> None:
        if self._on_try is None:
            return
        if problem is not None and is_outage(problem):
            self._on_try(given_up(problem, self.target), took_s)
            return
        try:
            if self._connection is not None:
                self.target.check(self._connection)  # a server that refuses writes answers what others read
        except DatabaseReadOnly as refusal:
            self._on_try(refusal, took_s)
        else:
            self._on_try(None, took_s)

    async def _once(self, statement: Statement[T]) -> T:
        async with self._trying() as connection:
            return await self._answer(connection, statement)

    async def _transacted(self, body: Callable[[Run], Awaitable[T]]) -> T:
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
            cursor = await connection.execute(
                compose(statement.name, self.target.schema), statement.parameters
            )
            found = await cursor.fetchall() if has_rows(cursor) else []
            self.answers += 1
        self._was_slow |= monotonic() - began_at > _SLOW_S
        return statement.read(found)

    async def _replan(self, connection: AsyncConnection[Any]) -> None:
        # A plan that was made for a handful of rows may read all of a table that has grown since, and is kept until the table
        # is analysed. None of these statements takes so long with a plan that fits (docs/performance.md).
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
            await self.drop()  # the connection was lost meanwhile
            return False

    @contextmanager
    def _bounded(self, connection: AsyncConnection[Any]) -> Iterator[None]:
        # Not asyncio.timeout: psycopg answers a cancellation by asking the server to stop and waiting for it, which over
        # a dead network takes as long as the statement would. On a socket that was shut down everything fails at once.
        timer = asyncio.get_running_loop().call_later(self._reply_timeout_s, hang_up, connection)
        try:
            yield
        finally:
            timer.cancel()

    async def open(self) -> AsyncConnection[Any]:
        """Return the open connection, as `connection`. Raises a DatabaseError, also where `connection` raises an error of psycopg."""
        try:
            return await self.connection()
        except psycopg.Error as problem:
            raise self.target.explain(problem) from problem

    async def connection(self) -> AsyncConnection[Any]:
        """The open connection, made anew if there is none."""
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
                must_wait = await self._succession.must_wait(connection, schema=self.target.schema)
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
        self._tell(True)
        return connection

    async def _open(self) -> AsyncConnection[Any]:
        name = self._succession.name(self.application_name)
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
        """Has the statement under way end at once, here and on the server: it fails, and is repeated where that was asked for."""
        if (connection := self._connection) is not None:
            with suppress(psycopg.Error, OSError):
                await connection.cancel_safe(timeout=_CANCEL_S)
            hang_up(connection)

    async def drop(self) -> None:
        """Closes the connection; the next statement opens a new one."""
        connection, self._connection = self._connection, None
        if self._next is not None:
            await self._next.close()
            self._next = None
        if connection is not None:
            await connection.close()
            self._tell(False)
        self._succession.end()

    def _tell(self, connected: bool) -> None:
        self.connected = connected
        if self._on_state is not None:
            self._on_state(connected)
