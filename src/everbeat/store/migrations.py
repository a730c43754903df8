"""The known migrations, the status of a schema, and the migrations as SQL text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final

from msgspec import Struct
from psycopg import Connection, sql

from everbeat.errors import SchemaFromTheFuture, SchemaGone, SchemaMissing, SchemaOutdated
from everbeat.store.statement import compose, source
from everbeat.store.target import Target

_OLDEST_CODE: Final = "oldest_code.txt"


class Migration(Struct, frozen=True):
    """A migration: its number, its name, and the names of its statements (.sql files) in order.

    `oldest_code` is the version of the oldest code that works with the schema after this migration. It is None up to version 10, because
    until then only code of exactly the same version worked.
    """

    version: int
    name: str
    statements: tuple[str, ...]
    oldest_code: int | None = None

    @property
    def recorded_by(self) -> str:
        """Return the name of the statement that records this migration."""
        return "schema/record_early_version" if self.oldest_code is None else "schema/record_version"


class SchemaStatus(Struct, frozen=True):
    """The versions that are applied in a schema, and the versions that this code knows. `applied` is empty if the schema does not exist yet.

    `oldest_code` is the version of the oldest code that works with the schema. `made_as` is the name under which the schema was created, if
    it has another name now. `moved_to` is the schema's current name, if it was renamed and no other schema has taken the old name.
    """

    schema: str
    applied: tuple[int, ...]
    known: tuple[int, ...]
    oldest_code: int | None = None
    made_as: str | None = None
    moved_to: str | None = None

    @property
    def version(self) -> int | None:
        """Return the version of the schema, or None if it does not exist yet."""
        return max(self.applied, default=None)

    @property
    def code(self) -> int:
        """Return the newest version that this code knows."""
        return max(self.known)

    @property
    def pending(self) -> tuple[int, ...]:
        """Return the versions that `migrate` would apply."""
        return tuple(version for version in self.known if version not in self.applied)

    @property
    def unknown(self) -> tuple[int, ...]:
        """Return the applied versions that this code does not know. A newer everbeat has applied them."""
        return tuple(version for version in self.applied if version not in self.known)

    @property
    def is_too_new(self) -> bool:
        """Return whether a newer everbeat has changed the schema so that this code no longer works with it."""
        return bool(self.unknown) and (self.oldest_code is None or self.oldest_code > self.code)

    @property
    def is_supported(self) -> bool:
        """Return whether this code works with the schema."""
        return not self.pending and not self.is_too_new

    @property
    def summary(self) -> str:
        """Return a phrase that says at which version a supported schema is."""
        text = f"schema {self.schema!r} is at version {self.version}"
        if not self.unknown:
            return f"{text}, as this everbeat needs it"
        return f"{text}, which supports this everbeat ({self.code}): usual while a newer everbeat is deployed"


@cache
def known_migrations() -> tuple[Migration, ...]:
    """Return the migrations that this code knows, ordered by number."""
    folder = files("everbeat") / "sql" / "schema"
    found = []
    for step in folder.iterdir():
        number, _, name = step.name.partition("_")
        if step.is_dir() and number.isdigit():
            oldest = step / _OLDEST_CODE
            statements = sorted(
                file.name.removesuffix(".sql") for file in step.iterdir() if file.name.endswith(".sql")
            )
            found.append(
                Migration(
                    int(number),
                    name,
                    tuple(f"schema/{step.name}/{statement}" for statement in statements),
                    int(oldest.read_text(encoding="utf-8")) if oldest.is_file() else None,
                )
            )
    return tuple(sorted(found, key=lambda migration: migration.version))


def status(connection: Connection[Any], target: Target) -> SchemaStatus:
    """Return the status of the target's schema."""
    applied: dict[int, int | None] = {}
    quoted = sql.Identifier(target.schema, "schema_versions").as_string(connection)
    found = connection.execute(
        compose("schema/schema_exists", target.schema), {"schema": target.schema, "versions_table": quoted}
    ).fetchone()
    if found is not None and found[1]:
        applied = dict(connection.execute(compose("schema/applied_versions", target.schema)).fetchall())
    made = dict(connection.execute(compose("schema/made_as", target.schema)).fetchall())
    return SchemaStatus(
        target.schema,
        tuple(applied),
        tuple(migration.version for migration in known_migrations()),
        oldest_code=applied[max(applied)] if applied else None,
        made_as=next((made[name] for name in made if name == target.schema != made[name]), None),
        moved_to=None if applied else next((name for name in made if made[name] == target.schema), None),
    )


def require_own_name(found: SchemaStatus, target: Target) -> None:
    """Raise SchemaGone if the schema was renamed. Its triggers would write to a new schema with the old name."""
    before, now = found.made_as or found.schema, found.moved_to or found.schema
    if before == now:
        return
    raise SchemaGone(
        f"The schema {before!r} in {target.shown!r} was renamed to {now!r}, and its functions still write to {before!r}.",
        fix=f'rename it back: alter schema "{now}" rename to "{before}"; for a new and empty schema choose another name.',
    )


def require_fit(found: SchemaStatus, target: Target) -> None:
    """Raise SchemaMissing, SchemaGone, SchemaOutdated or SchemaFromTheFuture if this code cannot work with the schema."""
    require_own_name(found, target)
    where = f"The schema {target.schema!r} in {target.shown!r}"
    if not found.applied:
        raise SchemaMissing(f"{where} has no everbeat tables.", fix="run 'everbeat migrate'.")
    if found.is_too_new:
        oldest = found.oldest_code or found.version
        raise SchemaFromTheFuture(
            f"{where} is at version {found.version}; this everbeat knows up to {found.code}, and the schema works with {oldest} or newer.",
            fix="upgrade everbeat in this program; migrations do not go back.",
        )
    if found.pending:
        raise SchemaOutdated(
            f"{where} is at version {found.version}; this everbeat needs {found.code}.", fix=_upgrade(found)
        )


def _upgrade(found: SchemaStatus) -> str:
    """Return instructions for the upgrade, including its effect on programs that are using the current schema."""
    oldest = known_migrations()[-1].oldest_code or found.code
    if found.version is not None and found.version >= oldest:
        return f"run 'everbeat migrate'. Programs of version {found.version} continue to work."
    return (
        f"run 'everbeat migrate'. Running programs of version {found.version} continue, but processes of a version before {oldest}"
        " cannot start afterwards, so replace them next."
    )


LOCK_TIMEOUT_MS: Final = 500
"""How long one try waits for a lock, in milliseconds.

Statements that need the table queue behind this lock request, so the timeout limits how long senders and workers are delayed. everbeat's
own transactions are far shorter, so the first try gets the lock unless other programs have transactions open.
"""

_INDEX: Final = re.compile(
    r"^(?P<verb>create(?: unique)?|drop) index \{concurrently\} (?:if not exists )?(?:\{schema\}\.)?(?P<name>\w+)",
    re.MULTILINE,
)


class MigrationStep(Struct, frozen=True):
    """One step of a migration: the version that the step belongs to, and the name of its statement."""

    version: int
    statement: str

    @property
    def name(self) -> str:
        """Return the step's name, which is the last part of its statement's name."""
        return self.statement.rpartition("/")[2]

    @property
    def is_concurrent(self) -> bool:
        """Return whether the step builds or drops an index outside a transaction."""
        return "{concurrently}" in source(self.statement)

    @property
    def index(self) -> str:
        """Return the name of the index that a concurrent step builds or drops."""
        return self._index["name"]

    @property
    def drops(self) -> bool:
        """Return whether a concurrent step drops its index."""
        return self._index["verb"] == "drop"

    @property
    def _index(self) -> re.Match[str]:
        found = _INDEX.search(source(self.statement))
        if found is None:
            raise ValueError(
                f"{self.statement}: {{concurrently}} stands in 'create index {{concurrently}} name' and 'drop index {{concurrently}} {{schema}}.name'"
            )
        return found

    def text(self, schema: str) -> str:
        """Return the step's statement alone, for a schema that is in use."""
        return compose(self.statement, schema, concurrently=True).decode().strip()

    def record(self, schema: str) -> str:
        """Return the statement that records the step."""
        return literal("schema/record_step", schema, {"version": self.version, "name": self.name})

    def in_transaction(self, schema: str, *, lock_timeout_ms: int) -> str:
        """Return the statements of a step that runs in its own transaction.

        Such a transaction never holds one lock while it is waiting for another.
        """
        return f"set local lock_timeout = {lock_timeout_ms};\n{self.text(schema)};\n{self.record(schema)}"


def steps_of(migration: Migration) -> Iterator[MigrationStep]:
    """Yield the steps of a migration in order."""
    for statement in migration.statements:
        yield MigrationStep(migration.version, statement)


def record_of(migration: Migration, schema: str) -> str:
    """Return the statement that records a version as applied."""
    parameters = {
        "version": migration.version,
        "name": migration.name,
        "oldest_code": migration.oldest_code,
    }
    return literal(migration.recorded_by, schema, parameters)


def literal(name: str, schema: str, parameters: Mapping[str, Any]) -> str:
    """Return a statement with its parameters inserted as literals, to be sent or printed as one text."""
    texts = {key: sql.Literal(value).as_string(None) for key, value in parameters.items()}
    return (compose(name, schema).decode() % texts).strip()


_HOW = """\
-- The upgrade of the schema "{schema}" from version {since} to {newest}, for psql without --single-transaction.
-- A step between "begin" and "commit" ends with an error if it waits for a lock longer than {timeout} ms: run that step again.
-- A step without "begin" must not be in a transaction. If one fails, its index is invalid: drop the index before you repeat the step.
-- "everbeat migrate" continues after the last recorded step, and waits while the lock of the first statement is held."""
# A session waiting for the lock would keep a snapshot, and the lock holder's index build would then wait for that snapshot.
_ALONE = """\
do $$ begin
    if not pg_try_advisory_lock({key}) then
        raise exception 'another migration of this schema is under way';
    end if;
end $$;"""


def script(schema: str, *, since: int = 0) -> str:
    """Return the statements that create the schema or, if `since` is set, that upgrade it from that version."""
    parts = _upgrade_lines(schema, since) if since else _creation(schema)
    return "".join(f"{part}\n\n" for part in parts)


def _creation(schema: str) -> Iterator[str]:
    for name in ("schema/create_schema", "schema/versions_table", "schema/steps_table"):
        yield f"{compose(name, schema).decode().strip()};"
    for migration in known_migrations():
        heading = _heading(migration)
        for name in migration.statements:
            yield f"{heading}{compose(name, schema).decode().strip()};"
            heading = ""
        yield f"{heading}{record_of(migration, schema)};"


def _upgrade_lines(schema: str, since: int) -> Iterator[str]:
    pending = [each for each in known_migrations() if each.version > since]
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


def _step(step: MigrationStep, schema: str) -> str:
    if step.is_concurrent:
        text = step.text(schema)
        return f"-- Step {step.name}: must not be in a transaction.\n{text};\n{step.record(schema)};"
    text = step.in_transaction(schema, lock_timeout_ms=LOCK_TIMEOUT_MS)
    return f"-- Step {step.name}\nbegin;\n{text};\ncommit;"


def _heading(migration: Migration) -> str:
    return f"-- Migration {migration.version}: {migration.name}\n"
