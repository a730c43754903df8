"""Test that the first use creates a missing schema, and that only an explicit request upgrades an existing one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everbeat import App
from everbeat.errors import SchemaMissing, SchemaOutdated
from everbeat.store.migrations import known_migrations
from tests.conftest import NewServer

NEWEST = known_migrations()[-1].version
SENDER = """
import os
from everbeat import App

app = App(schema=os.environ["SCHEMA"])

@app.task
def work() -> None: ...

if __name__ == "__main__":
    print(work.send().id)
"""


def work() -> None: ...


def start(folder: Path, url: str, schema: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a real program in its own process."""
    program = folder / "program.py"
    if not program.exists():  # an earlier program might be reading it
        program.write_text(SENDER)
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | {"EVERBEAT_DATABASE_URL": url, "SCHEMA": schema},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("arguments", [["program.py"], ["-m", "everbeat", "worker", "program:app"]])
def test_a_program_with_newer_code_does_not_upgrade_a_schema_without_a_request(  # J3
    database_url: str, schema: str, tmp_path: Path, arguments: list[str]
) -> None:
    operator = App(database_url, schema=schema)
    operator.migrate(to=10)
    program = start(tmp_path, database_url, schema, *arguments)
    _, err = program.communicate(timeout=60)
    assert program.returncode != 0
    assert f"is at version 10; this everbeat needs {NEWEST}" in err
    assert "everbeat migrate" in err
    assert operator.schema_status().version == 10


def test_programs_that_create_the_absent_schema_at_the_same_moment_all_send(  # J3
    database_url: str, schema: str, tmp_path: Path
) -> None:
    programs = [start(tmp_path, database_url, schema, "program.py") for _ in range(3)]
    sent = [program.communicate(timeout=60) for program in programs]
    assert [program.returncode for program in programs] == [0, 0, 0], sent
    app = App(database_url, schema=schema)
    assert {str(task.id) for task in app.list_tasks()} == {out.strip() for out, _ in sent}
    assert app.schema_status().version == NEWEST


def test_the_first_use_creates_upgrades_or_refuses_the_schema_as_auto_migrate_says(
    database_url: str, schema: str
) -> None:  # J3
    with pytest.raises(SchemaMissing):
        App(database_url, schema=schema, auto_migrate=False).send_by_name("work")
    App(database_url, schema=schema).migrate(to=10)
    for refusing in (False, "create"):
        with pytest.raises(SchemaOutdated):
            App(database_url, schema=schema, auto_migrate=refusing).send_by_name("work")  # type: ignore[arg-type]
        refusing_app = App(database_url, schema=schema, auto_migrate=refusing)  # type: ignore[arg-type]
        refusing_app.task(work)
        with pytest.raises(SchemaOutdated):
            refusing_app.run_worker()
    upgrading = App(database_url, schema=schema, auto_migrate=True)
    upgrading.send_by_name("work")
    assert upgrading.schema_status().version == NEWEST
    for fitting in (False, "create", True):
        App(database_url, schema=schema, auto_migrate=fitting).send_by_name("work")  # type: ignore[arg-type]


def test_the_schema_of_an_embedded_server_is_upgraded_unless_auto_migrate_is_off(
    new_server: NewServer,
) -> None:  # J3
    url = f"embedded:{new_server().folder}"
    App(url).migrate(to=10)
    with pytest.raises(SchemaOutdated):
        App(url, auto_migrate=False).send_by_name("work")
    app = App(url)
    app.send_by_name("work")
    assert app.schema_status().version == NEWEST
    app.close()
