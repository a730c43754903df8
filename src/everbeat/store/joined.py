"""One statement inside a transaction of the user's, on a connection they bring: neither begun, nor ended, nor repeated here.

What lives here: which connections can be joined. What may not: each library's own ways (`foreign_drivers`), and a transaction of
our own on such a connection (`foreign`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from everbeat.domain.settings import refused
from everbeat.errors import ConfigurationError
from everbeat.store.foreign import ACCEPTED, known_async, known_sync
from everbeat.store.foreign_sqlalchemy import PARAMETER_STYLES
from everbeat.store.foreign_statement import as_text, named, note_of
from everbeat.store.statement import Statement

T = TypeVar("T")

_DJANGO = ("django.utils.connection.ConnectionProxy", "django.db.backends.base.base.BaseDatabaseWrapper")
_FIX = "give it the connection whose transaction the task is to be part of, not an engine, a pool or a cursor"


def run_joined(connection: object, statement: Statement[T], *, schema: str, twin: str) -> T:
    """Runs it in this thread; errors of the user's library pass, with a note where the schema is the problem.

    Raises ConfigurationError for what is no connection, naming `twin` for one that is made for event loops.
    """
    if _is_django(connection):
        with _noted(schema):
            return _run_in_django(connection, statement, schema)
    joined = known_sync(connection)
    if joined is None:
        raise _refused(connection, twin=twin if known_async(connection) is not None else None)
    _require_postgresql(connection)
    with _noted(schema):
        return joined.run(statement, schema=schema)


async def arun_joined(connection: object, statement: Statement[T], *, schema: str, twin: str) -> T:
    """The twin of `run_joined` for event loops."""
    joined = known_async(connection)
    if joined is None:
        is_sync = _is_django(connection) or known_sync(connection) is not None
        raise _refused(connection, twin=twin if is_sync else None)
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
    # Its own cursor: it knows of atomic blocks, and of those that have failed.
    if connection.vendor != "postgresql":
        raise _refused(connection, twin=None)
    with connection.cursor() as cursor:
        cursor.execute(named(statement.name, schema), as_text(statement.parameters))
        return statement.read([tuple(row) for row in cursor.fetchall()])


def _require_postgresql(connection: Any) -> None:
    """Of what SQLAlchemy leads to, which may be any database."""
    bind = connection
    with suppress(Exception):  # a session whose bind depends on the mapper: its own errors are clear enough
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


def _refused(connection: object, *, twin: str | None) -> ConfigurationError:
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
