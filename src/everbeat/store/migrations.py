"""Which migrations there are and which are applied. Code and schema that do not fit are refused in words."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from msgspec import Struct
from psycopg import Connection, sql

from everbeat.errors import SchemaFromTheFuture, SchemaGone, SchemaMissing, SchemaOutdated
from everbeat.store.statement import compose
from everbeat.store.target import Target


class Migration(Struct, frozen=True):
    """One step: its number, its name, and its statements in order (names of .sql files)."""

    version: int
    name: str
    statements: tuple[str, ...]


class SchemaStatus(Struct, frozen=True):
    """What was applied, what this code knows, and what is still to do. `applied` is empty where there is no schema yet.

    `made_as`: the name under which the schema was made, where that is another one. `moved_to`: what it is called now, where it was
    renamed and nothing has taken its name.
    """

    schema: str
    applied: tuple[int, ...]
    known: tuple[int, ...]
    made_as: str | None = None
    moved_to: str | None = None

    @property
    def pending(self) -> tuple[int, ...]:
        """The versions that `migrate` would apply."""
        return tuple(version for version in self.known if version not in self.applied)

    @property
    def unknown(self) -> tuple[int, ...]:
        """The versions that a newer everbeat applied."""
        return tuple(version for version in self.applied if version not in self.known)


@cache
def known_migrations() -> tuple[Migration, ...]:
    """The migrations that come with this code, by number."""
    folder = files("everbeat") / "sql" / "schema"
    found = []
    for step in folder.iterdir():
        number, _, name = step.name.partition("_")
        if step.is_dir() and number.isdigit():
            statements = sorted(
                file.name.removesuffix(".sql") for file in step.iterdir() if file.name.endswith(".sql")
            )
            found.append(
                Migration(
                    int(number), name, tuple(f"schema/{step.name}/{statement}" for statement in statements)
                )
            )
    return tuple(sorted(found, key=lambda migration: migration.version))


def status(connection: Connection[Any], target: Target) -> SchemaStatus:
    """What is applied in the target's schema."""
    applied: tuple[int, ...] = ()
    quoted = sql.Identifier(target.schema, "schema_versions").as_string(connection)
    found = connection.execute(
        compose("schema/schema_exists", target.schema), {"schema": target.schema, "versions_table": quoted}
    ).fetchone()
    if found is not None and found[1]:
        applied = tuple(
            row[0] for row in connection.execute(compose("schema/applied_versions", target.schema))
        )
    made = dict(connection.execute(compose("schema/made_as", target.schema)).fetchall())
    return SchemaStatus(
        target.schema,
        applied,
        tuple(migration.version for migration in known_migrations()),
        made_as=next((made[name] for name in made if name == target.schema != made[name]), None),
        moved_to=None if applied else next((name for name in made if made[name] == target.schema), None),
    )


def require_own_name(found: SchemaStatus, target: Target) -> None:
    """Raises SchemaGone for a schema that was renamed: made anew, it would share the work with the renamed one's triggers."""
    before, now = found.made_as or found.schema, found.moved_to or found.schema
    if before == now:
        return
    raise SchemaGone(
        f"The schema {before!r} in {target.shown!r} was renamed to {now!r}, and its functions still write to {before!r}.",
        fix=f'rename it back: alter schema "{now}" rename to "{before}"; for a new and empty schema choose another name.',
    )


def require_fit(found: SchemaStatus, target: Target) -> None:
    """Raises SchemaMissing, SchemaGone, SchemaOutdated or SchemaFromTheFuture when this code cannot work with the schema."""
    require_own_name(found, target)
    if found.unknown:
        raise SchemaFromTheFuture(
            f"The schema {target.schema!r} in {target.shown!r} is at version {max(found.applied)}; this everbeat knows up to {max(found.known)}.",
            fix="upgrade everbeat in this program; migrations do not go back.",
        )
    if not found.applied:
        raise SchemaMissing(
            f"The schema {target.schema!r} in {target.shown!r} has no everbeat tables.",
            fix="run 'everbeat migrate'.",
        )
    if found.pending:
        raise SchemaOutdated(
            f"The schema {target.schema!r} in {target.shown!r} is at version {max(found.applied)}; this everbeat needs {max(found.known)}.",
            fix="run 'everbeat migrate'.",
        )
