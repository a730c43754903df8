"""The upgrade of a schema that is in use: it holds up no sender, goes on where it was killed, and one process does it."""

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
from everbeat.cli.examination import Examination
from everbeat.domain.diagnosis import Check, CheckCode, Verdict
from everbeat.store.schema_steps import LOCK_TIMEOUT_MS
from tests.cli.conftest import Command, everbeat, forks
from tests.client.conftest import app
from tests.store.conftest import Hands
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
    """One `everbeat migrate` of a later version, whose lines are read while it runs."""

    def __init__(self, code: Path, log: Path, hands: Hands, *options: str, url: str | None = None) -> None:
        target = hands.target
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
        """Wait until it has written this."""
        until(lambda: re.search(pattern, self.text) is not None, f"{pattern!r} in {self.text}")

    def ends(self, code: int) -> str:
        """Wait until it has ended with this code; return what it wrote."""
        assert self.process.wait(timeout=WITHIN_S) == code, self.text
        return self.text

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=WITHIN_S)


def until(condition: Callable[[], bool], what: str) -> None:
    give_up_at = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up_at, what
        time.sleep(0.02)  # looks from outside


@pytest.fixture
def migrator(hands: Hands, tmp_path: Path) -> Iterator[Callable[..., Migrator]]:
    """Starts migrators; those that still run are killed afterwards."""
    started: list[Migrator] = []

    def start(code: Path, *options: str, **more: Any) -> Migrator:
        log = tmp_path / f"migrator-{len(started)}.log"
        started.append(Migrator(code, log, hands, *options, **more))
        return started[-1]

    yield start
    for each in started:
        each.kill()


@contextmanager
def reading(hands: Hands, *, table: str = "tasks") -> Iterator[Connection[Any]]:
    """A transaction of somebody else that has read a table and stays open; commit it to let go."""
    with psycopg.connect(hands.target.url, application_name="report of sales") as reader:
        reader.execute(sql.SQL("select count(*) from {}").format(sql.Identifier(hands.target.schema, table)))
        yield reader


@contextmanager
def old_snapshot(hands: Hands) -> Iterator[Connection[Any]]:
    """A transaction of somebody else that locks no table of work: the build of an index waits for it at its end."""
    with psycopg.connect(hands.target.url, application_name="report of sales") as reader:
        reader.execute("set transaction isolation level repeatable read")
        reader.execute(hands.plain("select count(*) from {schema}.schema_versions"))
        yield reader


def steps(hands: Hands) -> list[str]:
    return [
        name
        for (name,) in hands.connection.execute(
            hands.plain("select name from {schema}.schema_steps order by name")
        )
    ]


def version(hands: Hands) -> int:
    row = hands.connection.execute(
        hands.plain("select max(version) from {schema}.schema_versions")
    ).fetchone()
    assert row is not None
    return int(row[0])


def index_of(hands: Hands, name: str = "tasks_by_synthetic") -> tuple[int, bool] | None:
    """The index by its oid, and whether it is valid."""
    return hands.connection.execute(  # type: ignore[return-value]
        "select i.indexrelid::bigint, i.indisvalid from pg_index i where i.indexrelid = to_regclass(%s)",
        [f'"{hands.target.schema}".{name}'],
    ).fetchone()


def code(folder: Path, *statements: Mapping[str, str]) -> Path:
    return next_version(folder / "later", {name: text for each in statements for name, text in each.items()})


def test_a_readers_open_transaction_delays_no_sender_while_an_upgrade_waits_for_it(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN)
    took: list[float] = []
    with reading(hands) as reader:
        pid, migration = reader.info.backend_pid, migrator(later)
        migration.says("waits for a lock on tasks, held by session report of sales")
        ends_at = time.monotonic() + 3
        while time.monotonic() < ends_at:
            began_at = time.monotonic()
            hands.send()
            took.append(time.monotonic() - began_at)
        assert migration.process.poll() is None
        assert version(hands) == before
        reader.commit()
        text = migration.ends(0)
    print(f"{len(took)} sends, the longest took {max(took):.2f} s")
    assert max(took) < LOCK_TIMEOUT_MS / 1_000 + 1, "a sender waited behind the upgrade"
    assert re.search(
        rf"held by session report of sales of role \S+ \(backend {pid}, idle in transaction\)",
        text,
    )
    assert "whose transaction began at 2" in text
    assert (version(hands), steps(hands)) == (before + 1, ["10_tasks_column"])


def test_an_upgrade_that_gets_no_lock_ends_with_its_holder_and_the_next_one_goes_on(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN, LATER)
    with reading(hands, table="workers") as reader:
        text = migrator(later, "--patience", "1500ms").ends(3)
        assert f"step 30_workers_column got no lock within 1.5s on {hands.target.schema}.workers." in text
        assert (
            f"report of sales of role {reader.info.user} (backend {reader.info.backend_pid}, idle in transaction)"
            in text
        )
        assert f"pg_terminate_backend({reader.info.backend_pid})" in text
    assert (version(hands), steps(hands)) == (before, ["10_tasks_column"])
    text = migrator(later).ends(0)
    assert "10_tasks_column" not in text
    assert (version(hands), steps(hands)) == (before + 1, ["10_tasks_column", "30_workers_column"])


def test_a_migration_killed_in_the_middle_of_an_index_builds_it_anew(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN, INDEX, LATER)
    with old_snapshot(hands):
        first = migrator(later)
        first.says("20_tasks_by_synthetic: waits for")
        first.kill()
        broken = index_of(hands)
        assert broken is not None
        assert broken[1] is False
        second = migrator(later)
        second.says(
            "drops the invalid index tasks_by_synthetic"
        )  # until then the build of the first one cannot end
    text = second.ends(0)
    assert "drops the invalid index tasks_by_synthetic of a build that did not finish" in text
    built = index_of(hands)
    assert built is not None
    assert built[1] is True
    assert built[0] != broken[0]
    assert (version(hands), steps(hands)) == (
        before + 1,
        ["10_tasks_column", "20_tasks_by_synthetic", "30_workers_column"],
    )


def test_an_index_whose_finished_build_was_not_recorded_is_accepted(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN, INDEX)
    migrator(later).ends(0)
    built = index_of(hands)
    hands.connection.execute(
        hands.plain("delete from {schema}.schema_steps where name = '20_tasks_by_synthetic'")
    )
    hands.connection.execute(
        hands.plain(
            "delete from {schema}.schema_versions where version = (select max(version) from {schema}.schema_versions)"
        )
    )
    migrator(later).ends(0)
    assert index_of(hands) == built
    assert built is not None
    assert (version(hands), steps(hands)) == (before + 1, ["10_tasks_column", "20_tasks_by_synthetic"])


def test_a_unique_index_that_cannot_be_built_names_the_duplicates_and_leaves_nothing_behind(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, UNIQUE)
    doubled = [hands.send(), hands.send()]
    text = migrator(later).ends(3)
    assert (
        "cannot build the unique index tasks_by_synthetic: Key (queue, name)=(default, work) is duplicated."
        in text
    )
    found = re.search(r"list the duplicates with '(select .+ > 1)' and remove them", text)
    assert found is not None
    assert hands.connection.execute(found[1].encode()).fetchall() == [("default", "work", 2)]
    assert index_of(hands) is None, "an invalid unique index refuses rows"
    hands.cancel(doubled[0])
    migrator(later).ends(0)
    assert (version(hands), (index_of(hands) or (0, False))[1]) == (before + 1, True)


def test_one_process_upgrades_while_others_wait_and_find_nothing_to_do(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN, INDEX, LATER)
    with old_snapshot(hands):
        first = migrator(later)
        first.says("20_tasks_by_synthetic: waits for")
        others = [migrator(later) for _ in range(2)]
        for each in others:
            each.says("Another migration is under way: session everbeat migrate of role")
    texts = [each.ends(0) for each in (first, *others)]
    assert [text.count("done in") for text in texts] == [3, 0, 0]
    assert (version(hands), len(steps(hands))) == (before + 1, 3)


def test_a_migrator_that_loses_its_session_has_lost_the_lock_and_does_no_further_step(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN, INDEX, LATER)
    with old_snapshot(hands) as reader:
        first = migrator(later)
        first.says("20_tasks_by_synthetic: waits for")
        second = migrator(later)
        second.says("Another migration is under way")
        first.process.send_signal(signal.SIGSTOP)
        hands.connection.execute(
            "select pg_terminate_backend(l.pid) from pg_locks l where l.locktype = 'advisory' and l.granted"
            " and (l.classid::bigint << 32 | l.objid::bigint) = %s",
            [hands.target.lock_key("migrations")],
        )
        second.says("20_tasks_by_synthetic: waits for")
        first.process.send_signal(signal.SIGCONT)
        reader.commit()
    second.ends(0)
    assert first.process.wait(timeout=WITHIN_S) in (0, 3)  # 3: its patience with the lost connection was over
    assert (first.text.count("done in"), second.text.count("done in")) == (1, 2)
    assert (version(hands), len(steps(hands))) == (before + 1, 3)


def test_no_time_limit_of_the_role_ends_the_build_of_an_index(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    limits = "-c statement_timeout=500 -c lock_timeout=300 -c idle_in_transaction_session_timeout=500"
    limited = psycopg.conninfo.make_conninfo(hands.target.url, options=limits)
    before, later = version(hands), code(tmp_path, COLUMN, INDEX)
    with old_snapshot(hands):
        migration = migrator(later, url=limited)
        migration.says("20_tasks_by_synthetic: waits for")
        time.sleep(1.5)  # three times as long as the limits: nothing may happen
        assert migration.process.poll() is None
    assert migration.ends(0).count("builds the index") == 1, "a limit ended the build, and it was begun again"
    assert (version(hands), (index_of(hands) or (0, False))[1]) == (before + 1, True)


def test_an_upgrade_that_ended_half_way_is_named_by_doctor_and_by_status_with_what_finishes_it(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator], app: App, everbeat: Command
) -> None:  # J3
    def found() -> Check:
        checks = Examination(app, long_transaction_s=300).checks()
        (check,) = [each for each in checks if each.code == CheckCode.UPGRADE]
        return check

    assert (found().verdict, found().text) == (
        Verdict.OK,
        "no upgrade of the schema is under way or unfinished",
    )
    later = code(tmp_path, COLUMN, INDEX)
    with old_snapshot(hands):
        migration = migrator(later)
        migration.says("20_tasks_by_synthetic: waits for")
        assert found().verdict is Verdict.OK
        assert "a migration is under way: session everbeat migrate of role" in found().text
        migration.kill()
        until(lambda: "under way" not in found().text, "the server ends the session of the killed migrator")
    newest = version(hands) + 1
    half, broken = (
        f"the upgrade to version {newest} is not whole: 1 of its steps are done",
        "the build of the index tasks_by_synthetic did not finish",
    )
    check = found()
    assert check.verdict is Verdict.WARN
    assert half in check.text
    assert broken in check.text
    assert (
        check.fix
        == "run 'everbeat migrate' of the newer everbeat that began it, which goes on after the last step."
    )
    document = everbeat("migrate", "--status", "--json").assert_code(0).document
    assert document["unfinished_steps"] == [{"version": newest, "name": "10_tasks_column"}]
    assert (document["invalid_indexes"], document["migrator"]) == (["tasks_by_synthetic"], None)
    shown = everbeat("migrate", "--status").assert_code(0)
    assert broken in shown.out
    assert "fix: run 'everbeat migrate'" in shown.err
    hands.connection.execute(hands.plain("delete from {schema}.schema_steps"))
    assert found().fix is not None
    rebuild = str(found().fix).partition("rebuild it: ")[2]
    hands.connection.execute(rebuild.encode())
    assert found().verdict is Verdict.OK


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_frozen_migrator_loses_the_lock_after_a_minute_and_does_nothing_more(
    hands: Hands, tmp_path: Path, migrator: Callable[..., Migrator]
) -> None:  # J3
    before, later = version(hands), code(tmp_path, COLUMN, INDEX, LATER)
    with reading(hands) as reader:
        first = migrator(later)
        first.says("waits for a lock on tasks")
        time.sleep(
            LOCK_TIMEOUT_MS / 1_000
        )  # now it rests between two tries, or soon will: frozen, its session is idle
        first.process.send_signal(signal.SIGSTOP)
        reader.commit()
    second = migrator(later)
    second.says("Another migration is under way")
    began_at = time.monotonic()
    assert second.process.wait(timeout=90) == 0
    print(f"the second one went on after {time.monotonic() - began_at:.0f} s")
    first.process.send_signal(signal.SIGCONT)
    assert "terminating connection due to idle-session timeout" in first.ends(3)
    assert (version(hands), len(steps(hands))) == (before + 1, 3)
