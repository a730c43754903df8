"""How SQLAlchemy runs a transaction and a statement of ours, over psycopg, asyncpg or psycopg2.

What lives here: its two kinds of connection, alike in the five verbs of all foreign ones. What may not: an import of it.
"""

from __future__ import annotations

from typing import Any, TypeVar

from everbeat.store.foreign_statement import BLOCK_FIX, as_text, named, numbered, refused
from everbeat.store.statement import Statement, compose

T = TypeVar("T")

PARAMETER_STYLES = ("pyformat", "numeric_dollar")
"""Of psycopg and psycopg2, and of asyncpg."""


class SqlalchemyConnection:
    """SQLAlchemy's Connection and Session."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._is_session = hasattr(owner, "flush")
        self._by_hand = False

    @property
    def _connection(self) -> Any:
        # Asked for anew each time: a session that was committed meanwhile has another one.
        return self._owner.connection() if self._is_session else self._owner

    def begin(self) -> None:
        """Its own transaction, or the one that is open."""
        if self._owner.in_nested_transaction():
            raise refused("is inside a savepoint, which somebody else will end", fix=BLOCK_FIX)
        dialect = self._connection.dialect
        if dialect.name != "postgresql" or dialect.paramstyle not in PARAMETER_STYLES:
            raise refused(
                f"speaks {dialect.name} by the driver {dialect.driver}",
                fix="connect to the database of the tasks by psycopg, asyncpg or psycopg2.",
            )
        # SQLAlchemy's own transaction is none in autocommit.
        self._by_hand = bool(getattr(self._connection.connection.dbapi_connection, "autocommit", False))
        if self._by_hand:
            self._connection.exec_driver_sql("begin")

    def flush(self) -> None:
        """What the session holds back is written."""
        if self._is_session:
            self._owner.flush()

    def run(self, statement: Statement[T], *, schema: str) -> T:
        """One statement, in the driver's own style of parameters."""
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
        """Commits all of it."""
        if self._by_hand:
            self._connection.exec_driver_sql("commit")
        self._owner.commit()

    def rollback(self) -> None:
        """Rolls all of it back."""
        try:
            if self._by_hand:
                self._connection.exec_driver_sql("rollback")
        finally:
            self._owner.rollback()


class AsyncSqlalchemyConnection:
    """SQLAlchemy's AsyncConnection and AsyncSession: what `SqlalchemyConnection` does, as they run sync code."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._inner: SqlalchemyConnection

    async def begin(self) -> None:
        """Its own transaction, or the one that is open."""

        def begin(owner: Any) -> None:
            self._inner = SqlalchemyConnection(owner)
            self._inner.begin()

        await self._owner.run_sync(begin)

    async def flush(self) -> None:
        """What the session holds back is written."""
        await self._owner.run_sync(lambda _: self._inner.flush())

    async def run(self, statement: Statement[T], *, schema: str) -> T:
        """One statement."""
        found: T = await self._owner.run_sync(
            lambda owner: SqlalchemyConnection(owner).run(statement, schema=schema)
        )
        return found

    async def commit(self) -> None:
        """Commits all of it."""
        await self._owner.run_sync(lambda _: self._inner.commit())

    async def rollback(self) -> None:
        """Rolls all of it back."""
        await self._owner.run_sync(lambda _: self._inner.rollback())
