"""A database beside that of a target, on the same server, for a program that is not everbeat.

What lives here: making it, its URL, dropping it. What may not: anything in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlencode

import psycopg
from psycopg import Connection

from everbeat.errors import SchemaForbidden
from everbeat.store.statement import compose
from everbeat.store.target import Target

_APPLICATION = "everbeat bench"


@contextmanager
def own_database(target: Target, name: str) -> Iterator[str]:
    """The URL of a new, empty database, which is dropped afterwards. Raises a DatabaseError."""
    with target.connect(_APPLICATION) as connection:
        url = _url(connection, name)
        try:
            _execute(connection, target, "bench/create_database", name)
        except SchemaForbidden as problem:
            raise SchemaForbidden(
                f"It needs a database of its own: {problem.message}",
                fix=f'let the role make databases: ALTER ROLE "{connection.info.user}" CREATEDB.',
            ) from None
    try:
        yield url
    finally:
        with target.connect(_APPLICATION) as connection:
            _execute(connection, target, "bench/drop_database", name)


def _execute(connection: Connection[Any], target: Target, statement: str, name: str) -> None:
    try:
        connection.execute(compose(statement, name))
    except psycopg.Error as problem:
        raise target.explain(problem) from problem


def _url(connection: Connection[Any], name: str) -> str:
    """The form that libpq, asyncpg and node-postgres read alike, also for a Unix socket: all but the database as parameters."""
    info = connection.info
    known = {
        "host": info.host or info.hostaddr,
        "port": str(info.port),
        "user": info.user,
        "password": info.password,
        "sslmode": info.get_parameters().get("sslmode"),
    }
    given = {key: value for key, value in known.items() if value}
    return f"postgresql:///{quote(name)}?{urlencode(given, quote_via=quote)}"
