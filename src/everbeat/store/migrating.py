"""Migrations go forward only. One process applies them in one transaction while others wait."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg import Connection, sql

from everbeat.store import migrations
from everbeat.store.statement import compose, source
from everbeat.store.target import Target
from everbeat.store.transaction import transaction


def script(schema: str) -> str:
    """Everything `migrate` would run on an empty database, as text for a reviewer."""
    parts = [compose(name, schema).decode() for name in ("schema/create_schema", "schema/versions_table")]
    for migration in migrations.known_migrations():
        parts.append(
            f"-- Migration {migration.version}: {migration.name}\n"
            + compose(migration.statements[0], schema).decode()
        )
        parts.extend(compose(name, schema).decode() for name in migration.statements[1:])
        record = sql.SQL(source(migration.recorded_by)).format(schema=sql.Identifier(schema))
        name = sql.Literal(migration.name).as_string(None)
        noted = {"version": migration.version, "name": name, "oldest_code": migration.oldest_code}
        parts.append(record.as_string(None) % noted)
    return "".join(f"{part.strip()};\n\n" for part in parts)


def migrate(
    connection: Connection[Any], target: Target, *, to: int | None = None, only_absent: bool = False
) -> tuple[int, ...]:
    """Applies what is pending (up to version `to`) in one transaction and answers the versions applied.

    `only_absent`: it creates a schema and upgrades none, not even one that another program creates meanwhile. A newer schema that supports
    this code is left as it is. Raises SchemaFromTheFuture, SchemaGone, SchemaForbidden or another DatabaseError.
    """
    try:
        found = migrations.status(connection, target)
        if found.is_too_new:
            migrations.require_fit(found, target)
        migrations.require_own_name(found, target)
        if not [version for version in found.pending if to is None or version <= to]:
            return ()
        with transaction(connection):
            connection.execute(
                compose("schema/lock_migrations", target.schema), {"lock_key": target.lock_key("migrations")}
            )
            found = migrations.status(connection, target)
            if found.is_too_new:
                migrations.require_fit(found, target)
            if found.applied and only_absent:
                return ()
            there = connection.execute(
                compose("schema/schema_exists", target.schema),
                {"schema": target.schema, "versions_table": "pg_class"},
            ).fetchone()
            if there is None or not there[0]:
                connection.execute(compose("schema/create_schema", target.schema))
            connection.execute(compose("schema/versions_table", target.schema))
            applied = []
            for migration in migrations.known_migrations():
                if migration.version in found.pending and (to is None or migration.version <= to):
                    for name in migration.statements:
                        connection.execute(compose(name, target.schema))
                    connection.execute(
                        compose(migration.recorded_by, target.schema),
                        {
                            "version": migration.version,
                            "name": migration.name,
                            "oldest_code": migration.oldest_code,
                        },
                    )
                    applied.append(migration.version)
            return tuple(applied)
    except psycopg.Error as problem:
        raise target.explain(problem) from problem


def drop(connection: Connection[Any], target: Target) -> None:
    """Drops the schema with everything in it, if it is there. Raises a DatabaseError."""
    try:
        connection.execute(compose("schema/drop_schema", target.schema))
    except psycopg.Error as problem:
        raise target.explain(problem) from problem
