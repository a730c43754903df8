"""After an outage between the processes and the database, every process works again without a restart, and each task has run once."""

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
from everbeat.embedded.server import EmbeddedServer
from everbeat.errors import DatabaseUnreachable
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.nats_server import free_port
from tests.stories.pooler import pooler_before
from tests.stories.scenario import FAST, SLACK, Scenario, Tree, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

THRESHOLD_S = FAST["running_stale_threshold_ms"] / 1_000
HELD = 8
ROLE = "everbeat_app"


class LoadedTrees:
    """Two trees with tasks that wait for a gate."""

    def __init__(self, scenario: Scenario, sample_tasks: ModuleType) -> None:
        self.scenario = scenario
        self.sample_tasks = sample_tasks
        self.trees = [scenario.start_tree(recovery=FAST) for _ in range(2)]
        for tree in self.trees:
            scenario.until(
                lambda tree=tree: scenario.workers(tree), within=30, what="a ready tree", tree=tree
            )  # type: ignore[misc]
        self.pids = self._pids()
        self.held = [sample_tasks.wait_for.send("go") for _ in range(HELD)]
        scenario.until(lambda: len(scenario.effects("start")) == HELD, within=20, what="all run")
        self.numbers = [
            sample_tasks.quick.send(n).result(timeout=20) for n in range(2)
        ]  # the sender waits by LISTEN

    def is_whole_again(self) -> None:
        """Check that no task was lost, duplicated or recovered, no process restarted, and new work is done at once."""
        began = time.monotonic()
        later = [self.sample_tasks.quick.send(n) for n in range(20)]
        assert [each.result(timeout=10 * SLACK) for each in later] == [*range(20)]
        print(f"20 tasks: {time.monotonic() - began:.2f} s after the database's return")
        self.scenario.open_gate("go")
        assert [each.result(timeout=10 * SLACK) for each in self.held] == ["done"] * HELD
        for each in (*self.held, *later):
            assert len(self.scenario.effects("start", each.id)) == 1
            *before, last = (attempt["outcome"] for attempt in self.scenario.attempts(each.id))
            assert last == "COMPLETED"
            assert set(before) <= {"RELEASED"}, (
                "a start whose worker was cut off goes back before its code runs"
            )
        assert self.scenario.states() == {"COMPLETED": len(self.held) + len(later) + len(self.numbers)}
        assert self.scenario.recoveries() == []
        assert self._pids() == self.pids

    def _pids(self) -> list[list[int]]:
        return [[tree.pid, *sorted(row["pid"] for row in self.scenario.workers(tree))] for tree in self.trees]


def noticed(trees: list[Tree]) -> bool:
    return all("database_unreachable" in tree.output() for tree in trees)


# A changed password.


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return server_with_a_password(new_server)


def server_with_a_password(new_server: NewServer) -> EmbeddedServer:
    """Start a server that requires a password from one role."""
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
    """End every session of the role, so that each process must log in again."""
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where usename = %s and pid <> %s",
            [ROLE, but],
        )


def send_patiently(sample_tasks: ModuleType, number: int) -> Handle[int]:
    with sample_tasks.app.patience("60s"):
        handle: Handle[int] = sample_tasks.quick.send(number)
        return handle


@pytest.mark.long
@pytest.mark.parametrize("place", ["a password file", pytest.param("the URL", marks=pytest.mark.long)])
def test_workers_survive_a_changed_password(
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
        scenario = Scenario(url, "story", tmp_path)
        end.callback(lambda: scenario.close(check=False))
        sample_tasks = end.enter_context(program_of(scenario))
        loaded_trees = LoadedTrees(scenario, sample_tasks)
        set_password(server, "second")
        assert sample_tasks.quick.send(7).result(timeout=10) == 7, "open sessions continue"
        loaded_trees.numbers.append(7)
        cut_sessions(server, but=scenario.connection.info.backend_pid)
        scenario.until(lambda: noticed(loaded_trees.trees), within=20, what="both trees are refused")
        with sample_tasks.app.patience("500ms"), pytest.raises(DatabaseUnreachable, match="password"):
            sample_tasks.quick.send(8)
        patient = end.enter_context(ThreadPoolExecutor(1)).submit(send_patiently, sample_tasks, 9)
        time.sleep(3 * THRESHOLD_S)  # the outage
        assert scenario.recoveries() == []
        if place == "the URL":
            set_password(server, "first")
        else:
            passwords.write_text(f"*:*:*:{ROLE}:second\n")
        assert patient.result(timeout=60).result(timeout=60) == 9, "a send that began during the outage"
        loaded_trees.numbers.append(9)
        loaded_trees.is_whole_again()


# A restart of PgBouncer.


@pytest.mark.long
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_workers_survive_a_restart_of_the_pooler(
    new_server: NewServer, tmp_path: Path, mode: str
) -> None:  # J11
    server = new_server(tcp_port=free_port())
    with ExitStack() as end:
        pooler = end.enter_context(pooler_before(server.tcp_url, mode=mode))
        scenario = Scenario(server.tcp_url, "story", tmp_path)
        end.callback(lambda: scenario.close(check=False))
        scenario.url = f"{pooler.url}?pooler={mode}"
        sample_tasks = end.enter_context(program_of(scenario))
        loaded_trees = LoadedTrees(scenario, sample_tasks)
        pooler.kill()
        pooler.start()
        assert sample_tasks.quick.send(7).result(timeout=4 * SLACK) == 7, "after a restart without a pause"
        loaded_trees.numbers.append(7)
        pooler.kill()
        scenario.until(lambda: noticed(loaded_trees.trees), within=20, what="both trees notice")
        with sample_tasks.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
            sample_tasks.quick.send(8)
        time.sleep(3 * THRESHOLD_S)  # the outage
        pooler.start()
        loaded_trees.is_whole_again()


# A restart of PostgreSQL.


def test_every_process_survives_a_restart_of_the_server(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11, E7
    server = new_server(settings={"fsync": "on", "synchronous_commit": "on"})
    with ExitStack() as end:
        scenario = Scenario(server.url, "story", tmp_path)
        end.callback(lambda: scenario.close(check=False))
        sample_tasks = end.enter_context(program_of(scenario))
        loaded_trees = LoadedTrees(scenario, sample_tasks)
        server.restart("fast")
        reconnect(scenario, server.url)
        assert sample_tasks.quick.send(7).result(timeout=4 * SLACK) == 7, "after a restart without a pause"
        loaded_trees.numbers.append(7)
        server.stop("immediate")
        scenario.until(lambda: noticed(loaded_trees.trees), within=20, what="both trees notice")
        with sample_tasks.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
            sample_tasks.quick.send(8)
        server.restart("immediate")
        reconnect(scenario, server.url)
        loaded_trees.is_whole_again()


# Other programs take every connection.


@pytest.mark.long
def test_every_process_survives_a_shortage_of_connections(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11
    server = new_server(settings={"max_connections": "30", "superuser_reserved_connections": "0"})
    with ExitStack() as end:
        scenario = Scenario(server.url, "story", tmp_path)
        end.callback(lambda: scenario.close(check=False))
        sample_tasks = end.enter_context(program_of(scenario))
        loaded_trees = LoadedTrees(scenario, sample_tasks)
        others = end.enter_context(ExitStack())
        take_every_connection(scenario, others)
        scenario.until(lambda: noticed(loaded_trees.trees), within=20, what="both trees are refused")
        with sample_tasks.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
            sample_tasks.quick.send(8)
        time.sleep(2 * THRESHOLD_S)  # the shortage
        assert scenario.recoveries() == []
        others.close()
        loaded_trees.is_whole_again()


def take_every_connection(scenario: Scenario, others: ExitStack) -> None:
    """End all sessions except those of other programs and of the scenario, until the others hold every connection."""
    while True:
        try:
            others.enter_context(psycopg.connect(scenario.url, application_name="stranger"))
        except psycopg.OperationalError:
            left = scenario.query(
                """select pg_terminate_backend(pid) from pg_stat_activity
                   where backend_type = 'client backend' and application_name <> 'stranger' and pid <> pg_backend_pid()"""
            )
            if not left:
                return


# A long outage of the server.


@pytest.mark.long  # 60 thresholds are two minutes; up to 10 are in test_the_database_goes_away.py
@pytest.mark.timeout(600)
def test_an_outage_of_60_thresholds_loses_and_duplicates_no_task(
    new_server: NewServer, tmp_path: Path
) -> None:  # J11
    server = new_server(settings={"fsync": "on", "synchronous_commit": "on"})
    with ExitStack() as end:
        scenario = Scenario(server.url, "story", tmp_path)
        end.callback(lambda: scenario.close(check=False))
        sample_tasks = end.enter_context(program_of(scenario))
        loaded_trees = LoadedTrees(scenario, sample_tasks)
        server.stop("immediate")
        give_up_at = time.monotonic() + 60 * THRESHOLD_S
        while time.monotonic() < give_up_at:
            with sample_tasks.app.patience("500ms"), pytest.raises(DatabaseUnreachable):
                sample_tasks.quick.send(8)
            time.sleep(0.5)  # a producer that keeps trying
        server.restart("immediate")
        reconnect(scenario, server.url)
        loaded_trees.is_whole_again()


def reconnect(scenario: Scenario, url: str) -> None:
    """Reconnect the scenario, whose connection was lost with the server."""
    rows = scenario.connection.row_factory
    scenario.connection.close()
    scenario.connection = Target.parse(url, schema=scenario.schema).connect("everbeat story")
    scenario.connection.row_factory = rows
