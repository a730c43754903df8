"""PostgreSQL crashes and recovers; a tree starts just then, and another one needs seconds to come back."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psycopg
import pytest
from psycopg.rows import dict_row

from tests.conftest import NewServer
from tests.stories.stage import Stage, staged
from tests.stories.wire import wire

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@pytest.fixture
def stage(new_server: NewServer, tmp_path: Path) -> Iterator[Stage]:
    server = new_server(settings={"synchronous_commit": "on"})
    with staged(server.url, "story", tmp_path, check=False) as made:
        yield made


def test_a_tree_that_starts_after_a_crash_waits_for_one_that_is_slow_to_return(
    stage: Stage, deeds: ModuleType
) -> None:  # J16
    with wire(stage.target) as line:
        slow = stage.ready_tree(url=line.url)
        # As if it ran on another machine: no process, file or boot of it can be seen here.
        stage.query(
            "update {schema}.supervisors set boot_id = 'b', machine_id = 'm', lock_file = null returning id"
        )
        task = deeds.wait_for_on_crash.send("go")
        stage.until(stage.started(task.id), within=20, what="it runs")
        deeds.app.close()
        line.cut()
        with psycopg.connect(stage.url) as victim:
            os.kill(victim.info.backend_pid, signal.SIGKILL)
        stage.until(lambda: is_back(stage), within=30, what="the server has recovered")
        stage.connection.close()
        stage.connection = stage.target.connect("everbeat story")
        stage.connection.row_factory = dict_row  # type: ignore[assignment]
        newcomer = stage.ready_tree()
        time.sleep(4)  # the grace would be over by now
        assert stage.workers(slow), newcomer.output()
        line.mend()
        stage.open_gate("go")
        assert task.result(timeout=60) == "done"
        assert stage.recoveries() == []
        assert len(stage.effects("start", task.id)) == 1


def is_back(stage: Stage) -> bool:
    try:
        with psycopg.connect(stage.url):
            return True
    except psycopg.OperationalError:
        return False
