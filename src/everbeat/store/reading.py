"""A database that only reads and bounds the time of each statement, for pages that must not hold up anything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import psycopg
from psycopg import AsyncConnection

from everbeat.errors import DatabaseError
from everbeat.store.connection import WatchedAsyncConnection
from everbeat.store.database import Database
from everbeat.store.patience import Patience
from everbeat.store.session import RunStatement
from everbeat.store.statement import Statement
from everbeat.store.target import Target, atransaction, is_pooled

T = TypeVar("T")
STATEMENT_TIMEOUT_S: Final = 5
_SETTINGS: Final = {
    "statement_timeout": f"'{STATEMENT_TIMEOUT_S}s'", "jit": "off", "max_parallel_workers_per_gather": "0", "plan_cache_mode": "force_custom_plan",
}  # fmt: skip
"""Each statement reads a bounded number of rows, so compiling it and starting processes for it would take longer than running it. A plan for
all values of its filters would read much more."""
SESSION: Final = "; ".join(
    [
        "set default_transaction_read_only = on",
        *(f"set {name} = {value}" for name, value in _SETTINGS.items()),
    ]
).encode()
_TRANSACTION: Final = "; ".join(
    ["set transaction read only", *(f"set local {name} = {value}" for name, value in _SETTINGS.items())]
).encode()
"""The same settings for one transaction. Behind a transaction pooler, a session belongs to all of its clients."""


class ReadingDatabase(Database):
    """Runs statements of an event loop in read-only transactions. The server cancels a statement after 5 s, and it is not repeated.

    A write raises DatabaseReadOnly. Only the asynchronous methods have these limits.
    """

    def __init__(self, target: Target, *, application_name: str, patience_s: float, connections: int) -> None:
        super().__init__(
            target.for_clients(),
            application_name=application_name,
            patience_s=patience_s,
            connections=connections,
        )

    async def _aconnect(self, patience: Patience) -> WatchedAsyncConnection:
        connection = await super()._aconnect(patience)
        if not is_pooled(connection):
            try:
                await connection.execute(SESSION)
            except BaseException:
                await connection.close()
                raise
        return connection

    async def _aonce(self, statement: Statement[T], patience: Patience) -> T:
        async with self._aconnection(patience) as connection, _bounded(connection):
            return statement.read(await self._arows(connection, statement))

    async def _atransacted(self, body: Callable[[RunStatement], Awaitable[T]], patience: Patience) -> T:
        async with self._aconnection(patience) as connection, atransaction(connection):
            if is_pooled(connection):
                await connection.execute(_TRANSACTION)

            async def run(statement: Statement[Any]) -> Any:
                return statement.read(await self._arows(connection, statement))

            return await body(run)

    async def _arepeated(
        self, once: Callable[[Patience], Awaitable[T]], patience_s: float | None, *, is_final: bool = False
    ) -> T:
        async def unless_cancelled(patience: Patience) -> T:
            try:
                return await once(patience)
            except psycopg.errors.QueryCanceled as problem:
                raise DatabaseError(
                    f"The database at {self.target.shown!r} did not finish a statement within {STATEMENT_TIMEOUT_S} s.",
                    fix="narrow the filters, or see what the statement waits for: 'everbeat doctor'.",
                ) from problem

        return await super()._arepeated(unless_cancelled, patience_s, is_final=is_final)


@asynccontextmanager
async def _bounded(connection: AsyncConnection[Any]) -> AsyncIterator[None]:
    if not is_pooled(connection):
        yield
        return
    async with atransaction(connection):
        await connection.execute(_TRANSACTION)
        yield
