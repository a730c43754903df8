"""Adapters that run transactions and statements on the connections of psycopg, asyncpg, psycopg2 and SQLAlchemy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cache
from typing import Any, Final, TypeVar
from uuid import UUID

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from everbeat.errors import CommitRefused
from everbeat.store.refusals import remedy_of_right
from everbeat.store.statement import Statement, compose, with_numbers

T = TypeVar("T")

IN_BLOCK: Final = "is inside a transaction block that other code will end"
BLOCK_FIX: Final = (
    "open ctx.commit outside the block; blocks opened inside ctx.commit are savepoints and are allowed."
)


def refused(what: str, *, fix: str = "give ctx.commit its own connection.") -> CommitRefused:
    """Return the error for a connection that cannot begin a transaction."""
    return CommitRefused(f"The connection given to Context.commit {what}.", fix=fix)


@cache
def named(name: str, schema: str) -> str:
    """Return the statement with a `%(name)s` placeholder for every parameter, as psycopg2 expects."""
    return compose(name, schema).decode()


@cache
def numbered(name: str, schema: str) -> tuple[str, tuple[str, ...]]:
    """Return the statement with the placeholders `$1`, `$2` …, as asyncpg expects, and the names of its parameters in order."""
    text, names = with_numbers(compose(name, schema))
    return text.decode(), names


def as_text(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters with UUIDs as text, because psycopg2 does not support UUIDs by default."""
    return {name: _plain(value) for name, value in parameters.items()}


def _plain(value: Any) -> Any:
    match value:
        case UUID():
            return str(value)
        case list():
            return [_plain(each) for each in value]
        case _:
            return value


def is_forbidden(problem: BaseException) -> bool:
    """Return whether the error says that the role lacks a privilege."""
    return sqlstate_of(problem) == "42501"


def sqlstate_of(problem: BaseException) -> str | None:
    """Return the SQLSTATE of an error from any of these libraries, or None. Each library stores it in its own attribute."""
    # SQLAlchemy wraps the driver's error as `orig`; Django raises its own error from it.
    for each in (problem, getattr(problem, "orig", None), problem.__cause__):
        for name in ("sqlstate", "pgcode"):
            if isinstance(code := getattr(each, name, None), str):
                return code
    return None


def note_of(problem: BaseException, *, schema: str) -> str | None:
    """Return a note that says how to fix the error of a statement on the user's connection.

    Return None if the schema is not the cause.
    """
    match sqlstate_of(problem):
        case "3F000" | "42P01":
            return (
                f"everbeat: the database of this connection has no everbeat tables in schema {schema!r}."
                " Connect to the database of the tasks, or run 'everbeat migrate' with the URL of this one."
            )
        case "42703" | "42883" | "42P10":
            return (
                f"everbeat: schema {schema!r} in the database of this connection was made by another version of everbeat."
                " Run 'everbeat migrate' with the newest version in use."
            )
        case "42501":
            fix = remedy_of_right(str(problem), schema=schema)
            return f"everbeat: the role of this connection cannot write in schema {schema!r}. Fix: {fix}"
        case _:
            return None


_STATES: Final = {0: TransactionStatus.IDLE, 1: TransactionStatus.ACTIVE, 2: TransactionStatus.INTRANS, 3: TransactionStatus.INERROR}  # fmt: skip


class PsycopgConnection:
    """A blocking psycopg connection."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._block: AbstractContextManager[object] | None = None

    def begin(self) -> None:
        """Begin a transaction, or join the one that is already open."""
        _require_ready(self._connection)
        if self._connection.info.transaction_status is TransactionStatus.IDLE:
            block = self._connection.transaction()
            block.__enter__()
            self._block = block

    def flush(self) -> None:
        """Do nothing, because a driver does not buffer changes."""

    def run(self, statement: Statement[T], *, schema: str) -> T:
        """Run one statement with a plain cursor. The connection's own cursors may return other types of rows."""
        cursor = Cursor(self._connection, row_factory=tuple_row)
        cursor.execute(compose(statement.name, schema), statement.parameters)
        return statement.read(cursor.fetchall())

    def commit(self) -> None:
        """Commit the transaction."""
        block, self._block = self._block, None
        if block is None:
            self._connection.commit()
        else:
            block.__exit__(None, None, None)

    def rollback(self) -> None:
        """Roll back the transaction."""
        block, self._block = self._block, None
        if block is None:
            self._connection.rollback()
        else:
            block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)


class AsyncPsycopgConnection:
    """An asynchronous psycopg connection."""

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self._connection = connection
        self._block: AbstractAsyncContextManager[object] | None = None

    async def begin(self) -> None:
        """Begin a transaction, or join the one that is already open."""
        _require_ready(self._connection)
        if self._connection.info.transaction_status is TransactionStatus.IDLE:
            block = self._connection.transaction()
            await block.__aenter__()
            self._block = block

    async def flush(self) -> None:
        """Do nothing, because a driver does not buffer changes."""

    async def run(self, statement: Statement[T], *, schema: str) -> T:
        """Run one statement with a plain cursor. The connection's own cursors may return other types of rows."""
        cursor = AsyncCursor(self._connection, row_factory=tuple_row)
        await cursor.execute(compose(statement.name, schema), statement.parameters)
        return statement.read(await cursor.fetchall())

    async def commit(self) -> None:
        """Commit the transaction."""
        block, self._block = self._block, None
        if block is None:
            await self._connection.commit()
        else:
            await block.__aexit__(None, None, None)

    async def rollback(self) -> None:
        """Roll back the transaction."""
        block, self._block = self._block, None
        if block is None:
            await self._connection.rollback()
        else:
            await block.__aexit__(psycopg.Rollback, psycopg.Rollback(), None)


class AsyncpgConnection:
    """An asyncpg connection, possibly from a pool."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transaction: Any = None

    async def begin(self) -> None:
        """Begin a transaction. Raises CommitRefused if one is already open, because other code will end that one."""
        if self._connection.is_closed():
            raise refused("is closed")
        if self._connection.is_in_transaction():
            raise refused(IN_BLOCK, fix=BLOCK_FIX)
        self._transaction = self._connection.transaction()
        await self._transaction.start()

    async def flush(self) -> None:
        """Do nothing, because a driver does not buffer changes."""

    async def run(self, statement: Statement[T], *, schema: str) -> T:
        """Run one statement with numbered parameters."""
        text, names = numbered(statement.name, schema)
        found = await self._connection.fetch(text, *(statement.parameters[name] for name in names))
        return statement.read([tuple(row) for row in found])

    async def commit(self) -> None:
        """Commit the transaction."""
        await self._transaction.commit()

    async def rollback(self) -> None:
        """Roll back the transaction."""
        await self._transaction.rollback()


class Psycopg2Connection:
    """A psycopg2 connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._by_hand = False

    def begin(self) -> None:
        """Begin a transaction, or join the one that is already open."""
        if self._connection.closed:
            raise refused("is closed")
        status = _STATES.get(self._connection.info.transaction_status, TransactionStatus.UNKNOWN)
        _require_state(status)
        # In autocommit mode, psycopg2's commit() does nothing.
        self._by_hand = bool(self._connection.autocommit)
        if self._by_hand and status is TransactionStatus.IDLE:
            self._execute("begin", None)

    def flush(self) -> None:
        """Do nothing, because a driver does not buffer changes."""

    def run(self, statement: Statement[T], *, schema: str) -> T:
        """Run one statement."""
        return statement.read(self._execute(named(statement.name, schema), as_text(statement.parameters)))

    def commit(self) -> None:
        """Commit the transaction."""
        if self._by_hand:
            self._execute("commit", None)
        else:
            self._connection.commit()

    def rollback(self) -> None:
        """Roll back the transaction."""
        if self._by_hand:
            self._execute("rollback", None)
        else:
            self._connection.rollback()

    def _execute(self, text: str, parameters: Mapping[str, Any] | None) -> Sequence[tuple[Any, ...]]:
        plain = sys.modules[
            "psycopg2.extensions"
        ].cursor  # not the connection's own cursor, which may return rows as dicts
        with self._connection.cursor(cursor_factory=plain) as cursor:
            cursor.execute(text, parameters)
            return cursor.fetchall() if cursor.description else []


def _require_ready(connection: Connection[Any] | AsyncConnection[Any]) -> None:
    if connection.closed:
        raise refused("is closed")
    if connection.pgconn.pipeline_status != PipelineStatus.OFF:
        raise refused("is in a pipeline", fix="leave the pipeline before the commit.")
    if getattr(connection, "_num_transactions", 0):
        raise refused(IN_BLOCK, fix=BLOCK_FIX)
    _require_state(connection.info.transaction_status)


def _require_state(status: TransactionStatus) -> None:
    match status:
        case TransactionStatus.IDLE | TransactionStatus.INTRANS:
            return
        case TransactionStatus.INERROR:
            raise refused("is in a transaction that has failed", fix="roll it back first.")
        case _:
            raise refused("is busy or broken")


PARAMETER_STYLES = ("pyformat", "numeric_dollar")
"""The parameter styles of psycopg and psycopg2 ("pyformat") and of asyncpg ("numeric_dollar")."""


class SqlalchemyConnection:
    """A SQLAlchemy Connection or Session."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._is_session = hasattr(owner, "flush")
        self._by_hand = False

    @property
    def _connection(self) -> Any:
        # Look up the connection each time, because a session uses another one after a commit.
        return self._owner.connection() if self._is_session else self._owner

    def begin(self) -> None:
        """Begin a transaction, or join the one that is already open."""
        if self._owner.in_nested_transaction():
            raise refused("is inside a savepoint, which other code will end", fix=BLOCK_FIX)
        dialect = self._connection.dialect
        if dialect.name != "postgresql" or dialect.paramstyle not in PARAMETER_STYLES:
            raise refused(
                f"speaks {dialect.name} by the driver {dialect.driver}",
                fix="connect to the database of the tasks by psycopg, asyncpg or psycopg2.",
            )
        # In autocommit mode, SQLAlchemy's own transaction is not a transaction on the server.
        self._by_hand = bool(getattr(self._connection.connection.dbapi_connection, "autocommit", False))
        if self._by_hand:
            self._connection.exec_driver_sql("begin")

    def flush(self) -> None:
        """Flush the session."""
        if self._is_session:
            self._owner.flush()

    def run(self, statement: Statement[T], *, schema: str) -> T:
        """Run one statement in the driver's parameter style."""
        style, driver = self._connection.dialect.paramstyle, self._connection.dialect.driver
        parameters: Any = statement.parameters
        if style == "numeric_dollar":
            text, names = numbered(statement.name, schema)
            parameters = tuple(parameters[name] for name in names)
        elif driver == "psycopg2":
            text, parameters = named(statement.name, schema), as_text(parameters)
        else:
            text = compose(statement.name, schema).decode()
        found = self._connection.exec_driver_sql(text, parameters)
        return statement.read([tuple(row) for row in found])

    def commit(self) -> None:
        """Commit the transaction."""
        if self._by_hand:
            self._connection.exec_driver_sql("commit")
        self._owner.commit()

    def rollback(self) -> None:
        """Roll back the transaction."""
        try:
            if self._by_hand:
                self._connection.exec_driver_sql("rollback")
        finally:
            self._owner.rollback()


class AsyncSqlalchemyConnection:
    """A SQLAlchemy AsyncConnection or AsyncSession. It calls `SqlalchemyConnection` through SQLAlchemy's `run_sync`."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._inner: SqlalchemyConnection

    async def begin(self) -> None:
        """Begin a transaction, or join the one that is already open."""

        def begin(owner: Any) -> None:
            self._inner = SqlalchemyConnection(owner)
            self._inner.begin()

        await self._owner.run_sync(begin)

    async def flush(self) -> None:
        """Flush the session."""
        await self._owner.run_sync(lambda _: self._inner.flush())

    async def run(self, statement: Statement[T], *, schema: str) -> T:
        """Run one statement."""
        found: T = await self._owner.run_sync(
            lambda owner: SqlalchemyConnection(owner).run(statement, schema=schema)
        )
        return found

    async def commit(self) -> None:
        """Commit the transaction."""
        await self._owner.run_sync(lambda _: self._inner.commit())

    async def rollback(self) -> None:
        """Roll back the transaction."""
        await self._owner.run_sync(lambda _: self._inner.rollback())
