"""Record the objects of a migrated schema: tables and views with their columns, functions with their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from psycopg import Connection

from everbeat.store import migrating
from everbeat.store.target import Target

_COLUMNS = """
    select c.relname, case c.relkind when 'v' then 'view' else 'table' end, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull
    from pg_class c join pg_attribute a on a.attrelid = c.oid
    where c.relnamespace = %s::regnamespace and c.relkind in ('r', 'p', 'v', 'm') and a.attnum > 0 and not a.attisdropped
    order by c.relname, a.attname"""
_FUNCTIONS = """
    select proname, pg_get_function_arguments(oid), pg_get_function_result(oid)
    from pg_proc where pronamespace = %s::regnamespace order by 1, 2"""


def text(url: str, schema: str) -> str:
    """Return the objects that `migrate` creates, sorted by name."""
    target = Target.parse(url, schema=schema)
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        lines = "\n".join((*_columns(connection, schema), *_functions(connection, schema)))
    return f"{lines}\n".replace(schema, "SCHEMA")


def _columns(connection: Connection[Any], schema: str) -> Iterator[str]:
    before = None
    for name, kind, column, type_, is_required in connection.execute(_COLUMNS, [schema]).fetchall():
        if name != before:
            yield f"{kind} {name}"
            before = name
        yield f"  {column} {type_}{' not null' if is_required else ''}"


def _functions(connection: Connection[Any], schema: str) -> Iterator[str]:
    for name, arguments, result in connection.execute(_FUNCTIONS, [schema]).fetchall():
        yield f"function {name}({arguments}) -> {result}"
