"""PostgreSQL crashes and recovers; a tree starts at that moment, and another one needs seconds to return."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.conftest import NewServer
from tests.stories.scenario import Scenario, new_scenario
from tests.stories.wire import wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def scenario(new_server: NewServer, tmp_path: Path) -> Iterator[Scenario]:
    server = new_server(settings={"synchronous_commit": "on"})
    with new_scenario(server.url, "story", tmp_path, check=False) as made:
        yield made


@pytest.mark.long
def test_a_tree_that_starts_after_a_crash_waits_for_one_that_is_slow_to_return(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J16
    with wire(scenario.target) as line:
        slow = scenario.ready_tree(url=line.url)
        # Pretend that it runs on another machine: none of its processes, files or boots are visible here.
        scenario.query(
            "update {schema}.supervisors set boot_id = 'b', machine_id = 'm', lock_file = null returning id"
        )
        task = sample_tasks.wait_for_on_crash.send("go")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        sample_tasks.app.close()
        line.cut()
        with psycopg.connect(scenario.url) as victim:
            os.kill(victim.info.backend_pid, signal.SIGKILL)
        scenario.until(
            lambda: is_cut_off(scenario.connection), within=30, what="the server ended its sessions"
        )
        scenario.until(lambda: is_back(scenario), within=30, what="the server has recovered")
        scenario.connection.close()
        scenario.connection = scenario.target.connect("everbeat story")
        scenario.connection.row_factory = dict_row  # type: ignore[assignment]
        newcomer = scenario.ready_tree()
        time.sleep(4)  # the grace would be over by now
        assert scenario.workers(slow), newcomer.output()
        line.mend()
        scenario.open_gate("go")
        assert task.result(timeout=60) == "done"
        assert scenario.recoveries() == []
        assert len(scenario.effects("start", task.id)) == 1


def is_cut_off(connection: psycopg.Connection[Any]) -> bool:
    """After a crash the server ends every session before it recovers. Until then it accepts connections as before."""
    try:
        connection.execute("select")
    except psycopg.OperationalError:
        return True
    return False


def is_back(scenario: Scenario) -> bool:
    try:
        with psycopg.connect(scenario.url):
            return True
    except psycopg.OperationalError:
        return False
