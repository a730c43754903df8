"""Code of version N works with schema N and with each newer schema whose newest migration supports it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from psycopg import Connection, sql

from everbeat.errors import SchemaFromTheFuture, SchemaMissing, SchemaOutdated
from everbeat.store import migrating, migrations
from everbeat.store.target import Target

CODE = max(each.version for each in migrations.known_migrations())


@pytest.fixture
def target(database_url: str, schema: str) -> Target:
    return Target.parse(database_url, schema=schema)


@pytest.fixture
def connection(target: Target) -> Iterator[Connection]:
    with target.connect("everbeat test") as connection:
        yield connection


def apply_later(connection: Connection, target: Target, *versions: tuple[int, int | None]) -> None:
    """Record migrations of later code: (version, oldest code)."""
    for version, oldest_code in versions:
        connection.execute(
            sql.SQL(
                "insert into {}.schema_versions (version, name, oldest_code) values (%s, 'later', %s)"
            ).format(sql.Identifier(target.schema)),
            [version, oldest_code],
        )


def test_the_status_names_the_version_the_code_and_the_oldest_supported_code(
    connection: Connection, target: Target
) -> None:
    absent = migrations.status(connection, target)
    assert (absent.version, absent.code, absent.oldest_code, absent.is_supported) == (None, CODE, None, False)
    migrating.migrate(connection, target)
    found = migrations.status(connection, target)
    newest = migrations.known_migrations()[-1]
    assert (found.version, found.oldest_code, found.is_supported) == (CODE, newest.oldest_code, True)
    assert found.summary == f"schema {target.schema!r} is at version {CODE}, as this everbeat needs it"


@pytest.mark.parametrize(
    "later",
    [
        [(CODE + 1, CODE)],
        [(CODE + 1, 11)],
        [(CODE + 1, CODE), (CODE + 2, CODE)],
        [(CODE + 1, CODE + 1), (CODE + 2, CODE)],
    ],
)
def test_a_newer_schema_that_supports_this_code_is_accepted_and_not_changed(  # J3
    connection: Connection, target: Target, later: list[tuple[int, int]]
) -> None:
    migrating.migrate(connection, target)
    apply_later(connection, target, *later)
    found = migrations.status(connection, target)
    migrations.require_fit(found, target)
    assert found.is_supported
    assert found.unknown == tuple(version for version, _ in later)
    assert f"version {later[-1][0]}, which supports this everbeat ({CODE})" in found.summary
    assert migrating.migrate(connection, target) == ()
    assert migrations.status(connection, target) == found


@pytest.mark.parametrize(
    "later", [[(CODE + 1, CODE + 1)], [(CODE + 1, CODE), (CODE + 2, CODE + 1)], [(CODE + 1, None)]]
)
def test_a_newer_schema_that_dropped_support_for_this_code_is_rejected(  # J3
    connection: Connection, target: Target, later: list[tuple[int, int | None]]
) -> None:
    migrating.migrate(connection, target)
    apply_later(connection, target, *later)
    found = migrations.status(connection, target)
    assert not found.is_supported
    for verb in (
        lambda: migrations.require_fit(found, target),
        lambda: migrating.migrate(connection, target),
    ):
        with pytest.raises(SchemaFromTheFuture) as refusal:
            verb()
        newest, oldest = later[-1]
        said = f"is at version {newest}; this everbeat knows up to {CODE}, and the schema works with {oldest or newest} or newer"
        assert said in refusal.value.message
        assert "upgrade everbeat" in str(refusal.value.fix)


def test_a_schema_of_version_10_without_an_oldest_code_is_outdated(  # J3
    connection: Connection, target: Target
) -> None:
    migrating.migrate(connection, target, to=10)
    found = migrations.status(connection, target)
    assert (found.version, found.oldest_code, found.is_too_new) == (10, None, False)
    with pytest.raises(SchemaOutdated, match=f"is at version 10; this everbeat needs {CODE}") as refusal:
        migrations.require_fit(found, target)
    fix = str(refusal.value.fix)
    assert fix.startswith("run 'everbeat migrate'.")
    assert "Running programs of version 10 continue, but processes of a version before 13 cannot start" in fix


def test_the_error_for_an_outdated_schema_names_older_programs_that_continue_to_work(  # J3
    connection: Connection, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrating.migrate(connection, target)
    later = migrations.Migration(CODE + 1, "later", (), CODE)
    known = (*migrations.known_migrations(), later)
    monkeypatch.setattr(migrations, "known_migrations", lambda: known)
    with pytest.raises(SchemaOutdated) as refusal:
        migrations.require_fit(migrations.status(connection, target), target)
    assert refusal.value.fix == f"run 'everbeat migrate'. Programs of version {CODE} continue to work."


def test_migrate_with_only_absent_leaves_an_older_schema_that_was_created_meanwhile(  # J3
    connection: Connection, target: Target
) -> None:
    with pytest.raises(SchemaMissing):
        migrations.require_fit(migrations.status(connection, target), target)
    migrating.migrate(connection, target, to=10)  # by another program
    assert migrating.migrate(connection, target, only_absent=True) == ()
    assert migrations.status(connection, target).version == 10
