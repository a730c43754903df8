"""A standby is promoted, or a tree dies for good: a newly started observer distinguishes a waiting tree from a dead one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from psycopg.rows import dict_row

from tests.conftest import NewPair
from tests.replication import Pair
from tests.stories.scenario import SLACK, Scenario, Tree, new_scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(240)]


@contextmanager
def scenario_on(url: str, folder: Path) -> Iterator[tuple[Scenario, ModuleType]]:
    with new_scenario(url, "story", folder, check=False) as scenario, program_of(scenario) as sample_tasks:
        yield scenario, sample_tasks


def supervisor(scenario: Scenario, tree: Tree) -> dict[str, Any]:
    """Return the latest row of a tree's supervisor."""
    (row,) = scenario.query(
        "select * from {schema}.supervisors where pid = %s order by started_at desc limit 1", tree.pid
    )
    return row


def pretend_another_host(scenario: Scenario, tree: Tree) -> None:
    """Make everbeat treat this tree as one on another machine: there is no local proof of its death."""
    scenario.query(
        """update {schema}.supervisors set boot_id = 'elsewhere', machine_id = 'elsewhere', lock_file = null
           where pid = %s returning id""",
        tree.pid,
    )


def promote_and_reconnect(scenario: Scenario, pair: Pair) -> None:
    """Promote the standby and reconnect the scenario to it."""
    scenario.connection.close()
    pair.promote()
    scenario.connection = scenario.target.connect("everbeat story")
    scenario.connection.row_factory = dict_row  # type: ignore[assignment]


@pytest.mark.long
def test_a_tree_that_waits_for_the_former_primary_is_not_declared_dead(
    new_pair: NewPair, tmp_path: Path
) -> None:  # J16
    pair = new_pair()
    with scenario_on(pair.url, tmp_path) as (scenario, sample_tasks):
        old = scenario.ready_tree()
        task = sample_tasks.wait_for_on_crash.send("go")
        scenario.until(scenario.started(task.id), within=20, what="it runs")
        pretend_another_host(scenario, old)
        scenario.until(lambda: supervisor(scenario, old)["session_held"], within=20, what="its lock is held")
        sample_tasks.app.close()
        pair.wait_replayed()
        pair.freeze_primary()
        promote_and_reconnect(scenario, pair)
        new = scenario.ready_tree(url=pair.standby.tcp_url)
        # The grace and two checks of the new tree; it used to declare the old one dead 1.5 s after its start.
        time.sleep(4)
        assert supervisor(scenario, old)["ended_at"] is None
        pair.kill_primary()  # the connections of the old tree end, and it reconnects
        incarnation = supervisor(scenario, new)["session_server"]
        scenario.until(
            lambda: supervisor(scenario, old)["session_server"] == incarnation,
            within=30,
            what="the lock is back",
        )
        scenario.open_gate("go")
        assert task.result(timeout=60) == "done"
        assert len(scenario.effects("start", task.id)) == 1
        assert scenario.recoveries() == []
        again = sample_tasks.wait_for_on_crash.send("never")
        scenario.until(scenario.started(again.id), within=20, what="another one runs")
        holder = next(
            tree for tree in (old, new) if scenario.effects("start", again.id)[0]["pid"] in pids(tree)
        )
        holder.kill()
        took = scenario.until(
            lambda: scenario.recoveries(again.id), within=3 * SLACK, what="noticed on the new primary"
        )
        print(f"noticed by session after a promotion: {took:.2f} s")
        assert [row["noticed_by"] for row in scenario.recoveries(again.id)] == ["session"]


def pids(tree: Tree) -> set[int]:
    return {process.pid for process in tree.processes()}


def test_a_killed_single_tree_is_recovered_by_its_replacement_on_another_host(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J16
    sole = scenario.ready_tree()
    task = sample_tasks.wait_for_on_crash.send("go")
    scenario.until(scenario.started(task.id), within=20, what="it runs")
    pretend_another_host(scenario, sole)
    scenario.until(lambda: supervisor(scenario, sole)["session_held"], within=20, what="its lock is held")
    sole.kill()
    time.sleep(1)  # the replacement starts a second later
    replacement = scenario.start_tree()
    scenario.until(lambda: scenario.recoveries(task.id), within=5 * SLACK, what="recovered", tree=replacement)
    (recovery,) = scenario.recoveries(task.id)
    assert recovery["noticed_by"] == "session"
    scenario.open_gate("go")
    assert task.result(timeout=20) == "done"
