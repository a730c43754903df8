"""Connections that users bring: recognised without importing their libraries, and one transaction on any of them.

What lives here: the operations of such a transaction, the block that runs them, and which connections are accepted. What
may not: each library's own ways (`foreign_drivers`), and what the transaction is for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from everbeat.errors import CommitRefused
from everbeat.runtime.blocking import refuse_in_loop, unbroken
from everbeat.store.foreign_drivers import (
    AsyncpgConnection,
    AsyncPsycopgConnection,
    Psycopg2Connection,
    PsycopgConnection,
)
from everbeat.store.foreign_sqlalchemy import AsyncSqlalchemyConnection, SqlalchemyConnection
from everbeat.store.plan import aperform, perform
from everbeat.store.statement import Statement

T = TypeVar("T")
Given = TypeVar("Given")
Given_co = TypeVar("Given_co", covariant=True)

ACCEPTED = (
    "psycopg.Connection, psycopg.AsyncConnection, asyncpg.Connection (also from a pool), psycopg2's connection, and "
    "SQLAlchemy's Connection, Session, AsyncConnection and AsyncSession over one of these drivers"
)


class SyncConnection(Protocol):
    """A connection for `with`. `begin` raises CommitRefused where no transaction of ours can be; the user's own errors pass."""

    def begin(self) -> None: ...

    def flush(self) -> None: ...

    def run(self, statement: Statement[T], *, schema: str) -> T: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class AsyncConnection(Protocol):
    """The twin of `SyncConnection` for `async with`."""

    async def begin(self) -> None: ...

    async def flush(self) -> None: ...

    async def run(self, statement: Statement[T], *, schema: str) -> T: ...

    async def commit(self) -> None: ...

    async def rollback(self) -> None: ...


_SYNC: dict[str, Callable[[Any], SyncConnection]] = {
    "psycopg.Connection": PsycopgConnection,
    "psycopg2.extensions.connection": Psycopg2Connection,
    "sqlalchemy.engine.base.Connection": SqlalchemyConnection,
    "sqlalchemy.orm.session.Session": SqlalchemyConnection,
    "sqlalchemy.orm.scoping.scoped_session": lambda registry: SqlalchemyConnection(registry()),
}
_ASYNC: dict[str, Callable[[Any], AsyncConnection]] = {
    "psycopg.AsyncConnection": AsyncPsycopgConnection,
    "asyncpg.connection.Connection": AsyncpgConnection,
    "asyncpg.pool.PoolConnectionProxy": AsyncpgConnection,
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": AsyncSqlalchemyConnection,
    "sqlalchemy.ext.asyncio.session.AsyncSession": AsyncSqlalchemyConnection,
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": lambda registry: AsyncSqlalchemyConnection(
        registry()
    ),
}


def known_sync(connection: object) -> SyncConnection | None:
    """The connection for code that blocks, if it is one."""
    make = _known(connection, _SYNC)
    return None if make is None else make(connection)


def known_async(connection: object) -> AsyncConnection | None:
    """The connection for event loops, if it is one."""
    make = _known(connection, _ASYNC)
    return None if make is None else make(connection)


def sync_connection(connection: object) -> SyncConnection:
    """The connection for `with`. Raises CommitRefused for anything else, naming what would do."""
    if (found := known_sync(connection)) is not None:
        return found
    raise _refused(connection, other=_ASYNC, form="with", twin="async with")


def async_connection(connection: object) -> AsyncConnection:
    """The connection for `async with`. Raises CommitRefused for anything else, naming what would do."""
    if (found := known_async(connection)) is not None:
        return found
    raise _refused(connection, other=_SYNC, form="async with", twin="with")


def _known(connection: object, kinds: dict[str, Callable[[Any], T]]) -> Callable[[Any], T] | None:
    names = (_name(cls) for cls in type(connection).__mro__)
    return next((kinds[name] for name in names if name in kinds), None)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refused(
    connection: object, *, other: dict[str, Callable[[Any], Any]], form: str, twin: str
) -> CommitRefused:
    kind = _name(type(connection))
    if _known(connection, other) is not None:
        return CommitRefused(
            f"Context.commit was entered by '{form}' with a {kind}, which is made for '{twin}'.",
            fix=f"write '{twin} ctx.commit(connection) as completion:'.",
        )
    return CommitRefused(
        f"Context.commit was given a {kind}, which is no connection it knows. It accepts {ACCEPTED}.",
        fix="give it one connection of these, not an engine, a pool or a cursor.",
    )


class Ask(Struct, frozen=True):
    """A request to whoever runs the code, in the midst of a transaction."""

    request: object


class Run(Struct, frozen=True):
    """One statement on the user's connection."""

    statement: Statement[Any]
    schema: str


class Do(Struct, frozen=True):
    """Begin, flush what an ORM holds back, commit or roll back."""

    verb: str


Step: TypeAlias = Ask | Run | Do
Plan: TypeAlias = Generator[Step, Any, T]


class Line(Protocol):
    """The way to whoever runs the code."""

    def ask(self, request: Any) -> Any: ...

    async def aask(self, request: Any) -> Any: ...


class Undertaking(Protocol[Given_co]):
    """What a transaction is for, as two plans: how it begins and how it ends. `end` raises what the block is to raise."""

    def begin(self) -> Plan[Given_co]: ...

    def end(self, error: BaseException | None) -> Plan[None]: ...


class Transaction(Generic[Given]):
    """One transaction on a connection of the user's, by `with` or `async with`; the same plans for both."""

    def __init__(self, connection: object, undertaking: Undertaking[Given], *, line: Line) -> None:
        self._connection = connection
        self._undertaking = undertaking
        self._line = line
        self._sync: SyncConnection
        self._async: AsyncConnection

    def __enter__(self) -> Given:
        self._sync = sync_connection(self._connection)
        refuse_in_loop("Context.commit", instead="use 'async with' and an async connection")
        return perform(self._undertaking.begin(), self._step)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        perform(self._undertaking.end(error), self._step)

    async def __aenter__(self) -> Given:
        self._async = async_connection(self._connection)
        return await aperform(self._undertaking.begin(), self._astep)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A cancellation in the middle of a COMMIT would leave nobody knowing whether it happened.
        await unbroken(aperform(self._undertaking.end(error), self._astep))

    def _step(self, step: Step) -> Any:
        match step:
            case Ask(request):
                return self._line.ask(request)
            case Run(statement, schema):
                return self._sync.run(statement, schema=schema)
            case Do(verb):
                return getattr(self._sync, verb)()

    async def _astep(self, step: Step) -> Any:
        match step:
            case Ask(request):
                return await self._line.aask(request)
            case Run(statement, schema):
                return await self._async.run(statement, schema=schema)
            case Do(verb):
                return await getattr(self._async, verb)()
