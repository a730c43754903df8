"""PostgreSQL restarts and stays away; no live tree is declared dead for it. Each story has a separate server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from psycopg.rows import dict_row

from everbeat.embedded.server import EmbeddedServer
from tests.conftest import NewServer
from tests.stories.scenario import BY_AGE, FAST, SLACK, Scenario, new_scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return new_server(settings={"fsync": "on", "synchronous_commit": "on"})


@pytest.fixture
def scenario(server: EmbeddedServer, tmp_path: Path) -> Iterator[Scenario]:
    with new_scenario(server.url, "story", tmp_path, check=False) as made:
        yield made


def reconnect(scenario: Scenario) -> None:
    scenario.connection.close()
    scenario.connection = scenario.target.connect("everbeat story")
    scenario.connection.row_factory = dict_row  # type: ignore[assignment]


def test_a_task_survives_an_immediate_restart_of_the_database(
    scenario: Scenario, sample_tasks: ModuleType, server: EmbeddedServer
) -> None:  # E7
    scenario.ready_tree()
    task = sample_tasks.nap.send(6)
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    server.restart("immediate")
    reconnect(scenario)
    began = time.monotonic()
    assert sample_tasks.quick.send(1).result(timeout=2 * SLACK) == 1
    print(f"next task after the database's return: {time.monotonic() - began:.2f} s")
    task.result(timeout=30)
    assert len(scenario.effects("start", task.id)) == 1
    assert scenario.recoveries() == []
    sample_tasks.app.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "ways", [{}, pytest.param(BY_AGE, marks=pytest.mark.long)], ids=["all ways", "by age"]
)
def test_outages_of_half_a_threshold_to_ten_thresholds_end_no_live_tree(
    scenario: Scenario, sample_tasks: ModuleType, server: EmbeddedServer, ways: dict[str, object]
) -> None:  # E7
    settings = {**FAST, **ways}
    threshold_s = FAST["running_stale_threshold_ms"] / 1_000
    scenario.ready_tree(recovery=settings)
    scenario.ready_tree(recovery=settings)
    tasks = [sample_tasks.wait_for.send("go") for _ in range(4)]
    scenario.until(lambda: len(scenario.effects("start")) == 4, within=20, what="all run")
    workers = {row["id"] for row in scenario.query("select id from {schema}.workers where ended_at is null")}
    sample_tasks.app.close()
    for thresholds in (0.5, 1, 2, 10):
        server.stop("immediate")
        time.sleep(thresholds * threshold_s)  # the outage
        server.restart("immediate")
        reconnect(scenario)
        began = time.monotonic()
        assert sample_tasks.quick.send(1).result(timeout=2 * SLACK) == 1
        back_s = time.monotonic() - began
        print(f"outage of {thresholds} thresholds: next task {back_s:.2f} s after the database's return")
        assert scenario.recoveries() == []
        sample_tasks.app.close()
    time.sleep(2 * threshold_s)  # a wrong judgement after the last outage has happened by now
    scenario.open_gate("go")
    for task in tasks:
        task.result(timeout=60)
        assert len(scenario.effects("start", task.id)) == 1
        assert scenario.task(task.id)["state"] == "COMPLETED"
    assert scenario.recoveries() == []
    assert {
        row["id"] for row in scenario.query("select id from {schema}.workers where ended_at is null")
    } == workers
    sample_tasks.app.close()
