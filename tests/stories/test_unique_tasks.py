"""Workers that hold unique tasks are killed: a key stays taken while its task will run again, and is free when recovery ends it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import psutil
import pytest

from tests.stories.scenario import Scenario
from tests.stories.test_worker_deaths import worker_of

SCOPES = ["live", *(pytest.param(scope, marks=pytest.mark.long) for scope in ("waiting", "1h", "kept"))]

pytestmark = pytest.mark.story


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_of_a_killed_worker_stays_taken_while_the_task_runs_again(
    scenario: Scenario, sample_tasks: ModuleType, scope: str
) -> None:  # K8
    """A waiting key is free from the first claim on, also after the death, so the next task waits beside the task that runs again."""
    tree = scenario.ready_tree(worker={"processes": 1, "async_concurrency": 1, "prefetch": 0})
    task = sample_tasks.wait_for_on_crash.with_options(key="k", unique_for=scope)
    first = task.send("a")
    scenario.until(scenario.started(first.id), within=20, what="the first task runs")
    worker_of(scenario, tree, first.id).kill()
    scenario.until(lambda: scenario.recoveries(first.id), within=10, what="the task is recovered")
    second = task.send("b")
    assert (second.id == first.id) == second.existed == (scope != "waiting")
    scenario.until(scenario.started(first.id, 2), within=20, what="the task runs again")
    assert task.send("b").id == second.id
    scenario.open_gate("a")
    scenario.open_gate("b")
    assert first.result(timeout=20) == second.result(timeout=20) == "done"
    third = task.send("b")
    assert third.existed == (scope in ("1h", "kept"))
    assert third.result(timeout=20) == "done"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_of_a_killed_worker_is_free_once_recovery_has_failed_the_task(
    scenario: Scenario, sample_tasks: ModuleType, scope: str
) -> None:  # K8
    tree = scenario.ready_tree(worker={"processes": 1})
    task = sample_tasks.wait_for.with_options(key="k", unique_for=scope)
    first = task.send("a")
    scenario.until(scenario.started(first.id), within=20, what="the task runs")
    worker_of(scenario, tree, first.id).kill()
    scenario.until(scenario.state_is(first.id, "FAILED"), within=10, what="recovery fails the task")
    scenario.open_gate("a")
    second = task.send("a")
    assert second.existed == (scope in ("1h", "kept"))
    if not second.existed:
        assert second.result(timeout=20) == "done"


@pytest.mark.long
def test_a_claimed_task_of_a_killed_tree_takes_its_waiting_key_back(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # K8
    """The task function is paused, so no worker claims the recovered task while the second send looks for it."""
    scenario.hold_processes()
    doomed = scenario.ready_tree()
    task = sample_tasks.quick_in_process.with_options(key="k", unique_for="waiting")
    first = task.send(1)
    scenario.until(scenario.state_is(first.id, "CLAIMED"), within=20, what="the task is claimed")
    sample_tasks.app.pause_task("quick_in_process")
    doomed.kill()
    scenario.start_tree()
    scenario.until(lambda: scenario.recoveries(first.id), within=30, what="the claimed task is recovered")
    second = task.send(2)
    assert (second.id, second.existed) == (first.id, True)
    scenario.release_processes()
    sample_tasks.app.resume_task("quick_in_process")
    assert second.result(timeout=20) == 1


@pytest.mark.long
def test_senders_and_killed_workers_keep_one_task_for_each_key(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # K8
    """Eight senders send the same keys in all scopes while worker processes are killed. The scenario checks the invariants of keys."""
    tree = scenario.ready_tree(worker={"processes": 2, "async_concurrency": 4})
    task = sample_tasks.swift

    def sending(number: int) -> list[tuple[str, Any]]:
        sent = []
        for turn in range(25):
            scope = ("live", "waiting", "1h", "kept")[(number + turn) % 4]
            answer = ("existing", "replace", "debounce")[turn % 3]
            key = f"{scope}-{turn % 5}"
            sent.append((key, task.with_options(key=key, unique_for=scope, on_duplicate=answer).send(turn)))
        return sent

    with ThreadPoolExecutor(8) as pool:
        senders = [pool.submit(sending, number) for number in range(8)]
        for killed in range(3):
            scenario.until(
                lambda: len(scenario.workers(tree)) == 2, within=30, what=f"two workers before kill {killed}"
            )
            scenario.until(
                lambda: (
                    scenario.query("select from {schema}.tasks where state = 'RUNNING'")
                    or all(s.done() for s in senders)
                ),
                within=30,
                what="a task runs",
            )
            (doomed, *_) = scenario.workers(tree)
            psutil.Process(doomed["pid"]).kill()
            scenario.until(
                lambda gone=doomed["id"]: gone not in [row["id"] for row in scenario.workers(tree)],
                within=10,
                what="the death is noticed",
            )
        replies = [reply for each in senders for reply in each.result()]
    for _, handle in replies:
        handle.result(timeout=60)
    for scope in ("1h", "kept"):
        for number in range(5):
            assert len({handle.id for key, handle in replies if key == f"{scope}-{number}"}) <= 1
    new = [handle.id for _, handle in replies if not handle.existed]
    assert len(new) == len(set(new)) == sum(scenario.states().values())
