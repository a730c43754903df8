"""Test `everbeat migrate`, and `everbeat db` with a separate PostgreSQL."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from everbeat.cli.failures import ExitCode
from everbeat.embedded.server import EmbeddedServer
from tests.cli.conftest import Command


def test_migrate_creates_the_schema_once(everbeat: Command, schema: str) -> None:
    before = everbeat("migrate", "--status").assert_code(ExitCode.FAILED)
    assert "none" in before.out
    first = everbeat("migrate", "--json").assert_code(0).document
    assert first["applied_now"] == first["applied"] != []
    assert everbeat("migrate", "--json").assert_code(0).document["applied_now"] == []
    assert "up to date" in everbeat("migrate").assert_code(0).err
    status = everbeat("migrate", "--status", "--json").assert_code(0).document
    assert (status["schema"], status["pending"], status["unknown"]) == (schema, [], [])
    assert (status["version"], status["newest_known"]) == (first["applied"][-1], first["applied"][-1])
    assert (status["oldest_code"], status["supported"]) == (13, True)


def test_migrate_sql_prints_statements_that_can_be_run_by_hand(
    everbeat: Command, database_url: str, schema: str
) -> None:
    script = everbeat("migrate", "--sql", EVERBEAT_DATABASE_URL=None).assert_code(0).out
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(script.encode())
        made = connection.execute("select to_regclass(%s)", [f'"{schema}".tasks']).fetchone()
    assert made is not None
    assert made[0] is not None
    everbeat("migrate", "--status").assert_code(0)


def test_commands_refuse_a_schema_of_a_newer_everbeat(
    everbeat: Command, database_url: str, schema: str
) -> None:
    everbeat("migrate").assert_code(0)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            f"insert into {schema}.schema_versions (version, name) values (999, 'later')".encode()
        )
    assert "upgrade everbeat" in everbeat("tasks", "list").assert_code(ExitCode.DATABASE).err
    everbeat("migrate").assert_code(ExitCode.DATABASE)
    assert everbeat("migrate", "--status", "--json").assert_code(ExitCode.FAILED).document["unknown"] == [999]


def test_older_code_works_with_a_newer_schema_that_supports_it(  # J3
    everbeat: Command, database_url: str, schema: str
) -> None:
    known = everbeat("migrate", "--json").assert_code(0).document["newest_known"]
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            f"insert into {schema}.schema_versions (version, name, oldest_code) values ({known + 1}, 'later', {known})".encode()
        )
    ahead = f"is at version {known + 1}, which supports this everbeat ({known})"
    assert f"Nothing to do: schema {schema!r} {ahead}" in everbeat("migrate").assert_code(0).err
    status = everbeat("migrate", "--status", "--json").assert_code(0).document
    assert (status["version"], status["newest_known"], status["supported"]) == (known + 1, known, True)
    assert (status["unknown"], status["pending"]) == ([known + 1], [])
    assert f"this everbeat  {known}, supported" in everbeat("migrate", "--status").assert_code(0).out
    (found,) = [
        each
        for each in everbeat("doctor", "--json").assert_code(0).document["checks"]
        if each["code"] == "SCHEMA"
    ]
    assert found["verdict"] == "OK"
    assert ahead in found["text"]
    everbeat.write(
        "shop.py",
        f"from everbeat import App\napp = App(schema={schema!r})\n\n@app.task\ndef welcome() -> None: ...\n",
    )
    assert ahead in everbeat("check", "shop:app", "--live").err
    everbeat("send", "welcome").assert_code(0)
    assert "welcome" in everbeat("tasks", "list").assert_code(0).out


def test_migrate_refuses_an_invalid_schema_name(everbeat: Command) -> None:
    assert "pg_x" in everbeat("migrate", "--schema", "pg_x").assert_code(ExitCode.USAGE).err
    assert "pg_x" in everbeat("migrate", "--sql", "--schema", "pg_x").assert_code(ExitCode.USAGE).err


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder for a separate server, with a name short enough for its socket."""
    made = Path(tempfile.mkdtemp(prefix="eb-"))
    yield made
    EmbeddedServer.shut_down(made, mode="immediate")
    shutil.rmtree(made, ignore_errors=True)


def test_db_start_and_db_stop_run_an_embedded_server(everbeat: Command, folder: Path) -> None:
    def db(*arguments: str) -> tuple[str, ...]:
        return ("db", arguments[0], "--folder", str(folder), *arguments[1:])

    assert everbeat(*db("url")).assert_code(ExitCode.FAILED).err.count("everbeat db start") == 1
    assert everbeat(*db("status", "--json")).assert_code(ExitCode.FAILED).document["running"] is False

    url = everbeat(*db("start")).assert_code(0).out.strip()
    assert everbeat(*db("start")).assert_code(0).out.strip() == url
    assert everbeat(*db("url")).assert_code(0).out.strip() == url
    assert everbeat("migrate", "--url", url).assert_code(0).out == ""
    status = (
        everbeat(*db("status", "--json")).assert_code(0).document
    )  # its users have left, and the server still runs
    assert (status["running"], status["url"]) == (True, url)

    asked = everbeat(*db("psql", "--schema", "shop", "--", "-Atc", "show search_path")).assert_code(0)
    assert asked.out == "shop,public\n"
    assert (
        everbeat(*db("psql", "--", "-d", "template1", "-Atc", "select current_database()")).out
        == "template1\n"
    )
    assert everbeat(*db("psql", "--", "-c", "select 1 / 0", "-v", "ON_ERROR_STOP=1")).code == 1

    assert "Stopped" in everbeat(*db("stop")).assert_code(0).err
    assert "No PostgreSQL runs" in everbeat(*db("stop")).assert_code(0).err
    everbeat(*db("status")).assert_code(ExitCode.FAILED)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a place where nothing can be made, even by root")
def test_db_start_reports_a_folder_that_cannot_be_created(everbeat: Command) -> None:
    answer = everbeat("db", "start", "--folder", "/proc/nowhere/deep").assert_code(ExitCode.DATABASE)
    assert "The folder /proc/nowhere for the embedded PostgreSQL cannot be created" in answer.err


def test_commands_accept_an_embedded_database(everbeat: Command, folder: Path) -> None:
    environment = {"EVERBEAT_DATABASE_URL": "embedded", "EVERBEAT_EMBEDDED_DIR": str(folder)}
    everbeat("migrate", **environment).assert_code(0)
    assert everbeat("queues", "--json", **environment).assert_code(0).document == {"queues": []}
    assert (
        everbeat("db", "status", "--json", **environment).assert_code(ExitCode.FAILED).document["initialised"]
    )


@pytest.mark.parametrize(
    "words",
    [
        ["tasks", "list"],
        ["queues"],
        ["workers"],
        ["doctor"],
        ["recoveries"],
        ["migrate", "--status"],
        ["send", "welcome", "--queue", "mail"],
        ["tasks", "list", "--app", "shop:app"],
    ],
)
def test_read_commands_do_not_create_an_embedded_server(
    everbeat: Command, folder: Path, words: list[str]
) -> None:
    everbeat.write("shop.py", "from everbeat import App\napp = App()\n")
    nowhere = folder / "nowhere"
    environment = {"EVERBEAT_DATABASE_URL": "embedded", "EVERBEAT_EMBEDDED_DIR": str(nowhere)}
    answer = everbeat(*words, **environment).assert_code(ExitCode.DATABASE)
    assert f"There is no embedded PostgreSQL in {nowhere}" in answer.err
    assert "everbeat migrate" in answer.err
    assert not nowhere.exists()


def test_a_send_creates_the_embedded_server_of_a_program(everbeat: Command, folder: Path) -> None:
    everbeat.write(
        "shop.py", "from everbeat import App\napp = App()\n\n@app.task\ndef welcome() -> None: ...\n"
    )
    environment = {"EVERBEAT_DATABASE_URL": "embedded", "EVERBEAT_EMBEDDED_DIR": str(folder)}
    everbeat("send", "shop:app", "welcome", **environment).assert_code(0)
    assert "welcome" in everbeat("tasks", "list", "--app", "shop:app", **environment).assert_code(0).out
