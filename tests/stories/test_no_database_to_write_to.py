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
from everbeat.cli.examination import Examination
from everbeat.domain.diagnosis import Verdict
from everbeat.store.embedded import EmbeddedServer
from tests.conftest import NewServer
from tests.stories.stage import FAST, Stage, staged

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

THRESHOLD_S = 3.0
# Beats are rarer than looks: after the trouble, an observer looks before the others have beaten again.
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
def stage(server: EmbeddedServer, tmp_path: Path) -> Iterator[Stage]:
    with staged(server.url, "story", tmp_path, check=False) as made:
        yield made


@contextmanager
def read_only(stage: Stage) -> Iterator[None]:
    """Every transaction is read-only, as on a managed server whose disk is full. Existing sessions notice it too."""
    stage.connection.execute("alter system set default_transaction_read_only = on")
    stage.connection.execute("select pg_reload_conf()")
    try:
        yield
    finally:
        stage.connection.execute("alter system reset default_transaction_read_only")
        stage.connection.execute("select pg_reload_conf()")


@contextmanager
def no_connection(stage: Stage) -> Iterator[None]:
    """Strangers take every free connection. One tree loses all its sessions, the other all but those of its supervisor."""
    with ExitStack() as strangers:
        while True:
            try:
                strangers.enter_context(psycopg.connect(stage.url))
            except psycopg.OperationalError:
                if not cut_off(stage):
                    break
        yield


@contextmanager
def connections_taken(stage: Stage) -> Iterator[None]:
    """Strangers take every free connection, and nobody loses one."""
    with ExitStack() as strangers:
        while True:
            try:
                strangers.enter_context(psycopg.connect(stage.url))
            except psycopg.OperationalError:
                break
        yield


def cut_off(stage: Stage) -> list[dict[str, Any]]:
    """Ends the sessions that lose their connection; answers those that were there."""
    return stage.query(
        """select pg_terminate_backend(a.pid) from pg_stat_activity a
           join {schema}.supervisors s on s.session_name = split_part(a.application_name, ' ', 1)
           where a.application_name not like '%% supervisor%%' or s.started_at > (select min(started_at) from {schema}.supervisors)"""
    )


@pytest.mark.parametrize(
    ("trouble", "thresholds"),
    [(read_only, 5), (no_connection, 3)],
    ids=["no write", "no connection"],
)
def test_no_tree_dies_while_the_database_accepts_nothing(
    stage: Stage, deeds: ModuleType, trouble: Any, thresholds: int
) -> None:  # J12
    trees = [stage.ready_tree(recovery=SETTINGS) for _ in range(2)]
    tasks = [deeds.wait_for.send(gate) for gate in ("during", "after") for _ in range(20)]
    stage.until(lambda: len(stage.effects("start")) == len(tasks), within=30, what="all run")
    workers = {row["id"]: row["pid"] for tree in trees for row in stage.workers(tree)}
    deeds.app.close()
    with trouble(stage):
        stage.open_gate("during")  # these outcomes wait until the database accepts them
        time.sleep(thresholds * THRESHOLD_S)  # the trouble
    time.sleep(2 * THRESHOLD_S)  # a wrong judgement about the trouble is carried out by now
    stage.open_gate("after")
    for task in tasks:
        assert task.result(timeout=60) == "done"
        assert len(stage.effects("start", task.id)) == 1
    assert stage.recoveries() == []
    assert {row["id"]: row["pid"] for tree in trees for row in stage.workers(tree)} == workers


def test_a_frozen_tree_is_recovered_while_no_connection_is_free(
    stage: Stage, deeds: ModuleType
) -> None:  # J12
    """It holds connections itself, and its own is open: no refused connection explains its silence."""
    frozen, other = (stage.ready_tree(recovery=SETTINGS) for _ in range(2))
    tasks = [deeds.wait_for_on_crash.send("after") for _ in range(8)]
    stage.until(lambda: len(stage.effects("start")) == len(tasks), within=30, what="all run")
    lost = {row["id"] for row in stage.workers(frozen)}
    held = stage.query(
        "select id from {schema}.tasks where state = 'RUNNING' and claimed_by_worker_id = any(%s)", list(lost)
    )
    assert held, "the tree that is frozen runs nothing"
    deeds.app.close()
    with connections_taken(stage):
        frozen.freeze()
        took = stage.until(
            lambda: len(stage.recoveries()) == len(held), within=6 * THRESHOLD_S, what="settled"
        )
        print(f"settled after {took:.1f} s")
    frozen.thaw()
    stage.open_gate("after")
    for task in tasks:
        assert task.result(timeout=60) == "done"
    assert {row["noticed_by"] for row in stage.recoveries()} == {"age"}
    assert {row["worker_id"] for row in stage.recoveries()} <= lost
    assert stage.workers(other)


def test_explain_and_doctor_name_a_server_that_is_read_only_for_all(
    stage: Stage, deeds: ModuleType, server: EmbeddedServer
) -> None:  # J12
    stage.ready_tree(recovery=SETTINGS, worker={"async_concurrency": 1, "prefetch": 0})
    running, pending = deeds.wait_for.send("end").id, deeds.quick.send().id
    stage.until(stage.started(running), within=20, what="it runs")
    looking = App(server.url, schema=stage.schema, auto_migrate=False)
    try:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("alter system set default_transaction_read_only = on")
            admin.execute("select pg_reload_conf()")
            try:
                for task in (running, pending):
                    stage.until(
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
                assert (check.code, check.verdict) == ("DATABASE", Verdict.FAIL)
                assert "no task is sent, claimed, started or settled" in check.text
            finally:
                admin.execute("set default_transaction_read_only = off")
                admin.execute("alter system reset default_transaction_read_only")
                admin.execute("select pg_reload_conf()")
        stage.open_gate("end")
        stage.until(stage.state_is(pending, "COMPLETED"), within=20, what="everything works again")
        assert looking.explain(pending).reasons[0].code == "COMPLETED"
    finally:
        looking.close()
