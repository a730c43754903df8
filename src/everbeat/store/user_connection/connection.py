"""Support for connections that users supply. They are recognized without importing their libraries, and statements join their transactions."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from msgspec import Struct

from everbeat.domain.plan import aperform, perform
from everbeat.domain.settings.settings import refused
from everbeat.errors import CommitRefused, ConfigurationError
from everbeat.runtime.blocking import refuse_in_loop, unbroken
from everbeat.store.statement import Statement
from everbeat.store.user_connection.drivers import (
    PARAMETER_STYLES,
    AsyncpgConnection,
    AsyncPsycopgConnection,
    AsyncSqlalchemyConnection,
    Psycopg2Connection,
    PsycopgConnection,
    SqlalchemyConnection,
    as_text,
    named,
    note_of,
)

T = TypeVar("T")
Given = TypeVar("Given")
Given_co = TypeVar("Given_co", covariant=True)

ACCEPTED = (
    "psycopg.Connection, psycopg.AsyncConnection, asyncpg.Connection (also from a pool), psycopg2's connection, and "
    "SQLAlchemy's Connection, Session, AsyncConnection and AsyncSession over one of these drivers"
)


class SyncConnection(Protocol):
    """The interface of a user's blocking connection, for use in `with`.

    `begin` raises CommitRefused if it cannot begin a transaction. Errors of the user's library propagate.
    """

    def begin(self) -> None: ...

    def flush(self) -> None: ...

    def run(self, statement: Statement[T], *, schema: str) -> T: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class AsyncConnection(Protocol):
    """The asynchronous counterpart of `SyncConnection`, for use in `async with`."""

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
    """Return an adapter for the connection if it is of a supported blocking type, else None."""
    make = _known(connection, _SYNC)
    return None if make is None else make(connection)


def known_async(connection: object) -> AsyncConnection | None:
    """Return an adapter for the connection if it is of a supported asynchronous type, else None."""
    make = _known(connection, _ASYNC)
    return None if make is None else make(connection)


def sync_connection(connection: object) -> SyncConnection:
    """Return an adapter for a connection used in `with`.

    If its type is not supported, raises CommitRefused, which lists the accepted types.
    """
    if (found := known_sync(connection)) is not None:
        return found
    raise _refused(connection, other=_ASYNC, form="with", twin="async with")


def async_connection(connection: object) -> AsyncConnection:
    """Return an adapter for a connection used in `async with`.

    If its type is not supported, raises CommitRefused, which lists the accepted types.
    """
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
        f"Context.commit was given a {kind}, which it does not support. It accepts {ACCEPTED}.",
        fix="give it one connection of these, not an engine, a pool or a cursor.",
    )


class DriverQuestion(Struct, frozen=True):
    """A request to the worker that runs the code, sent in the middle of a transaction."""

    request: object


class DriverStatement(Struct, frozen=True):
    """One statement on the user's connection."""

    statement: Statement[Any]
    schema: str


class TransactionAction(Struct, frozen=True):
    """An action on the user's connection: begin, commit, roll back, or flush an ORM's pending changes."""

    verb: str


DriverStep: TypeAlias = DriverQuestion | DriverStatement | TransactionAction
DriverPlan: TypeAlias = Generator[DriverStep, Any, T]


class WorkerChannel(Protocol):
    """The channel to the worker that runs the code."""

    def ask(self, request: Any) -> Any: ...

    async def aask(self, request: Any) -> Any: ...


class TransactionPlan(Protocol[Given_co]):
    """The two plans of a transaction: one that begins it, and one that ends it.

    `end` commits, or rolls back if the block raised an exception.
    """

    def begin(self) -> DriverPlan[Given_co]: ...

    def end(self, error: BaseException | None) -> DriverPlan[None]: ...


class UserTransaction(Generic[Given]):
    """A transaction on a user's connection, for use in `with` or `async with`. Both use the same plans."""

    def __init__(
        self, connection: object, undertaking: TransactionPlan[Given], *, line: WorkerChannel
    ) -> None:
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
        # After a cancellation in the middle of a COMMIT, the caller could not know whether the transaction was committed.
        await unbroken(aperform(self._undertaking.end(error), self._astep))

    def _step(self, step: DriverStep) -> Any:
        match step:
            case DriverQuestion(request):
                return self._line.ask(request)
            case DriverStatement(statement, schema):
                return self._sync.run(statement, schema=schema)
            case TransactionAction(verb):
                return getattr(self._sync, verb)()

    async def _astep(self, step: DriverStep) -> Any:
        match step:
            case DriverQuestion(request):
                return await self._line.aask(request)
            case DriverStatement(statement, schema):
                return await self._async.run(statement, schema=schema)
            case TransactionAction(verb):
                return await getattr(self._async, verb)()


_DJANGO = ("django.utils.connection.ConnectionProxy", "django.db.backends.base.base.BaseDatabaseWrapper")
_FIX = "give it the connection whose transaction the task is to be part of, not an engine, a pool or a cursor"


def run_joined(connection: object, statement: Statement[T], *, schema: str, twin: str) -> T:
    """Run a statement on the user's connection, in this thread.

    Errors of the user's library propagate, with a note if the schema is the problem. Raises ConfigurationError if the connection is not
    supported. If it is an asynchronous connection, the error names `twin`.
    """
    if _is_django(connection):
        with _noted(schema):
            return _run_in_django(connection, statement, schema)
    joined = known_sync(connection)
    if joined is None:
        raise _not_supported(connection, twin=twin if known_async(connection) is not None else None)
    _require_postgresql(connection)
    with _noted(schema):
        return joined.run(statement, schema=schema)


async def arun_joined(connection: object, statement: Statement[T], *, schema: str, twin: str) -> T:
    """The asynchronous counterpart of `run_joined`."""
    joined = known_async(connection)
    if joined is None:
        is_sync = _is_django(connection) or known_sync(connection) is not None
        raise _not_supported(connection, twin=twin if is_sync else None)
    _require_postgresql(connection)
    with _noted(schema):
        return await joined.run(statement, schema=schema)


@contextmanager
def _noted(schema: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        if (note := note_of(problem, schema=schema)) is not None:
            problem.add_note(note)
        raise


def _run_in_django(connection: Any, statement: Statement[T], schema: str) -> T:
    # Use Django's own cursor, because it tracks atomic blocks and those that have failed.
    if connection.vendor != "postgresql":
        raise _not_supported(connection, twin=None)
    with connection.cursor() as cursor:
        cursor.execute(named(statement.name, schema), as_text(statement.parameters))
        return statement.read([tuple(row) for row in cursor.fetchall()])


def _require_postgresql(connection: Any) -> None:
    """Raise ConfigurationError if SQLAlchemy is not connected to PostgreSQL by a supported driver."""
    bind = connection
    with suppress(Exception):  # a session's bind may depend on the mapper; its own errors are clear enough
        bind = connection.get_bind()
    dialect = getattr(bind, "dialect", None)
    if dialect is not None and (dialect.name != "postgresql" or dialect.paramstyle not in PARAMETER_STYLES):
        raise refused(
            f"{dialect.name}+{dialect.driver}",
            subject="connection",
            code="WRONG_CONNECTION",
            rule="leads to no PostgreSQL by psycopg, asyncpg or psycopg2",
            fix="connect to the database of the tasks by one of these drivers",
        )


def _is_django(connection: object) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in _DJANGO for cls in type(connection).__mro__)


def _not_supported(connection: object, *, twin: str | None) -> ConfigurationError:
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    if twin is not None:
        return refused(
            kind,
            subject="connection",
            code="WRONG_CONNECTION",
            rule="is made for the other kind of call",
            fix=f"use {twin}",
        )
    rule = f"is none of those that can carry a send: {ACCEPTED}, and Django's connection to PostgreSQL"
    return refused(kind, subject="connection", code="WRONG_CONNECTION", rule=rule, fix=_FIX)
