"""Looks for an upgrade of the schema that is under way, or that ended half way."""

from __future__ import annotations

from typing import Any

from psycopg import Connection, sql

from everbeat.domain.upgrades import DoneStep, UnfinishedUpgrade
from everbeat.store.lock_watch import session_of
from everbeat.store.statement import compose
from everbeat.store.target import Target


def unfinished(connection: Connection[Any], target: Target) -> UnfinishedUpgrade:
    """What an upgrade has left. A schema up to version 10 has no table of steps, and a role that cannot read it learns of none."""

    def asked(name: str, **parameters: object) -> list[tuple[Any, ...]]:
        return connection.execute(compose(f"schema/{name}", target.schema), parameters).fetchall()

    table = sql.Identifier(target.schema, "schema_steps").as_string(connection)
    ((is_readable,),) = asked("steps_readable", steps_table=table)
    steps = asked("unfinished_steps") if is_readable else []
    invalid = asked("invalid_indexes", schema=target.schema)
    migrators = asked("migrator", lock_key=target.lock_key("migrations"))
    return UnfinishedUpgrade(
        schema=target.schema,
        steps=tuple(DoneStep(*row) for row in steps),
        invalid_indexes=tuple(name for (name,) in invalid),
        migrator=session_of(*migrators[0]) if migrators else None,
    )
