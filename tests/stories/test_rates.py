"""The counts of `rates` and the rows of `attempts` agree, also for task processes, and kills lose only the last counts."""

from __future__ import annotations

import os
import signal
from types import ModuleType

import pytest

from tests.stories.scenario import FAST, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

RATES = """
select sum(started)::int as started, sum(completed)::int as completed, sum(failed)::int as failed, sum(retried)::int as retried,
    sum(cancelled)::int as cancelled, sum(suspended)::int as suspended, sum(released)::int as released, sum(crashed)::int as crashed,
    sum(lost)::int as lost, sum(expired)::int as expired
from {schema}.rates
"""
CLASSES = """
select (select sum(w) from {schema}.rates r cross join lateral unnest(r.waits) w)::int as waits,
    (select sum(w) from {schema}.rates r cross join lateral unnest(r.runs) w)::int as runs
"""
ENDED = "select outcome, count(*)::int as n from {schema}.attempts group by outcome"


def counted(scenario: Scenario) -> dict[str, int]:
    (found,) = scenario.query(RATES)
    return {name: number or 0 for name, number in found.items()}


def ended(scenario: Scenario) -> dict[str, int]:
    return {row["outcome"]: row["n"] for row in scenario.query(ENDED)}


def until_ended(scenario: Scenario) -> None:
    live = {"PENDING", "CLAIMED", "RUNNING"}
    scenario.until(lambda: not live & scenario.states().keys(), within=60, what="the end of all tasks")


@pytest.mark.long
def test_counts_of_many_workers_equal_the_attempts(scenario: Scenario, sample_tasks: ModuleType) -> None:
    crews = [{"processes": 2, "process_concurrency": 1}, {"process_concurrency": 1}]
    trees = [scenario.start_tree(recovery=FAST, worker=crew) for crew in crews]
    scenario.until(
        lambda: sum(len(scenario.workers(tree)) for tree in trees) == 3, within=60, what="three workers"
    )
    for n in range(60):
        sample_tasks.quick.send(n)
    for n in range(8):
        sample_tasks.quick_in_process.send(n)
        sample_tasks.nap_in_thread.send(0.01)
    for _ in range(4):
        sample_tasks.flaky.send(1, "FLAKY")
        sample_tasks.raise_something.send("plain")
    late = sample_tasks.wait_for.send("never")
    scenario.until(scenario.started(late.id), within=20, what="a running task")
    late.cancel()
    until_ended(scenario)
    assert [tree.stop() for tree in trees] == [0, 0]

    found, attempts = counted(scenario), ended(scenario)
    assert attempts == {"COMPLETED": 80, "FAILED": 8, "CANCELLED": 1}
    assert found == {
        "started": 89, "completed": 80, "failed": 4, "retried": 4, "cancelled": 1,
        "suspended": 0, "released": 0, "crashed": 0, "lost": 0, "expired": 0,
    }  # fmt: skip
    assert scenario.query(CLASSES) == [{"waits": 89, "runs": 89}]
    by_name = scenario.query(
        "select name, sum(completed)::int as n from {schema}.rates group by name order by name"
    )
    assert {row["name"]: row["n"] for row in by_name} == {
        "flaky": 4, "nap_in_thread": 8, "quick": 60, "quick_in_process": 8, "raise_something": 0, "wait_for": 0,
    }  # fmt: skip
    waited = scenario.query("select sum(wait_s) as wait_s, sum(run_s) as run_s from {schema}.rates")[0]
    assert 0.08 < waited["run_s"] < 89 * 20
    assert waited["wait_s"] >= 0


def test_a_killed_worker_process_loses_the_counts_of_about_a_second(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = scenario.ready_tree(
        recovery={**FAST, "worker_state_snapshot_interval_ms": 1_000}, worker={"process_concurrency": 1}
    )
    for n in range(50):
        sample_tasks.quick.send(n)
    until_ended(scenario)
    held = sample_tasks.wait_for_on_crash.send("open")
    in_process = sample_tasks.wait_in_process_on_crash.send("open")
    for handle in (held, in_process):
        scenario.until(scenario.started(handle.id), within=20, what="running tasks")
    # The worker reports its counts to its supervisor once a second, and the snapshots of its state come from these reports.
    reports = "select count(*)::int as n from {schema}.worker_states where tasks_running >= 2"
    scenario.until(
        lambda: scenario.query(reports)[0]["n"] >= 1, within=60, what="a report about two running tasks"
    )
    (worker,) = scenario.workers(tree)
    os.kill(worker["pid"], signal.SIGKILL)
    scenario.open_gate("open")
    until_ended(scenario)
    assert tree.stop() == 0
    found, attempts = counted(scenario), ended(scenario)
    assert attempts["COMPLETED"] == found["completed"] == 52
    assert found["crashed"] + found["lost"] == attempts.get("CRASHED", 0) + attempts.get("LOST", 0) == 2
    assert found["started"] == 54


@pytest.mark.long
def test_a_killed_tree_loses_the_counts_of_about_ten_seconds(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:
    tree = scenario.ready_tree(recovery=FAST)
    for n in range(50):
        sample_tasks.quick.send(n)
    until_ended(scenario)
    scenario.until(lambda: counted(scenario)["completed"] == 50, within=40, what="written counts")
    for n in range(10):
        sample_tasks.quick.send(n)
    until_ended(scenario)
    tree.kill()
    sample_tasks.quick.send(0)
    other = scenario.ready_tree(recovery=FAST)
    until_ended(scenario)
    assert other.stop() == 0
    assert ended(scenario)["COMPLETED"] == 61
    assert 51 <= counted(scenario)["completed"] <= 61
