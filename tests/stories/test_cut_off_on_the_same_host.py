"""Trees that live but have lost all their sessions, observed from the machine on which they run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from psycopg import conninfo

from everbeat.embedded.server import EmbeddedServer
from tests.conftest import NewServer
from tests.stories.scenario import FAST, SLACK, Scenario, new_scenario, program_of
from tests.stories.test_outages import (
    ROLE,
    cut_sessions,
    server_with_a_password,
    set_password,
)

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

WAIT_S = 1.0
RECOVERY = {"session_grace_ms": 500, "mass_session_grace_ms": round(WAIT_S * 1_000)}


@contextmanager
def scenario_with_a_password(server: EmbeddedServer, folder: Path) -> Iterator[tuple[Scenario, ModuleType]]:
    """Create a scenario whose trees log in with the first password, and import its program."""
    set_password(server, "first")
    url = conninfo.make_conninfo(server.url, user=ROLE, password="first")
    with new_scenario(url, "story", folder, check=False) as scenario, program_of(scenario) as sample_tasks:
        yield scenario, sample_tasks


def lock_out(server: EmbeddedServer, scenario: Scenario) -> str:
    """End all sessions of the trees, which log in with the first password. Return the URL that works now."""
    set_password(server, "second")
    cut_sessions(server, but=scenario.connection.info.backend_pid)
    return conninfo.make_conninfo(scenario.url, password="second")


@pytest.mark.long
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.long), 2])
def test_live_trees_without_a_session_are_not_ended_on_their_own_machine(
    new_server: NewServer, tmp_path: Path, number: int
) -> None:  # E14, promise 4
    """One tree is a single loss; two of three trees are a mass loss."""
    server = server_with_a_password(new_server)
    with scenario_with_a_password(server, tmp_path) as (scenario, sample_tasks):
        trees = [scenario.ready_tree(recovery=RECOVERY) for _ in range(number)]
        workers = {row["id"] for tree in trees for row in scenario.workers(tree)}
        tasks = [sample_tasks.wait_for.send("go") for _ in range(4)]
        scenario.until(lambda: len(scenario.effects("start")) == len(tasks), within=20, what="all run")
        observer = scenario.ready_tree(recovery=RECOVERY, url=lock_out(server, scenario))
        time.sleep(6)  # four checks more than the grace and the wait need, also for a mass loss
        assert scenario.recoveries() == []
        scenario.until_logged(observer, "living_trees_cut_off")
        set_password(server, "first")
        scenario.open_gate("go")
        assert [task.result(timeout=20 * SLACK) for task in tasks] == ["done"] * len(tasks)
        assert len(scenario.effects("start")) == len(tasks)
        assert {row["id"] for tree in trees for row in scenario.workers(tree)} == workers
        assert scenario.recoveries() == []


@pytest.mark.long
def test_a_frozen_tree_without_a_session_is_recovered_by_age_on_its_own_machine(
    new_server: NewServer, tmp_path: Path
) -> None:  # E4
    """The frozen tree holds its lock file like a live one."""
    server = server_with_a_password(new_server)
    with scenario_with_a_password(server, tmp_path) as (scenario, sample_tasks):
        frozen = scenario.ready_tree(recovery=FAST)
        task = sample_tasks.wait_for_on_crash.send("go")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        scenario.ready_tree(recovery=FAST)
        frozen.freeze()
        cut_sessions(server, but=scenario.connection.info.backend_pid)
        scenario.until(scenario.started(task.id, 2), within=6 * SLACK, what="it runs elsewhere")
        assert [row["noticed_by"] for row in scenario.recoveries()] == ["age"]
        scenario.open_gate("go")
        assert task.result(timeout=20) == "done"
