"""Migrations go forward only. A schema that is absent is created in one transaction; one that is in use is upgraded in steps."""

from __future__ import annotations

from typing import Any

import psycopg
from msgspec import Struct
from psycopg import Connection

from everbeat.errors import SchemaForbidden
from everbeat.store import migrations
from everbeat.store.migrations import Migration
from everbeat.store.schema_steps import record_of
from everbeat.store.silence import WatchedConnection
from everbeat.store.statement import compose
from everbeat.store.target import Target
from everbeat.store.transaction import transaction
from everbeat.store.upgrade import DEFAULT_LOCK_PATIENCE_S, Tell, Upgrade, tell_nobody


def migrate(
    connection: WatchedConnection,
    target: Target,
    *,
    to: int | None = None,
    only_absent: bool = False,
    patience_s: float = DEFAULT_LOCK_PATIENCE_S,
    tell: Tell = tell_nobody,
) -> tuple[int, ...]:
    """Create the schema in one transaction, or upgrade it step by step, up to version `to`; return the versions that were applied.

    `only_absent`: it creates a schema and upgrades none, not even one that another program creates meanwhile. `patience_s` is how long a step
    of an upgrade tries to get its lock; `tell` gets a line for each step and each wait. A newer schema that supports this code is left as it
    is. Raises SchemaFromTheFuture, SchemaGone, SchemaForbidden, MigrationStopped or another DatabaseError.
    """
    try:
        pending = _pending(connection, target, to)
        if not pending.migrations:
            return ()
        if pending.is_absent and (created := _create(connection, target, to)):
            return created
        if only_absent:
            return ()
        return _upgrade(connection, target, to, Upgrade(connection, target, patience_s=patience_s, tell=tell))
    except psycopg.Error as problem:
        raise target.explain(problem) from problem


class _Pending(Struct, frozen=True):
    """The migrations to apply, and whether there is no schema yet."""

    migrations: tuple[Migration, ...]
    is_absent: bool


def _pending(connection: Connection[Any], target: Target, to: int | None) -> _Pending:
    """What is to be done. Raises SchemaFromTheFuture, SchemaGone."""
    found = migrations.status(connection, target)
    if found.is_too_new:
        migrations.require_fit(found, target)
    migrations.require_own_name(found, target)
    pending = [
        each
        for each in migrations.known_migrations()
        if each.version in found.pending and (to is None or each.version <= to)
    ]
    return _Pending(tuple(pending), is_absent=not found.applied)


def _create(connection: Connection[Any], target: Target, to: int | None) -> tuple[int, ...]:
    """Make a schema that is absent, with all versions in one transaction. Return no version if another process has made it meanwhile."""
    with transaction(connection):
        connection.execute(
            compose("schema/lock_migrations", target.schema), {"lock_key": target.lock_key("migrations")}
        )
        pending = _pending(connection, target, to)
        if not pending.is_absent:
            return ()
        there = connection.execute(
            compose("schema/schema_exists", target.schema),
            {"schema": target.schema, "versions_table": "pg_class"},
        ).fetchone()
        if there is None or not there[0]:
            connection.execute(compose("schema/create_schema", target.schema))
        for name in ("schema/versions_table", "schema/steps_table"):
            connection.execute(compose(name, target.schema))
        for migration in pending.migrations:
            for name in migration.statements:
                connection.execute(compose(name, target.schema))
            connection.execute(record_of(migration, target.schema).encode())
    return tuple(migration.version for migration in pending.migrations)


def _upgrade(
    connection: WatchedConnection, target: Target, to: int | None, upgrade: Upgrade
) -> tuple[int, ...]:
    """Apply what another process has not applied meanwhile. Raises SchemaForbidden, MigrationStopped, psycopg.Error."""
    with upgrade.alone():
        pending = _pending(connection, target, to)
        if not pending.migrations:
            return ()
        try:
            for name in ("schema/versions_table", "schema/steps_table"):
                connection.execute(compose(name, target.schema))
            for migration in pending.migrations:
                upgrade.apply(migration)
        except psycopg.errors.InsufficientPrivilege as problem:
            fix = "run 'everbeat migrate' as the role that owns the schema and its tables."
            raise SchemaForbidden(target.explain(problem).message, fix=fix) from problem
        return tuple(migration.version for migration in pending.migrations)


def drop(connection: Connection[Any], target: Target) -> None:
    """Drops the schema with everything in it, if it is there. Raises a DatabaseError."""
    try:
        connection.execute(compose("schema/drop_schema", target.schema))
    except psycopg.Error as problem:
        raise target.explain(problem) from problem
