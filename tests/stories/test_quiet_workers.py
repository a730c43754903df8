"""An operator makes trees quiet: they claim nothing, finish running tasks, and keep beating until they are resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import psycopg
import pytest

from tests.stories.scenario import FAST, SLACK, Scenario, Tree

pytestmark = pytest.mark.story

WITHIN_S = 1.0 * SLACK
"""How soon a worker reacts to a hint."""


def command(scenario: Scenario, *arguments: str) -> dict[str, Any]:
    """Run `everbeat workers quiet` as an operator does."""
    found = subprocess.run(
        [sys.executable, "-m", "everbeat", "workers", "quiet", *arguments, "--json", "--url", scenario.url, "--schema", scenario.schema],
        env=os.environ, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    return document


def supervisor_of(scenario: Scenario, tree: Tree) -> str:
    (row,) = scenario.query(
        "select id from {schema}.supervisors where pid = %s and ended_at is null", tree.pid
    )
    return str(row["id"])


def claimed_by(scenario: Scenario, tree: Tree) -> int:
    (row,) = scenario.query(
        """select count(*) from {schema}.tasks t join {schema}.workers w on w.id = t.claimed_by_worker_id
           join {schema}.supervisors s on s.id = w.supervisor_id
           where s.pid = %s and t.state = 'CLAIMED'""",
        tree.pid,
    )
    return int(row["count"])


def test_a_quiet_tree_leaves_new_tasks_to_others_until_it_is_resumed(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J1
    scenario.hold_processes()
    quiet = scenario.ready_tree(worker={"process_concurrency": 2})
    held = [
        task.send("running")
        for task in (sample_tasks.wait_for, sample_tasks.wait_in_process_on_crash)
        for _ in range(2)
    ]
    scenario.until(lambda: len(scenario.effects("start")) == 2, within=20, what="two run", tree=quiet)
    scenario.until(lambda: claimed_by(scenario, quiet) == 2, within=20, what="two wait", tree=quiet)
    document = command(scenario, supervisor_of(scenario, quiet))
    assert document["supervisors"][0]["quiet_since"] is not None
    scenario.until(lambda: claimed_by(scenario, quiet) == 0, within=WITHIN_S, what="what waits is given back")
    (waits,) = [each for each in held if scenario.task(each.id)["state"] == "PENDING"][:1]
    explained = sample_tasks.app.explain(waits.id)
    assert [reason.code for reason in explained.reasons] == ["WORKERS_QUIET"]
    assert all(each.quiet_since is not None for each in sample_tasks.app.list_active_workers())
    scenario.release_processes()
    busy = scenario.ready_tree()
    pid = scenario.workers(busy)[0]["pid"]
    for n in range(20):
        sample_tasks.quick.send(n).result(timeout=20)
    assert {line["pid"] for line in scenario.effects("start") if line["name"] == "quick"} == {pid}
    assert len(scenario.effects("end")) == 0  # the tasks of the quiet tree still run
    scenario.open_gate("running")
    for each in held:
        each.result(timeout=20)
    assert busy.stop() == 0, busy.output()
    late = sample_tasks.quick.send(99)
    command(scenario, "--all", "--resume")
    late.result(timeout=20)
    command(scenario, "--host", document["supervisors"][0]["hostname"])
    gone = sample_tasks.quick.send(100)
    assert quiet.stop() == 0, quiet.output()
    assert scenario.task(gone.id)["state"] == "PENDING"
    scenario.ready_tree()
    gone.result(timeout=20)


@pytest.mark.long
def test_quiet_mode_arrives_with_the_next_beat_if_its_hint_is_lost(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(recovery=FAST)
    sample_tasks.quick.send(1).result(timeout=20)
    with psycopg.connect(scenario.url, autocommit=True) as operator:
        operator.execute(f'update "{scenario.schema}".supervisors set quiet_since = now()')
        (seq,) = operator.execute(f'select beat_seq from "{scenario.schema}".supervisors').fetchone()  # type: ignore[misc]
        scenario.until(
            lambda: scenario.query("select beat_seq from {schema}.supervisors")[0]["beat_seq"] > seq + 1,
            within=3 * SLACK,
            what="the next beat has landed",
            tree=tree,
        )
        waits = sample_tasks.quick.send(2)
        assert not scenario.effects("start", waits.id)
        for _ in range(3):
            seq = scenario.query("select beat_seq from {schema}.supervisors")[0]["beat_seq"]
            scenario.until(
                lambda seq=seq: (
                    scenario.query("select beat_seq from {schema}.supervisors")[0]["beat_seq"] > seq
                ),
                within=3 * SLACK,
                what="it goes on beating",
                tree=tree,
            )
        assert scenario.task(waits.id)["state"] == "PENDING"
        operator.execute(f'update "{scenario.schema}".supervisors set quiet_since = null')
        waits.result(timeout=20)


@pytest.mark.long
def test_a_quiet_tree_stays_quiet_when_its_worker_dies_or_it_is_declared_dead(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # J1
    tree = scenario.ready_tree(recovery=FAST)
    command(scenario, "--all")
    (worker,) = scenario.workers(tree)
    os.kill(worker["pid"], 9)
    scenario.until(
        lambda: [each["pid"] for each in scenario.workers(tree)] not in ([], [worker["pid"]]),
        within=20,
        what="a new worker process",
        tree=tree,
    )
    scenario.query("update {schema}.supervisors set ended_at = now(), ended_how = 'age' returning id")
    scenario.until(lambda: len(scenario.workers(tree)) == 1, within=20, what="it comes back", tree=tree)
    waits = sample_tasks.quick.send(1)
    (row,) = scenario.query("select quiet_since from {schema}.supervisors where ended_at is null")
    assert row["quiet_since"] is not None
    sample_tasks.app.resume_workers([supervisor_of(scenario, tree)])
    waits.result(timeout=20)
    assert len(scenario.effects("start", waits.id)) == 1
    assert tree.stop() == 0, tree.output()
