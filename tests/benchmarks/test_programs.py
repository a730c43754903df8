"""Programs of other environments are isolated, ended in time, and given a database that exists only while they run."""

from __future__ import annotations

import sys
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from psycopg import conninfo

from benchmarks.programs import ProgramFailed, own_database, run
from everbeat.bench.environment import wait_until


def exists(url: str, name: str) -> bool:
    with psycopg.connect(url) as connection:
        return connection.execute("select from pg_database where datname = %s", [name]).fetchone() is not None


def test_an_own_database_is_empty_and_dropped_despite_open_sessions(database_url: str) -> None:
    name = f"own database {uuid4().hex[:8]}"
    with own_database(database_url, name) as url:
        connection = psycopg.connect(url)
        found = connection.execute(
            "select current_database(), count(*) from pg_tables where schemaname = 'public'"
        )
        assert found.fetchone() == (name, 0)
    assert not exists(database_url, name)
    with pytest.raises(psycopg.OperationalError):
        connection.execute("select 1")
    connection.close()


def test_an_own_database_is_dropped_after_a_failure(database_url: str) -> None:
    name = f"own_{uuid4().hex[:8]}"
    with pytest.raises(ZeroDivisionError), own_database(database_url, name):
        raise ZeroDivisionError
    assert not exists(database_url, name)


def test_an_existing_database_is_refused_and_kept(database_url: str) -> None:
    name = f"own_{uuid4().hex[:8]}"
    with own_database(database_url, name):
        with pytest.raises(ProgramFailed, match=name), own_database(database_url, name):
            pytest.fail("it used another database")
        assert exists(database_url, name)


def test_a_role_without_createdb_gets_a_fix_that_names_the_right(database_url: str) -> None:
    role = f"poor_{uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"create role {role} login")
        try:
            poor_url = conninfo.make_conninfo(database_url, user=role)
            with pytest.raises(ProgramFailed) as raised, own_database(poor_url, "never_made"):
                pytest.fail("it was created")
        finally:
            connection.execute(f"drop role {role}")
    assert raised.value.fix == f'let the role create databases: ALTER ROLE "{role}" CREATEDB.'


def has_ended(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return status.rpartition(")")[2].split()[0] == "Z"


def test_the_output_of_a_failed_program_is_quoted(tmp_path: Path) -> None:
    with pytest.raises(ProgramFailed, match=r"exited with code 3(.|\n)*no such package"):
        run(
            [sys.executable, "-c", "import sys; print('no such package', file=sys.stderr); sys.exit(3)"],
            folder=tmp_path,
            within_s=30,
        )


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    # It sleeps for longer than the test waits: it must be killed.
    child = "import os, time; open('pid', 'w').write(str(os.getpid())); os.replace('pid', 'child'); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with pytest.raises(ProgramFailed, match="did not finish within 5 s"):
        run([sys.executable, "-c", code], folder=tmp_path, within_s=5)
    pid = int((tmp_path / "child").read_text())
    assert wait_until(lambda: has_ended(pid), within_s=10, what="the child's end")


def test_a_program_does_not_see_the_packages_and_settings_of_this_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "here")
    monkeypatch.setenv("EVERBEAT_DATABASE_URL", "here")
    code = "import os; print([os.environ.get(name) for name in ('PYTHONPATH', 'EVERBEAT_DATABASE_URL', 'GIVEN')])"
    written = run([sys.executable, "-c", code], folder=tmp_path, within_s=30, variables={"GIVEN": "there"})
    assert written.strip() == "[None, None, 'there']"
