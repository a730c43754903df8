"""Which migrations there are, which are applied, and whether this code works with the schema.

Code of version N works with schema N and with each newer one that supports it: the newest applied migration says its oldest code.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any, Final

from msgspec import Struct
from psycopg import Connection, sql

from everbeat.errors import SchemaFromTheFuture, SchemaGone, SchemaMissing, SchemaOutdated
from everbeat.store.statement import compose
from everbeat.store.target import Target

_OLDEST_CODE: Final = "oldest_code.txt"


class Migration(Struct, frozen=True):
    """One step: its number, its name, and its statements in order (names of .sql files).

    `oldest_code`: the version of the oldest code that works with the schema afterwards. None up to version 10, after which only the code of
    that very version worked.
    """

    version: int
    name: str
    statements: tuple[str, ...]
    oldest_code: int | None = None

    @property
    def recorded_by(self) -> str:
        """The statement that records it."""
        return "schema/record_early_version" if self.oldest_code is None else "schema/record_version"


class SchemaStatus(Struct, frozen=True):
    """What was applied, what this code knows, and what is still to do. `applied` is empty where there is no schema yet.

    `oldest_code`: the version of the oldest code that works with the schema. `made_as`: the name under which the schema was made, where
    that is another one. `moved_to`: what it is called now, where it was renamed and nothing has taken its name.
    """

    schema: str
    applied: tuple[int, ...]
    known: tuple[int, ...]
    oldest_code: int | None = None
    made_as: str | None = None
    moved_to: str | None = None

    @property
    def version(self) -> int | None:
        """The version of the schema; None where there is none yet."""
        return max(self.applied, default=None)

    @property
    def code(self) -> int:
        """The newest version that this code knows."""
        return max(self.known)

    @property
    def pending(self) -> tuple[int, ...]:
        """The versions that `migrate` would apply."""
        return tuple(version for version in self.known if version not in self.applied)

    @property
    def unknown(self) -> tuple[int, ...]:
        """The versions that a newer everbeat applied."""
        return tuple(version for version in self.applied if version not in self.known)

    @property
    def is_too_new(self) -> bool:
        """Whether a newer everbeat made a schema that this code does not work with."""
        return bool(self.unknown) and (self.oldest_code is None or self.oldest_code > self.code)

    @property
    def is_supported(self) -> bool:
        """Whether this code works with the schema."""
        return not self.pending and not self.is_too_new

    @property
    def summary(self) -> str:
        """Where a supported schema stands, as one clause."""
        text = f"schema {self.schema!r} is at version {self.version}"
        if not self.unknown:
            return f"{text}, as this everbeat needs it"
        return f"{text}, which supports this everbeat ({self.code}): usual while a newer everbeat is deployed"


@cache
def known_migrations() -> tuple[Migration, ...]:
    """The migrations that come with this code, by number."""
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
    """What is applied in the target's schema."""
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
    """How to upgrade, and what becomes of the programs that work with the schema as it is."""
    oldest = known_migrations()[-1].oldest_code or found.code
    if found.version is not None and found.version >= oldest:
        return f"run 'everbeat migrate'. Programs of version {found.version} go on working."
    return (
        f"run 'everbeat migrate'. Running programs of version {found.version} go on, but processes of a version before {oldest}"
        " cannot start afterwards, so replace them next."
    )
