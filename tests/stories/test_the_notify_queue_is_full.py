"""Any role can fill PostgreSQL's notification queue, which then rejects each commit that notifies. Everything must work without it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import NewServer
from tests.notify_queue import SETTINGS, full_queue, require_small_queue
from tests.stories.scenario import FAST, SLACK, Scenario, Tree, new_scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]

DEATH_S = 3.0


@pytest.mark.long
def test_everything_works_while_a_role_without_rights_fills_the_notification_queue(
    new_server: NewServer, tmp_path: Path, database_url: str
) -> None:  # J12
    require_small_queue(database_url)
    server = new_server(settings=dict(SETTINGS))
    with (
        new_scenario(server.url, "story", tmp_path, check=False) as scenario,
        program_of(scenario) as sample_tasks,
    ):
        trees = [scenario.ready_tree(recovery=FAST) for _ in range(2)]
        done = [sample_tasks.wait_for.send("during") for _ in range(8)]
        again = [sample_tasks.wait_for_on_crash.send("after") for _ in range(8)]
        asked = sample_tasks.wait_for.send("never")
        scenario.until(lambda: len(scenario.effects("start")) == 17, within=30, what="all run")
        other, doomed = sorted(trees, key=lambda tree: held(scenario, tree, [task.id for task in again]))
        with full_queue(server.url):
            scenario.open_gate("during")
            assert [task.result(timeout=30) for task in done] == ["done"] * 8
            assert sample_tasks.swift.send(1).result(timeout=30) == 1
            work = sample_tasks.app.workflow("while-it-is-full")
            work.add(sample_tasks.quick, work.add(sample_tasks.swift, 2).result)
            work.start().outcome(timeout=60)
            sample_tasks.app.cancel(asked.id)
            scenario.until(
                scenario.state_is(asked.id, "CANCELLED"), within=10, what="the cancel of a running task"
            )
            doomed.kill()
            scenario.until(lambda: scenario.recoveries() != [], within=DEATH_S * SLACK, what="the recovery")
            scenario.until(
                lambda: len(scenario.effects("start")) == 18 + len(scenario.recoveries()),
                within=30,
                what="the second attempts",
            )
            scenario.until_logged(other, "hints_not_heard", within=60)
        scenario.until_logged(other, "hints_heard_again", within=10)
        scenario.open_gate("after")
        assert [task.result(timeout=30) for task in again] == ["done"] * 8
        assert set(scenario.states()) == {"COMPLETED", "CANCELLED"}
        assert {each["action"] for each in scenario.recoveries()} == {"retry"}
        assert "Traceback" not in other.output()
        sample_tasks.app.close()
    sys.modules.pop("sample_tasks", None)


def held(scenario: Scenario, tree: Tree, tasks: Sequence[str]) -> int:
    """Return how many of these tasks run in a tree: one tree can have claimed all of them."""
    workers = [worker["id"] for worker in scenario.workers(tree)]
    running = "select id from {schema}.tasks where id = any(%s::uuid[]) and claimed_by_worker_id = any(%s)"
    return len(scenario.query(running, list(tasks), workers))
