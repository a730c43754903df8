"""After an outage of the whole way to the database, every process works again without a restart, and each task has run once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import psycopg
import pytest
from psycopg import conninfo, sql

from everbeat import Handle
from everbeat.errors import DatabaseUnreachable
from everbeat.store.embedded import EmbeddedServer
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.nats_server import free_port
from tests.stories.pooler import pooler_before
from tests.stories.stage import FAST, SLACK, Stage, Tree, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

THRESHOLD_S = FAST["running_stale_threshold_ms"] / 1_000
HELD = 8
ROLE = "everbeat_app"


class Crew:
    """Two trees with tasks that wait for a gate."""

    def __init__(self, stage: Stage, deeds: ModuleType) -> None:
        self.stage = stage
        self.deeds = deeds
        self.trees = [stage.start_tree(recovery=FAST) for _ in range(2)]
        for tree in self.trees:
            stage.until(lambda tree=tree: stage.workers(tree), within=30, what="a ready tree", tree=tree)  # type: ignore[misc]
        self.pids = self._pids()
        self.held = [deeds.wait_for.send("go") for _ in range(HELD)]
        stage.until(lambda: len(stage.effects("start")) == HELD, within=20, what="all run")
        self.numbers = [
            deeds.quick.send(n).result(timeout=20) for n in range(2)
        ]  # the sender waits by LISTEN

    def is_whole_again(self) -> None:
        """Nothing was lost, doubled, recovered or restarted, and new work is done at once."""
        began = time.monotonic()
        later = [self.deeds.quick.send(n) for n in range(20)]
        assert [each.result(timeout=10 * SLACK) for each in later] == [*range(20)]
        print(f"20 tasks: {time.monotonic() - began:.2f} s after the database's return")
        self.stage.open_gate("go")
        assert [each.result(timeout=10 * SLACK) for each in self.held] == ["done"] * HELD
        for each in (*self.held, *later):
            assert len(self.stage.effects("start", each.id)) == 1
            *before, last = (attempt["outcome"] for attempt in self.stage.attempts(each.id))
            assert last == "COMPLETED"
            assert set(before) <= {"RELEASED"}, (
                "a start whose worker was cut off goes back before its code runs"
            )
        assert self.stage.states() == {"COMPLETED": len(self.held) + len(later) + len(self.numbers)}
        assert self.stage.recoveries() == []
        assert self._pids() == self.pids

    def _pids(self) -> list[list[int]]:
        return [[tree.pid, *sorted(row["pid"] for row in self.stage.workers(tree))] for tree in self.trees]


def noticed(trees: list[Tree]) -> bool:
    return all("database_unreachable" in tree.output() for tree in trees)


# A rotated password.


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return server_with_a_password(new_server)


def server_with_a_password(new_server: NewServer) -> EmbeddedServer:
    """A server that asks one role for a password."""
    server = new_server()
    with psycopg.connect(server.url, autocommit=True) as admin:
        row = admin.execute("show hba_file").fetchone()
        assert row is not None
        file = Path(row[0])
        file.write_text(f"local all {ROLE} scram-sha-256\n{file.read_text()}")
        admin.execute(sql.SQL("create role {} login").format(sql.Identifier(ROLE)))
        admin.execute(sql.SQL("grant create on database postgres to {}").format(sql.Identifier(ROLE)))
        admin.execute("select pg_reload_conf()")
    return server


def set_password(server: EmbeddedServer, password: str) -> None:
    with psycopg.connect(server.url, autocommit=True) as admin:
        statement = sql.SQL("alter role {} password {}")
        admin.execute(statement.format(sql.Identifier(ROLE), sql.Literal(password)))


def cut_sessions(server: EmbeddedServer, *, but: int) -> None:
    """Every session of the role ends, so that each process must log in again."""
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s and pid <> %s",
            [ROLE, but],
        )


def send_patiently(deeds: ModuleType, number: int) -> Handle[int]:
    with deeds.app.patience("60s"):
        handle: Handle[int] = deeds.quick.send(number)
        return handle


@pytest.mark.parametrize("place", ["a password file", "the URL"])
def test_workers_outlast_a_rotated_password(
    server: EmbeddedServer, tmp_path: Path, place: str
) -> None:  # J11
    set_password(server, "first")
    url = conninfo.make_conninfo(server.url, user=ROLE)
    passwords = tmp_path / "pgpass"
    if place == "the URL":
        url = conninfo.make_conninfo(url, password="first")
    else:
        passwords.write_text(f"*:*:*:{ROLE}:first\n")
        passwords.chmod(0o600)
        url = conninfo.make_conninfo(url, passfile=str(passwords))
    with ExitStack() as end:
        stage = Stage(url, "story", tmp_path)
        end.callback(lambda: stage.close(check=False))
        deeds = end.enter_context(program_of(stage))
        crew = Crew(stage, deeds)
        set_password(server, "second")
        assert deeds.quick.send(7).result(timeout=10) == 7, "open sessions go on"
        crew.numbers.append(7)
        cut_sessions(server, but=stage.connection.info.backend_pid)
        stage.until(lambda: noticed(crew.trees), within=20, what="both trees are refused")
        with deeds.app.patience("500ms"), pytest.raises(DatabaseUnreachable, match="password"):
            deeds.quick.send(8)
        patient = end.enter_context(ThreadPoolExecutor(1)).submit(send_patiently, deeds, 9)
        time.sleep(3 * THRESHOLD_S)  # the outage
        assert stage.recoveries() == []
        if place == "the URL":
            set_password(server, "first")
        else:
            passwords.write_text(f"*:*:*:{ROLE}:second\n")
        assert patient.result(timeout=60).result(timeout=60) == 9, "a send that began in the outage"
        crew.numbers.append(9)
        crew.is_whole_again()


# A restart of PgBouncer.


@pytest.mark.parametrize("mode", ["transaction", pytest.param("session", marks=pytest.mark.long)])
def test_a_restart_of_the_pooler_is_survived(new_server: NewServer, tmp_path: Path, mode: str) -> None:  # J11
    server = new_server(tcp_port=free_port())
    with ExitStack() as end:
        pooler = end.enter_context(pooler_before(server.tcp_url, mode=mode))
        stage = Stage(server.tcp_url, "story", tmp_path)
        end.callback(lambda: stage.close(check=False))
        stage.url = f"{pooler.url}?pooler={mode}"
        deeds = end.enter_context(program_of(stage))
        crew = Crew(stage, deeds)
        pooler.kill()
        pooler.start()
        assert deeds.quick.send(7).result(timeout=4 * SLACK) == 7, "after a restart without a pause"
        crew.numbers.append(7)
        pooler.kill()
        stage.until(lambda: noticed(crew.trees), within=20, what="both trees notice")
        with deeds.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
            deeds.quick.send(8)
        time.sleep(3 * THRESHOLD_S)  # the outage
        pooler.start()
        crew.is_whole_again()


# A restart of PostgreSQL.


def test_a_restart_of_the_server_is_survived_by_every_process(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11, E7
    server = new_server(settings={"fsync": "on", "synchronous_commit": "on"})
    with ExitStack() as end:
        stage = Stage(server.url, "story", tmp_path)
        end.callback(lambda: stage.close(check=False))
        deeds = end.enter_context(program_of(stage))
        crew = Crew(stage, deeds)
        server.restart("fast")
        again(stage, server.url)
        assert deeds.quick.send(7).result(timeout=4 * SLACK) == 7, "after a restart without a pause"
        crew.numbers.append(7)
        server.stop("immediate")
        stage.until(lambda: noticed(crew.trees), within=20, what="both trees notice")
        with deeds.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
            deeds.quick.send(8)
        server.restart("immediate")
        again(stage, server.url)
        crew.is_whole_again()


# Strangers take every connection.


def test_exhausted_connections_are_survived_by_every_process(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11
    server = new_server(settings={"max_connections": "30", "superuser_reserved_connections": "0"})
    with ExitStack() as end:
        stage = Stage(server.url, "story", tmp_path)
        end.callback(lambda: stage.close(check=False))
        deeds = end.enter_context(program_of(stage))
        crew = Crew(stage, deeds)
        strangers = end.enter_context(ExitStack())
        take_every_connection(stage, strangers)
        stage.until(lambda: noticed(crew.trees), within=20, what="both trees are refused")
        with deeds.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
            deeds.quick.send(8)
        time.sleep(2 * THRESHOLD_S)  # the shortage
        assert stage.recoveries() == []
        strangers.close()
        crew.is_whole_again()


def take_every_connection(stage: Stage, strangers: ExitStack) -> None:
    """All sessions but those of strangers and of the stage end, until the strangers have every place."""
    while True:
        try:
            strangers.enter_context(psycopg.connect(stage.url, application_name="stranger"))
        except psycopg.OperationalError:
            left = stage.query(
                """select pg_terminate_backend(pid) from pg_stat_activity
                   where backend_type = 'client backend' and application_name <> 'stranger' and pid <> pg_backend_pid()"""
            )
            if not left:
                return


# A long outage of the server.


@pytest.mark.long  # 60 thresholds are two minutes; up to 10 are in test_the_database_goes_away.py
@pytest.mark.timeout(600)
def test_an_outage_of_60_thresholds_loses_and_doubles_nothing(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11
    server = new_server(settings={"fsync": "on", "synchronous_commit": "on"})
    with ExitStack() as end:
        stage = Stage(server.url, "story", tmp_path)
        end.callback(lambda: stage.close(check=False))
        deeds = end.enter_context(program_of(stage))
        crew = Crew(stage, deeds)
        server.stop("immediate")
        give_up_at = time.monotonic() + 60 * THRESHOLD_S
        while time.monotonic() < give_up_at:
            with deeds.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
                deeds.quick.send(8)
            time.sleep(0.5)  # a producer that goes on trying
        server.restart("immediate")
        again(stage, server.url)
        crew.is_whole_again()


def again(stage: Stage, url: str) -> None:
    """The stage's own connection was lost with the server."""
    rows = stage.connection.row_factory
    stage.connection.close()
    stage.connection = Target.parse(url, schema=stage.schema).connect("everbeat story")
    stage.connection.row_factory = rows
