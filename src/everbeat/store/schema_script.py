"""The statements of `migrate` as text, for a reviewer or for a database administrator who runs them with psql."""

from __future__ import annotations

from collections.abc import Iterator

from everbeat.store import migrations
from everbeat.store.migrations import Migration
from everbeat.store.schema_steps import LOCK_TIMEOUT_MS, Step, record_of, steps_of
from everbeat.store.statement import compose
from everbeat.store.target import Target

_HOW = """\
-- The upgrade of the schema "{schema}" from version {since} to {newest}, for psql without --single-transaction.
-- A step between "begin" and "commit" ends with an error if it waits for a lock longer than {timeout} ms: run that step again.
-- A step without "begin" must not be in a transaction. If one fails, its index is invalid: drop the index before you repeat the step.
-- "everbeat migrate" goes on after the last recorded step, and waits while the lock of the first statement is held."""
# A session that waited for the lock would keep a snapshot, for which the build of an index by the holder of the lock waits.
_ALONE = """\
do $$ begin
    if not pg_try_advisory_lock({key}) then
        raise exception 'another migration of this schema is under way';
    end if;
end $$;"""


def script(schema: str, *, since: int = 0) -> str:
    """The statements that create the schema, or those that upgrade it from version `since`."""
    parts = _upgrade(schema, since) if since else _creation(schema)
    return "".join(f"{part}\n\n" for part in parts)


def _creation(schema: str) -> Iterator[str]:
    for name in ("schema/create_schema", "schema/versions_table", "schema/steps_table"):
        yield f"{compose(name, schema).decode().strip()};"
    for migration in migrations.known_migrations():
        heading = _heading(migration)
        for name in migration.statements:
            yield f"{heading}{compose(name, schema).decode().strip()};"
            heading = ""
        yield f"{heading}{record_of(migration, schema)};"


def _upgrade(schema: str, since: int) -> Iterator[str]:
    pending = [each for each in migrations.known_migrations() if each.version > since]
    if not pending:
        yield f"-- Version {since} is the newest that this everbeat knows: there is nothing to upgrade."
        return
    yield _HOW.format(schema=schema, since=since, newest=pending[-1].version, timeout=LOCK_TIMEOUT_MS)
    key = Target(url="", schema=schema).lock_key("migrations")
    yield _ALONE.format(key=key)
    yield "set statement_timeout = 0;\nset lock_timeout = 0;"
    yield f"{compose('schema/steps_table', schema).decode().strip()};"
    for migration in pending:
        heading = _heading(migration)
        for step in steps_of(migration):
            yield heading + _step(step, schema)
            heading = ""
        yield f"{heading}{record_of(migration, schema)};"
    yield f"select pg_advisory_unlock({key});"


def _step(step: Step, schema: str) -> str:
    if step.is_concurrent:
        text = step.text(schema)
        return f"-- Step {step.name}: must not be in a transaction.\n{text};\n{step.record(schema)};"
    text = step.in_transaction(schema, lock_timeout_ms=LOCK_TIMEOUT_MS)
    return f"-- Step {step.name}\nbegin;\n{text};\ncommit;"


def _heading(migration: Migration) -> str:
    return f"-- Migration {migration.version}: {migration.name}\n"
