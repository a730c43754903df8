"""How each driver runs a transaction and a statement of ours: psycopg, asyncpg, psycopg2.

What lives here: one class for each, alike in its five verbs. What may not: any import of them but psycopg, and any
question. A transaction that the library opened by itself is joined, and committed with all that is in it; a block that
somebody else will end, and a transaction that has failed, are refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor
from psycopg.pq import PipelineStatus, TransactionStatus
from psycopg.rows import tuple_row

from everbeat.store.foreign_statement import BLOCK_FIX, IN_BLOCK, as_text, named, numbered, refused
from everbeat.store.statement import Statement, compose

T = TypeVar("T")

_STATES: Final = {0: TransactionStatus.IDLE, 1: TransactionStatus.ACTIVE, 2: TransactionStatus.INTRANS, 3: TransactionStatus.INERROR}  # fmt: skip


class PsycopgConnection:
    """psycopg, sync."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._block: AbstractContextManager[object] | None = None

    def begin(self) -> None:
        """Its own transaction, or the one that is open."""
        _require_ready(self._connection)
        if self._connection.info.transaction_status is TransactionStatus.IDLE:
            block = self._connection.transaction()
            block.__enter__()
            self._block = block

    def flush(self) -> None:
        """Nothing is held back."""

    def run(self, statement: Statement[T], *, schema: str) -> T:
        """One statement, whatever the connection's own cursors make of rows."""
        cursor = Cursor(self._connection, row_factory=tuple_row)
        cursor.execute(compose(statement.name, schema), statement.parameters)
        return statement.read(cursor.fetchall())

    def commit(self) -> None:
        """Commits all of it."""
        block, self._block = self._block, None
        if block is None:
            self._connection.commit()
        else:
            block.__exit__(None, None, None)

    def rollback(self) -> None:
        """Rolls all of it back."""
        block, self._block = self._block, None
        if block is None:
            self._connection.rollback()
        else:
            block.__exit__(psycopg.Rollback, psycopg.Rollback(), None)


class AsyncPsycopgConnection:
    """psycopg, async."""

    def __init__(self, connection: AsyncConnection[Any]) -> None:
        self._connection = connection
        self._block: AbstractAsyncContextManager[object] | None = None

    async def begin(self) -> None:
        """Its own transaction, or the one that is open."""
        _require_ready(self._connection)
        if self._connection.info.transaction_status is TransactionStatus.IDLE:
            block = self._connection.transaction()
            await block.__aenter__()
            self._block = block

    async def flush(self) -> None:
        """Nothing is held back."""

    async def run(self, statement: Statement[T], *, schema: str) -> T:
        """One statement, whatever the connection's own cursors make of rows."""
        cursor = AsyncCursor(self._connection, row_factory=tuple_row)
        await cursor.execute(compose(statement.name, schema), statement.parameters)
        return statement.read(await cursor.fetchall())

    async def commit(self) -> None:
        """Commits all of it."""
        block, self._block = self._block, None
        if block is None:
            await self._connection.commit()
        else:
            await block.__aexit__(None, None, None)

    async def rollback(self) -> None:
        """Rolls all of it back."""
        block, self._block = self._block, None
        if block is None:
            await self._connection.rollback()
        else:
            await block.__aexit__(psycopg.Rollback, psycopg.Rollback(), None)


class AsyncpgConnection:
    """asyncpg, also from its pool."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transaction: Any = None

    async def begin(self) -> None:
        """Its own transaction: whatever is open was opened by somebody who will end it."""
        if self._connection.is_closed():
            raise refused("is closed")
        if self._connection.is_in_transaction():
            raise refused(IN_BLOCK, fix=BLOCK_FIX)
        self._transaction = self._connection.transaction()
        await self._transaction.start()

    async def flush(self) -> None:
        """Nothing is held back."""

    async def run(self, statement: Statement[T], *, schema: str) -> T:
        """One statement, with numbered parameters."""
        text, names = numbered(statement.name, schema)
        found = await self._connection.fetch(text, *(statement.parameters[name] for name in names))
        return statement.read([tuple(row) for row in found])

    async def commit(self) -> None:
        """Commits all of it."""
        await self._transaction.commit()

    async def rollback(self) -> None:
        """Rolls all of it back."""
        await self._transaction.rollback()


class Psycopg2Connection:
    """psycopg2."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._by_hand = False

    def begin(self) -> None:
        """Its own transaction, or the one that is open."""
        if self._connection.closed:
            raise refused("is closed")
        status = _STATES.get(self._connection.info.transaction_status, TransactionStatus.UNKNOWN)
        _require_state(status)
        # Its commit() does nothing in autocommit.
        self._by_hand = bool(self._connection.autocommit)
        if self._by_hand and status is TransactionStatus.IDLE:
            self._execute("begin", None)

    def flush(self) -> None:
        """Nothing is held back."""

    def run(self, statement: Statement[T], *, schema: str) -> T:
        """One statement."""
        return statement.read(self._execute(named(statement.name, schema), as_text(statement.parameters)))

    def commit(self) -> None:
        """Commits all of it."""
        if self._by_hand:
            self._execute("commit", None)
        else:
            self._connection.commit()

    def rollback(self) -> None:
        """Rolls all of it back."""
        if self._by_hand:
            self._execute("rollback", None)
        else:
            self._connection.rollback()

    def _execute(self, text: str, parameters: Mapping[str, Any] | None) -> Sequence[tuple[Any, ...]]:
        plain = sys.modules[
            "psycopg2.extensions"
        ].cursor  # not the connection's own, which may give rows as dicts
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
