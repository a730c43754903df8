"""Transactions of everbeat's own sessions. Each begins here, so that none can outlive a frozen process without a bound."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from psycopg import AsyncConnection, Connection

from everbeat.store.own_settings import BOUND_TRANSACTION
from everbeat.store.target import is_pooled


@contextmanager
def transaction(connection: Connection[Any]) -> Iterator[None]:
    """Run the block in one transaction. The server rolls it back if this process pauses for too long between two statements."""
    with connection.transaction():
        if is_pooled(connection):
            connection.execute(BOUND_TRANSACTION)
        yield


@asynccontextmanager
async def atransaction(connection: AsyncConnection[Any]) -> AsyncIterator[None]:
    """The twin of `transaction` for event loops."""
    async with connection.transaction():
        if is_pooled(connection):
            await connection.execute(BOUND_TRANSACTION)
        yield
