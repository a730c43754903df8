"""PostgreSQL restarts and stays away; nobody alive is declared dead for it. Each story has a server of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from psycopg.rows import dict_row

from everbeat.store.embedded import EmbeddedServer
from tests.conftest import NewServer
from tests.stories.stage import BY_AGE, FAST, SLACK, Stage, staged

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return new_server(settings={"fsync": "on", "synchronous_commit": "on"})


@pytest.fixture
def stage(server: EmbeddedServer, tmp_path: Path) -> Iterator[Stage]:
    with staged(server.url, "story", tmp_path, check=False) as made:
        yield made


def again(stage: Stage) -> None:
    stage.connection.close()
    stage.connection = stage.target.connect("everbeat story")
    stage.connection.row_factory = dict_row  # type: ignore[assignment]


def test_an_immediate_restart_during_a_task_is_survived(
    stage: Stage, deeds: ModuleType, server: EmbeddedServer
) -> None:  # E7
    stage.ready_tree()
    task = deeds.nap.send(6)
    stage.until(stage.started(task.id), within=20, what="it runs")
    server.restart("immediate")
    again(stage)
    began = time.monotonic()
    assert deeds.quick.send(1).result(timeout=2 * SLACK) == 1
    print(f"next task after the database's return: {time.monotonic() - began:.2f} s")
    task.result(timeout=30)
    assert len(stage.effects("start", task.id)) == 1
    assert stage.recoveries() == []
    deeds.app.close()


@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_outages_of_half_a_threshold_to_ten_kill_nobody(
    stage: Stage, deeds: ModuleType, server: EmbeddedServer, ways: dict[str, object]
) -> None:  # E7
    settings = {**FAST, **ways}
    threshold_s = FAST["running_stale_threshold_ms"] / 1_000
    stage.ready_tree(recovery=settings)
    stage.ready_tree(recovery=settings)
    tasks = [deeds.wait_for.send("go") for _ in range(4)]
    stage.until(lambda: len(stage.effects("start")) == 4, within=20, what="all run")
    workers = {row["id"] for row in stage.query("select id from {schema}.workers where ended_at is null")}
    deeds.app.close()
    for thresholds in (0.5, 1, 2, 10):
        server.stop("immediate")
        time.sleep(thresholds * threshold_s)  # the outage
        server.restart("immediate")
        again(stage)
        began = time.monotonic()
        assert deeds.quick.send(1).result(timeout=2 * SLACK) == 1
        back_s = time.monotonic() - began
        print(f"outage of {thresholds} thresholds: next task {back_s:.2f} s after the database's return")
        assert stage.recoveries() == []
        deeds.app.close()
    time.sleep(2 * threshold_s)  # whoever is wrongly judged after the last outage would be so by now
    stage.open_gate("go")
    for task in tasks:
        task.result(timeout=60)
        assert len(stage.effects("start", task.id)) == 1
        assert stage.task(task.id)["state"] == "COMPLETED"
    assert stage.recoveries() == []
    assert {
        row["id"] for row in stage.query("select id from {schema}.workers where ended_at is null")
    } == workers
    deeds.app.close()
