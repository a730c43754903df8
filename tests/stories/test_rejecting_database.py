"""PostgreSQL runs, but accepts no write or no connection for several thresholds: everbeat waits and declares no tree dead."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest

from everbeat import App
from everbeat.domain.doctor.findings import CheckVerdict
from everbeat.embedded.server import EmbeddedServer
from everbeat.examination import Examination
from tests.conftest import NewServer
from tests.stories.scenario import FAST, Scenario, new_scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

THRESHOLD_S = 3.0
# Beats are rarer than checks: after the trouble, an observer checks before the others have beaten again.
SETTINGS = {
    **FAST,
    "claimer_heartbeat_interval_ms": 1_500,
    "runner_heartbeat_interval_ms": 1_500,
    "claimed_stale_threshold_ms": round(THRESHOLD_S * 1_000),
    "running_stale_threshold_ms": round(THRESHOLD_S * 1_000),
}
CONNECTIONS = 30


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return new_server(settings={"max_connections": str(CONNECTIONS), "superuser_reserved_connections": "0"})


@pytest.fixture
def scenario(server: EmbeddedServer, tmp_path: Path) -> Iterator[Scenario]:
    with new_scenario(server.url, "story", tmp_path, check=False) as made:
        yield made


@contextmanager
def read_only(scenario: Scenario) -> Iterator[None]:
    """Make every transaction read-only, as on a managed server whose disk is full. Existing sessions notice it too."""
    scenario.connection.execute("alter system set default_transaction_read_only = on")
    scenario.connection.execute("select pg_reload_conf()")
    try:
        yield
    finally:
        scenario.connection.execute("alter system reset default_transaction_read_only")
        scenario.connection.execute("select pg_reload_conf()")


@contextmanager
def no_connection(scenario: Scenario) -> Iterator[None]:
    """Let other programs take every free connection. One tree loses all its sessions, the other all except its supervisor's."""
    with ExitStack() as others:
        while True:
            try:
                others.enter_context(psycopg.connect(scenario.url))
            except psycopg.OperationalError:
                if not cut_off(scenario):
                    break
        yield


@contextmanager
def connections_taken(scenario: Scenario) -> Iterator[None]:
    """Let other programs take every free connection, while no tree loses one."""
    with ExitStack() as others:
        while True:
            try:
                others.enter_context(psycopg.connect(scenario.url))
            except psycopg.OperationalError:
                break
        yield


def cut_off(scenario: Scenario) -> list[dict[str, Any]]:
    """End the sessions that lose their connection; return the ended ones."""
    return scenario.query(
        """select pg_terminate_backend(a.pid) from pg_stat_activity a
           join {schema}.supervisors s on s.session_name = split_part(a.application_name, ' ', 1)
           where a.application_name not like '%% supervisor%%' or s.started_at > (select min(started_at) from {schema}.supervisors)"""
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("trouble", "thresholds"),
    [(read_only, 5), pytest.param(no_connection, 3, marks=pytest.mark.long)],
    ids=["no write", "no connection"],
)
def test_no_tree_is_declared_dead_while_the_database_accepts_no_write_or_connection(
    scenario: Scenario, sample_tasks: ModuleType, trouble: Any, thresholds: int
) -> None:  # J12
    trees = [scenario.ready_tree(recovery=SETTINGS) for _ in range(2)]
    tasks = [sample_tasks.wait_for.send(gate) for gate in ("during", "after") for _ in range(20)]
    scenario.until(lambda: len(scenario.effects("start")) == len(tasks), within=30, what="all run")
    workers = {row["id"]: row["pid"] for tree in trees for row in scenario.workers(tree)}
    sample_tasks.app.close()
    with trouble(scenario):
        scenario.open_gate("during")  # these outcomes wait until the database accepts them
        time.sleep(thresholds * THRESHOLD_S)  # the trouble
    time.sleep(2 * THRESHOLD_S)  # a wrong judgement about the trouble has been carried out by now
    scenario.open_gate("after")
    for task in tasks:
        assert task.result(timeout=60) == "done"
        assert len(scenario.effects("start", task.id)) == 1
    assert scenario.recoveries() == []
    assert {row["id"]: row["pid"] for tree in trees for row in scenario.workers(tree)} == workers


@pytest.mark.long
def test_a_frozen_tree_is_recovered_while_no_connection_is_free(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J12
    """The frozen tree holds its connections, so no refused connection explains its silence."""
    frozen, other = (scenario.ready_tree(recovery=SETTINGS) for _ in range(2))
    tasks = [sample_tasks.wait_for_on_crash.send("after") for _ in range(8)]
    scenario.until(lambda: len(scenario.effects("start")) == len(tasks), within=30, what="all run")
    lost = {row["id"] for row in scenario.workers(frozen)}
    held = scenario.query(
        "select id from {schema}.tasks where state = 'RUNNING' and claimed_by_worker_id = any(%s)", list(lost)
    )
    assert held, "the tree that is frozen runs nothing"
    sample_tasks.app.close()
    with connections_taken(scenario):
        frozen.freeze()
        took = scenario.until(
            lambda: len(scenario.recoveries()) == len(held), within=6 * THRESHOLD_S, what="settled"
        )
        print(f"settled after {took:.1f} s")
    frozen.thaw()
    scenario.open_gate("after")
    for task in tasks:
        assert task.result(timeout=60) == "done"
    assert {row["noticed_by"] for row in scenario.recoveries()} == {"age"}
    assert {row["worker_id"] for row in scenario.recoveries()} <= lost
    assert scenario.workers(other)


def test_explain_and_doctor_name_a_server_that_is_read_only_for_all(
    scenario: Scenario, sample_tasks: ModuleType, server: EmbeddedServer
) -> None:  # J12
    scenario.ready_tree(recovery=SETTINGS, worker={"async_concurrency": 1, "prefetch": 0})
    running, pending = sample_tasks.wait_for.send("end").id, sample_tasks.quick.send().id
    scenario.until(scenario.started(running), within=20, what="it runs")
    looking = App(server.url, schema=scenario.schema, auto_migrate=False)
    try:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("alter system set default_transaction_read_only = on")
            admin.execute("select pg_reload_conf()")
            try:
                for task in (running, pending):
                    scenario.until(
                        lambda task=task: (
                            "DATABASE_READ_ONLY" in [each.code for each in looking.explain(task).reasons]
                        ),
                        within=10,
                        what="explain names it first",
                    )
                    first = looking.explain(task).reasons[0]
                    assert (first.code, first.command) == ("DATABASE_READ_ONLY", "everbeat doctor")
                    assert "set in the configuration of the server" in first.text
                check = next(Examination(looking, long_transaction_s=300).checks())
                assert (check.code, check.verdict) == ("DATABASE", CheckVerdict.FAIL)
                assert "no task is sent, claimed, started or settled" in check.text
            finally:
                admin.execute("set default_transaction_read_only = off")
                admin.execute("alter system reset default_transaction_read_only")
                admin.execute("select pg_reload_conf()")
        scenario.open_gate("end")
        scenario.until(scenario.state_is(pending, "COMPLETED"), within=20, what="everything works again")
        assert looking.explain(pending).reasons[0].code == "COMPLETED"
    finally:
        looking.close()
