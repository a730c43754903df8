"""`everbeat migrate --sql --from N` and every other way to the newest version create the same schema."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from psycopg import sql

from everbeat.embedded.server import EmbeddedServer
from everbeat.store import migrating, migrations
from everbeat.store.migrations import known_migrations
from everbeat.store.target import Target
from tests.cli.conftest import Command, everbeat, forks
from tests.variants import every_nth_quick

__all__ = ["everbeat", "forks"]

NEWEST = known_migrations()[-1].version
HALVES = [1, NEWEST // 2, NEWEST - 1]


@pytest.fixture
def target(database_url: str, schema: str) -> Target:
    return Target.parse(database_url, schema=schema)


def run_by_psql(postgres: EmbeddedServer, text: str, folder: Path) -> None:
    file = folder / "upgrade.sql"
    file.write_text(text, encoding="utf-8")
    subprocess.run(
        [str(EmbeddedServer.psql_binary()), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", str(file)],
        env=os.environ | postgres.psql_environment(), check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip


def dump(postgres: EmbeddedServer, schema: str) -> str:
    """Return the catalogue of a schema as pg_dump writes it, without its name."""
    binary = EmbeddedServer.psql_binary().with_name("pg_dump")
    done = subprocess.run(
        [str(binary), "--schema-only", "--no-owner", "--schema", schema], env=os.environ | postgres.psql_environment(),
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert "CREATE TABLE" in done.stdout
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("--", "\\"))]
    return "\n".join(lines).replace(schema, "SCHEMA")


def rows(target: Target, text: str) -> list[tuple[object, ...]]:
    with target.connect("everbeat test") as connection:
        return connection.execute(sql.SQL(text).format(schema=sql.Identifier(target.schema))).fetchall()  # type: ignore[arg-type]


VERSIONS = "select version, name, oldest_code from {schema}.schema_versions order by 1"
STEPS = "select version, name from {schema}.schema_steps order by 1, 2"


@pytest.mark.parametrize("since", every_nth_quick(2, HALVES))
def test_the_printed_steps_run_by_psql_create_the_same_schema_as_migrate(
    target: Target, postgres: EmbeddedServer, tmp_path: Path, since: int
) -> None:  # J3
    other = Target.parse(target.url, schema=f"{target.schema}_b")
    for each in (target, other):
        with each.connect("everbeat test") as connection:
            migrating.migrate(connection, each, to=since)
    run_by_psql(postgres, migrations.script(target.schema, since=since), tmp_path)
    with other.connect("everbeat test") as connection:
        try:
            migrating.migrate(connection, other)
            made = dump(postgres, other.schema), rows(other, VERSIONS), rows(other, STEPS)
        finally:
            migrating.drop(connection, other)
    assert (dump(postgres, target.schema), rows(target, VERSIONS), rows(target, STEPS)) == made


def test_an_upgraded_schema_equals_a_created_one(target: Target, postgres: EmbeddedServer) -> None:  # J3
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        created = dump(postgres, target.schema)
        migrating.drop(connection, target)
        for version in range(1, NEWEST + 1):
            assert migrating.migrate(connection, target, to=version) == (version,)
    assert dump(postgres, target.schema) == created


@pytest.mark.long
def test_the_printed_steps_begin_after_the_version_and_mark_steps_outside_transactions(
    everbeat: Command,
) -> None:  # J3
    def printed(*options: str) -> str:
        return everbeat("migrate", "--sql", *options, EVERBEAT_DATABASE_URL=None).assert_code(0).out

    text = printed("--from", "10")
    assert re.findall(r"-- Migration (\d+)", text) == [str(version) for version in range(11, NEWEST + 1)]
    for part in text.split("\n\n"):
        assert ("concurrently " in part) is ("must not be in a transaction.\n" in part)
        assert ("begin;\n" in part) is ("set local lock_timeout" in part)
    nothing = printed("--from", str(NEWEST))
    assert nothing.strip().startswith("-- ")
    assert nothing.count("\n") <= 2
    assert printed("--from", "0") == printed()
    assert "concurrently" not in printed()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--sql", "--from", "99"], "99: this everbeat does not know version 99"),
        (["--status", "--from", "10"], "--status and --from exclude each other"),
        (["--from", "10"], "--from needs --sql"),
        (["--patience", "3x"], "--patience"),
        (["--patience", "0s"], "--patience"),
    ],
)
def test_contradictory_options_of_migrate_are_rejected_by_name(
    everbeat: Command, options: list[str], says: str
) -> None:  # J3
    assert says in everbeat("migrate", *options).assert_code(2).err


def test_the_printed_steps_fail_beside_a_running_migration(
    target: Target, postgres: EmbeddedServer, tmp_path: Path
) -> None:  # J3
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target, to=NEWEST - 1)
        connection.execute("select pg_advisory_lock(%s)", [target.lock_key("migrations")])
        with pytest.raises(subprocess.CalledProcessError):
            run_by_psql(postgres, migrations.script(target.schema, since=NEWEST - 1), tmp_path)
    assert rows(target, STEPS) == []
