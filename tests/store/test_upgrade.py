"""The upgrade of a schema in use: it does not block senders, continues after a kill, and runs in one process at a time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import Connection, sql

from everbeat import App
from everbeat.domain.doctor.findings import Check, CheckCode, CheckVerdict
from everbeat.examination import Examination
from everbeat.store.migrations import LOCK_TIMEOUT_MS
from tests.cli.conftest import Command, everbeat, forks
from tests.client.conftest import app
from tests.store.conftest import StoreHarness
from tests.synthetic_version import next_version

__all__ = ["app", "everbeat", "forks"]

COLUMN = {"10_tasks_column": "-- A column.\nalter table {schema}.tasks add column synthetic integer"}
INDEX = {
    "20_tasks_by_synthetic": "-- An index.\ncreate index {concurrently} tasks_by_synthetic on {schema}.tasks (synthetic, id)"
}
LATER = {"30_workers_column": "-- A column.\nalter table {schema}.workers add column synthetic integer"}
UNIQUE = {
    "20_tasks_by_synthetic": "-- A unique index.\ncreate unique index {concurrently} tasks_by_synthetic on {schema}.tasks (queue, name)"
    " where state = 'PENDING'"
}
WITHIN_S = 30.0


class Migrator:
    """One `everbeat migrate` of a later version, whose output is read while it runs."""

    def __init__(
        self, code: Path, log: Path, db: StoreHarness, *options: str, url: str | None = None
    ) -> None:
        target = db.target
        self._log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "everbeat", "migrate", "--url", url or target.url, "--schema", target.schema, *options],
                env=os.environ | {"PYTHONPATH": str(code)}, stdout=subprocess.DEVNULL, stderr=output,
            )  # fmt: skip

    @property
    def text(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def says(self, pattern: str) -> None:
        """Wait until the output matches this pattern."""
        until(lambda: re.search(pattern, self.text) is not None, f"{pattern!r} in {self.text}")

    def ends(self, code: int) -> str:
        """Wait until the process has ended with this code; return its output."""
        assert self.process.wait(timeout=WITHIN_S) == code, self.text
        return self.text

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=WITHIN_S)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)  # polls from outside


@pytest.fixture
def migrator(db: StoreHarness, tmp_path: Path) -> Iterator[Callable[..., Migrator]]:
    """Return a function that starts migrators; those that still run are killed afterwards."""
    started: list[Migrator] = []

    def start(code: Path, *options: str, **more: Any) -> Migrator:
        log = tmp_path / f"migrator-{len(started)}.log"
        started.append(Migrator(code, log, db, *options, **more))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@contextmanager
def reading(db: StoreHarness, *, table: str = "tasks") -> Iterator[Connection[Any]]:
    """Keep a transaction open that has read a table; commit it to release the lock."""
    with psycopg.connect(db.target.url, application_name="report of sales") as reader:
        reader.execute(sql.SQL("select count(*) from {}").format(sql.Identifier(db.target.schema, table)))
        yield reader


@contextmanager
def old_snapshot(db: StoreHarness) -> Iterator[Connection[Any]]:
    """Keep a transaction open that locks no table of tasks; the build of an index waits for it at its end."""
    with psycopg.connect(db.target.url, application_name="report of sales") as reader:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute(db.plain("select count(*) from {schema}.schema_versions"))
        yield reader


def steps(db: StoreHarness) -> list[str]:
    return [
        name
        for (name,) in db.connection.execute(db.plain("select name from {schema}.schema_steps order by name"))
    ]


def version(db: StoreHarness) -> int:
    row = db.connection.execute(db.plain("select max(version) from {schema}.schema_versions")).fetchone()
    assert row is not None
    return int(row[0])


def index_of(db: StoreHarness, name: str = "tasks_by_synthetic") -> tuple[int, bool] | None:
    """Return the oid of the index, and whether it is valid."""
    return db.connection.execute(  # type: ignore[return-value]
        "select i.indexrelid::bigint, i.indisvalid from pg_index i where i.indexrelid = to_regclass(%s)",
        [f'"{db.target.schema}".{name}'],
    ).fetchone()


def code(folder: Path, *statements: Mapping[str, str]) -> Path:
    return next_version(folder / "later", {name: text for each in statements for name, text in each.items()})


@pytest.mark.long
def test_an_upgrade_that_waits_for_an_open_transaction_delays_no_sender(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN)
    took: list[float] = []
    with reading(db) as reader:
        pid, migration = reader.info.backend_pid, migrator(later)
        migration.says("waits for a lock on tasks, held by session report of sales")
        ends_at = time.monotonic() + 3
        while time.monotonic() < ends_at:
            began_at = time.monotonic()
            db.send()
            took.append(time.monotonic() - began_at)
        assert migration.process.poll() is None
        assert version(db) == before
        reader.commit()
        text = migration.ends(0)
    print(f"{len(took)} sends, the longest took {max(took):.2f} s")
    assert max(took) < LOCK_TIMEOUT_MS / 1_000 + 1, "a sender waited behind the upgrade"
    assert re.search(
        rf"held by session report of sales of role \S+ \(backend {pid}, idle in transaction\)",
        text,
    )
    assert "whose transaction began at 2" in text
    assert (version(db), steps(db)) == (before + 1, ["10_tasks_column"])


def test_an_upgrade_that_gets_no_lock_names_the_holder_and_the_next_run_continues(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN, LATER)
    with reading(db, table="workers") as reader:
        text = migrator(later, "--patience", "1500ms").ends(3)
        assert (
            f"step 30_workers_column could not acquire its lock within 1.5s on {db.target.schema}.workers."
            in text
        )
        assert (
            f"report of sales of role {reader.info.user} (backend {reader.info.backend_pid}, idle in transaction)"
            in text
        )
        assert f"pg_terminate_backend({reader.info.backend_pid})" in text
    assert (version(db), steps(db)) == (before, ["10_tasks_column"])
    text = migrator(later).ends(0)
    assert "10_tasks_column" not in text
    assert (version(db), steps(db)) == (before + 1, ["10_tasks_column", "30_workers_column"])


def test_an_upgrade_that_was_killed_during_an_index_build_rebuilds_the_index(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN, INDEX, LATER)
    with old_snapshot(db):
        first = migrator(later)
        first.says("20_tasks_by_synthetic: waits for")
        first.kill()
        broken = index_of(db)
        assert broken is not None
        assert broken[1] is False
        second = migrator(later)
        second.says(
            "dropping the invalid index tasks_by_synthetic"
        )  # the build of the first one cannot end before that
    text = second.ends(0)
    assert "dropping the invalid index tasks_by_synthetic, which an unfinished build left behind" in text
    built = index_of(db)
    assert built is not None
    assert built[1] is True
    assert built[0] != broken[0]
    assert (version(db), steps(db)) == (
        before + 1,
        ["10_tasks_column", "20_tasks_by_synthetic", "30_workers_column"],
    )


@pytest.mark.long
def test_an_index_whose_finished_build_was_not_recorded_is_accepted(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN, INDEX)
    migrator(later).ends(0)
    built = index_of(db)
    db.connection.execute(db.plain("delete from {schema}.schema_steps where name = '20_tasks_by_synthetic'"))
    db.connection.execute(
        db.plain(
            "delete from {schema}.schema_versions where version = (select max(version) from {schema}.schema_versions)"
        )
    )
    migrator(later).ends(0)
    assert index_of(db) == built
    assert built is not None
    assert (version(db), steps(db)) == (before + 1, ["10_tasks_column", "20_tasks_by_synthetic"])


def test_a_unique_index_that_cannot_be_built_names_the_duplicates_and_leaves_nothing_behind(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, UNIQUE)
    doubled = [db.send(), db.send()]
    text = migrator(later).ends(3)
    assert (
        "cannot build the unique index tasks_by_synthetic: Key (queue, name)=(default, work) is duplicated."
        in text
    )
    found = re.search(r"run '(select .+ > 1)' to list the duplicates, remove them", text)
    assert found is not None
    assert db.connection.execute(found[1].encode()).fetchall() == [("default", "work", 2)]
    assert index_of(db) is None, "an invalid unique index rejects rows"
    db.cancel(doubled[0])
    migrator(later).ends(0)
    assert (version(db), (index_of(db) or (0, False))[1]) == (before + 1, True)


def test_one_process_upgrades_while_others_wait(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN, INDEX, LATER)
    with old_snapshot(db):
        first = migrator(later)
        first.says("20_tasks_by_synthetic: waits for")
        others = [migrator(later) for _ in range(2)]
        for each in others:
            each.says("Another migration is in progress: session everbeat migrate of role")
    texts = [each.ends(0) for each in (first, *others)]
    assert [text.count("done in") for text in texts] == [3, 0, 0]
    assert (version(db), len(steps(db))) == (before + 1, 3)


def test_a_migrator_that_loses_its_session_loses_the_lock_and_stops(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN, INDEX, LATER)
    with old_snapshot(db) as reader:
        first = migrator(later)
        first.says("20_tasks_by_synthetic: waits for")
        second = migrator(later)
        second.says("Another migration is in progress")
        first.process.send_signal(signal.SIGSTOP)
        db.connection.execute(
            "select pg_terminate_backend(l.pid) from pg_locks l where l.locktype = 'advisory' and l.granted"
            " and (l.classid::bigint << 32 | l.objid::bigint) = %s",
            [db.target.lock_key("migrations")],
        )
        second.says("20_tasks_by_synthetic: waits for")
        first.process.send_signal(signal.SIGCONT)
        reader.commit()
    second.ends(0)
    assert first.process.wait(timeout=WITHIN_S) in (0, 3)  # 3: its patience with the lost connection was over
    assert (first.text.count("done in"), second.text.count("done in")) == (1, 2)
    assert (version(db), len(steps(db))) == (before + 1, 3)


@pytest.mark.long
def test_time_limits_of_the_role_do_not_end_the_build_of_an_index(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    limits = "-c statement_timeout=500 -c lock_timeout=300 -c idle_in_transaction_session_timeout=500"
    limited = psycopg.conninfo.make_conninfo(db.target.url, options=limits)
    before, later = version(db), code(tmp_path, COLUMN, INDEX)
    with old_snapshot(db):
        migration = migrator(later, url=limited)
        migration.says("20_tasks_by_synthetic: waits for")
        time.sleep(1.5)  # three times as long as the limits: the build must continue
        assert migration.process.poll() is None
    assert migration.ends(0).count("builds the index") == 1, (
        "a limit ended the build, and it was started again"
    )
    assert (version(db), (index_of(db) or (0, False))[1]) == (before + 1, True)


def test_the_doctor_and_the_status_name_an_incomplete_upgrade_and_its_fix(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator], app: App, everbeat: Command
) -> None:  # J3
    def found() -> Check:
        checks = Examination(app, long_transaction_s=300).checks()
        (check,) = [each for each in checks if each.code == CheckCode.UPGRADE]
        return check

    assert (found().verdict, found().text) == (
        CheckVerdict.OK,
        "no upgrade of the schema is in progress or incomplete",
    )
    later = code(tmp_path, COLUMN, INDEX)
    with old_snapshot(db):
        migration = migrator(later)
        migration.says("20_tasks_by_synthetic: waits for")
        assert found().verdict is CheckVerdict.OK
        assert "a migration is in progress: session everbeat migrate of role" in found().text
        migration.kill()
        until(lambda: "in progress" not in found().text, "the server ends the session of the killed migrator")
    newest = version(db) + 1
    half, broken = (
        f"the upgrade to version {newest} is incomplete: 1 of its steps are done",
        "the build of the index tasks_by_synthetic did not finish",
    )
    check = found()
    assert check.verdict is CheckVerdict.WARN
    assert half in check.text
    assert broken in check.text
    assert (
        check.fix
        == "run 'everbeat migrate' of the newer everbeat that started it, which continues after the last step."
    )
    document = everbeat("migrate", "--status", "--json").assert_code(0).document
    assert document["unfinished_steps"] == [{"version": newest, "name": "10_tasks_column"}]
    assert (document["invalid_indexes"], document["migrator"]) == (["tasks_by_synthetic"], None)
    shown = everbeat("migrate", "--status").assert_code(0)
    assert broken in shown.out
    assert "fix: run 'everbeat migrate'" in shown.err
    db.connection.execute(db.plain("delete from {schema}.schema_steps"))
    assert found().fix is not None
    rebuild = str(found().fix).partition("rebuild the index: ")[2]
    db.connection.execute(rebuild.encode())
    assert found().verdict is CheckVerdict.OK


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_frozen_migrator_loses_the_lock_after_a_minute_and_stops(
    db: StoreHarness, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(db), code(tmp_path, COLUMN, INDEX, LATER)
    with reading(db) as reader:
        first = migrator(later)
        first.says("waits for a lock on tasks")
        # The migrator pauses between two tries now or soon; frozen then, its session is idle.
        time.sleep(LOCK_TIMEOUT_MS / 1_000)
        first.process.send_signal(signal.SIGSTOP)
        reader.commit()
    second = migrator(later)
    second.says("Another migration is in progress")
    began_at = time.monotonic()
    assert second.process.wait(timeout=90) == 0
    print(f"the second one went on after {time.monotonic() - began_at:.0f} s")
    first.process.send_signal(signal.SIGCONT)
    assert "terminating connection due to idle-session timeout" in first.ends(3)
    assert (version(db), len(steps(db))) == (before + 1, 3)
