"""The connections that users bring: every library and mode that a commit accepts, each with its way to write a row."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from dataclasses import dataclass
from typing import Any

import asyncpg
import psycopg
import psycopg2
import psycopg2.extras
from psycopg import conninfo
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker
from sqlalchemy.pool import NullPool

Write = Callable[[Any, str], None]
AsyncWrite = Callable[[Any, str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class SyncKind:
    """`open(url)` opens a connection; `write(connection, statement)` runs a statement as users of the library do."""

    name: str
    open: Callable[[str], AbstractContextManager[Any]]
    write: Write


@dataclass(frozen=True, slots=True)
class AsyncKind:
    """The async variant of `SyncKind`."""

    name: str
    open: Callable[[str], AbstractAsyncContextManager[Any]]
    write: AsyncWrite


def plain_write(connection: Any, statement: str) -> None:
    connection.execute(statement)


def cursor_write(connection: Any, statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def text_write(connection: Any, statement: str) -> None:
    connection.execute(text(statement))


async def plain_awrite(connection: Any, statement: str) -> None:
    await connection.execute(statement)


async def text_awrite(connection: Any, statement: str) -> None:
    await connection.execute(text(statement))


@contextmanager
def psycopg_plain(url: str, **options: Any) -> Iterator[Any]:
    connection = psycopg.connect(url, **options)
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def psycopg_open(url: str) -> Iterator[Any]:
    with psycopg_plain(url, row_factory=dict_row) as connection:
        connection.execute("select 1")
        yield connection


@contextmanager
def psycopg2_plain(url: str, *, autocommit: bool = False) -> Iterator[Any]:
    connection = psycopg2.connect(url, cursor_factory=psycopg2.extras.RealDictCursor)
    connection.autocommit = autocommit
    try:
        yield connection
    finally:
        connection.close()


@contextmanager
def sqlalchemy_plain(url: str, *, driver: str = "psycopg", **options: Any) -> Iterator[Any]:
    connect = psycopg.connect if driver == "psycopg" else psycopg2.connect
    engine = create_engine(
        f"postgresql+{driver}://", creator=lambda: connect(url), poolclass=NullPool, **options
    )
    with engine.connect() as connection:
        yield connection
    engine.dispose()


@contextmanager
def sqlalchemy_begun(url: str) -> Iterator[Any]:
    with sqlalchemy_plain(url) as connection, connection.begin():
        yield connection


@contextmanager
def sqlalchemy_session(url: str, *, driver: str = "psycopg") -> Iterator[Any]:
    connect = psycopg.connect if driver == "psycopg" else psycopg2.connect
    engine = create_engine(f"postgresql+{driver}://", creator=lambda: connect(url), poolclass=NullPool)
    with Session(engine) as session:
        yield session
    engine.dispose()


@contextmanager
def sqlalchemy_session_begun(url: str) -> Iterator[Any]:
    with sqlalchemy_session(url) as session, session.begin():
        yield session


@contextmanager
def sqlalchemy_scoped(url: str) -> Iterator[Any]:
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool)
    registry = scoped_session(sessionmaker(engine))
    yield registry
    registry.remove()
    engine.dispose()


@asynccontextmanager
async def psycopg_async(url: str, **options: Any) -> AsyncIterator[Any]:
    connection = await psycopg.AsyncConnection.connect(url, **options)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def psycopg_async_open(url: str) -> AsyncIterator[Any]:
    async with psycopg_async(url, row_factory=dict_row) as connection:
        await connection.execute("select 1")
        yield connection


def asyncpg_arguments(url: str) -> dict[str, Any]:
    given = conninfo.conninfo_to_dict(url)
    return {
        "host": given["host"],
        "port": int(given.get("port") or 5432),
        "user": given.get("user"),
        "database": given.get("dbname") or given.get("user"),
    }


@asynccontextmanager
async def asyncpg_plain(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(**asyncpg_arguments(url))
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def asyncpg_pooled(url: str) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(**asyncpg_arguments(url), min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
    ):
        yield connection


def async_engine(url: str, driver: str, **options: Any) -> Any:
    async def connect() -> Any:
        if driver == "asyncpg":
            return await asyncpg.connect(**asyncpg_arguments(url))
        return await psycopg.AsyncConnection.connect(url)

    return create_async_engine(
        f"postgresql+{driver}://", async_creator=connect, poolclass=NullPool, **options
    )


@asynccontextmanager
async def sqlalchemy_async(url: str, *, driver: str, **options: Any) -> AsyncIterator[Any]:
    engine = async_engine(url, driver, **options)
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


@asynccontextmanager
async def sqlalchemy_async_session(url: str, *, driver: str) -> AsyncIterator[Any]:
    engine = async_engine(url, driver)
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


@asynccontextmanager
async def sqlalchemy_async_scoped(url: str) -> AsyncIterator[Any]:
    engine = async_engine(url, "psycopg")
    registry = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 1)
    yield registry
    await registry.remove()
    await engine.dispose()


SYNC_KINDS = (
    SyncKind("psycopg", psycopg_plain, plain_write),
    SyncKind("psycopg-autocommit", lambda url: psycopg_plain(url, autocommit=True), plain_write),
    SyncKind("psycopg-open-dicts", psycopg_open, plain_write),
    SyncKind("psycopg2", psycopg2_plain, cursor_write),
    SyncKind("psycopg2-autocommit", lambda url: psycopg2_plain(url, autocommit=True), cursor_write),
    SyncKind("sqlalchemy-psycopg", sqlalchemy_plain, text_write),
    SyncKind("sqlalchemy-psycopg2", lambda url: sqlalchemy_plain(url, driver="psycopg2"), text_write),
    SyncKind(
        "sqlalchemy-psycopg-autocommit",
        lambda url: sqlalchemy_plain(url, isolation_level="AUTOCOMMIT"),
        text_write,
    ),
    SyncKind(
        "sqlalchemy-psycopg2-autocommit",
        lambda url: sqlalchemy_plain(url, driver="psycopg2", isolation_level="AUTOCOMMIT"),
        text_write,
    ),
    SyncKind("sqlalchemy-begun", sqlalchemy_begun, text_write),
    SyncKind("sqlalchemy-session", sqlalchemy_session, text_write),
    SyncKind(
        "sqlalchemy-session-psycopg2", lambda url: sqlalchemy_session(url, driver="psycopg2"), text_write
    ),
    SyncKind("sqlalchemy-session-begun", sqlalchemy_session_begun, text_write),
    SyncKind("sqlalchemy-scoped", sqlalchemy_scoped, text_write),
)

ASYNC_KINDS = (
    AsyncKind("psycopg", psycopg_async, plain_awrite),
    AsyncKind("psycopg-autocommit", lambda url: psycopg_async(url, autocommit=True), plain_awrite),
    AsyncKind("psycopg-open-dicts", psycopg_async_open, plain_awrite),
    AsyncKind("asyncpg", asyncpg_plain, plain_awrite),
    AsyncKind("asyncpg-pooled", asyncpg_pooled, plain_awrite),
    AsyncKind("sqlalchemy-psycopg", lambda url: sqlalchemy_async(url, driver="psycopg"), text_awrite),
    AsyncKind("sqlalchemy-asyncpg", lambda url: sqlalchemy_async(url, driver="asyncpg"), text_awrite),
    AsyncKind(
        "sqlalchemy-asyncpg-autocommit",
        lambda url: sqlalchemy_async(url, driver="asyncpg", isolation_level="AUTOCOMMIT"),
        text_awrite,
    ),
    AsyncKind(
        "sqlalchemy-session-psycopg", lambda url: sqlalchemy_async_session(url, driver="psycopg"), text_awrite
    ),
    AsyncKind(
        "sqlalchemy-session-asyncpg", lambda url: sqlalchemy_async_session(url, driver="asyncpg"), text_awrite
    ),
    AsyncKind("sqlalchemy-scoped", sqlalchemy_async_scoped, text_awrite),
)
