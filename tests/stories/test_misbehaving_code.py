"""User code misbehaves. Its own task ends somehow; other tasks and the tree are hardly affected."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest

from tests.stories.scenario import SLACK, Scenario

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


def long(*values: object) -> Any:
    """Mark parameters that only the long run tries."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("task", "how", "end"),
    [
        ("rude_on_the_loop", "os._exit(0)", "FAILED"),
        long("rude_on_the_loop", "sys.exit", "FAILED"),
        long("rude_on_the_loop", "stop the loop", None),
        ("rude_on_the_loop", "cancel everything", "FAILED"),
        long("rude_on_the_loop", "own signal handler", "FAILED"),
        long("rude_on_the_loop", "stray tasks", "COMPLETED"),
        long("rude_in_a_thread", "os._exit(0)", "FAILED"),
        long("rude_in_a_thread", "os._exit(1)", "FAILED"),
        long("rude_in_a_thread", "close all descriptors", None),
        long("rude_in_a_thread", "fork that lives on", "COMPLETED"),
        long("rude_in_a_thread", "fork, then die", "FAILED"),
        ("rude_in_a_thread", "child that lives on, then die", "FAILED"),
        long("rude_in_a_thread", "close stdout", "COMPLETED"),
        long("rude_in_a_thread", "raise in __del__", "COMPLETED"),
        long("rude_in_a_thread", "recursion", "FAILED"),
        long("rude_in_a_thread", "stray threads", "COMPLETED"),
        ("rude_in_a_thread", "abort", "FAILED"),
        long("rude_in_a_process", "os._exit(0)", "FAILED"),
        ("rude_in_a_process", "close all descriptors", "FAILED"),
        long("rude_in_a_process", "fork that lives on", "COMPLETED"),
        long("rude_in_a_process", "exit in a thread", "FAILED"),
        long("rude_in_a_process", "own handlers", "COMPLETED"),
    ],
)
def test_misbehaving_code_affects_only_its_own_task(
    scenario: Scenario, mischief: ModuleType, task: str, how: str, end: str | None
) -> None:  # E4, promises 1 and 3
    tree = scenario.ready_tree(program="mischief")
    misbehaving = getattr(mischief, task).send(how)
    took = scenario.until(
        lambda: scenario.task(misbehaving.id)["state"] in ("COMPLETED", "FAILED"),
        within=12,
        what=f"{how}: its end",
        tree=tree,
    )
    state = scenario.task(misbehaving.id)["state"]
    print(
        how,
        state,
        f"{took:.2f}",
        scenario.task(misbehaving.id)["error"] and scenario.task(misbehaving.id)["error"]["code"],
    )
    assert state == (end or state)
    assert mischief.quickly.send(7).result(timeout=10) == 7
    assert len(scenario.effects("start", misbehaving.id)) == 1
    began = time.monotonic()
    assert tree.stop() == 0
    print(f"{how}: left after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 2.0 * SLACK


@pytest.mark.long
def test_code_that_does_not_end_does_not_delay_the_stop_of_its_worker(
    scenario: Scenario, mischief: ModuleType
) -> None:  # B12, L7
    tree = scenario.ready_tree(program="mischief", worker={"grace": "1s", "prefetch": 2})
    tasks = [
        task.send()
        for task in (mischief.endless_thread, mischief.deaf_coroutine, mischief.deaf_process)
        for _ in range(2)
    ]
    tasks.append(mischief.rude_in_a_thread.send("stray threads"))
    scenario.until(lambda: len(scenario.effects("start")) == 7, within=20, what="all run")
    began = time.monotonic()
    assert tree.stop() == 0
    took = time.monotonic() - began
    print(f"left after {took:.2f} s")
    assert took < 1.0 + 2.0 * 2  # on a slow machine
    for task in tasks[:6]:
        assert scenario.task(task.id)["error"]["code"] == "WORKER_STOPPED"
        assert scenario.task(task.id)["retry_count"] == 0
        assert [one["outcome"] for one in scenario.attempts(task.id)] == ["FAILED"]


@pytest.mark.long
def test_an_abandoned_thread_counts_as_a_possible_cause_of_a_process_death(
    scenario: Scenario, sample_tasks: ModuleType, mischief: ModuleType
) -> None:  # E13
    """Abandoned code can kill its process; the remaining tasks of the process are not charged for it."""
    scenario.ready_tree(program="mischief")
    stray = mischief.kill_the_process_later.send("die")
    assert stray.outcome(timeout=20 * SLACK).error.code == "TASK_TIMEOUT"
    innocent = sample_tasks.wait_for_on_crash.send("end")
    scenario.until(scenario.started(innocent.id), within=20 * SLACK, what="the innocent runs")
    (pid,) = {line["pid"] for line in scenario.effects("start")}
    scenario.open_gate("die")
    scenario.until(lambda: scenario.recoveries(innocent.id), within=10 * SLACK, what="it is recovered")
    scenario.open_gate("end")
    assert innocent.result(timeout=20 * SLACK) == "done"
    (recovery,) = scenario.recoveries(innocent.id)
    assert (recovery["charge"], recovery["suspect"]) == ("loss", True)
    assert "SIGSEGV" in recovery["cause"]
    assert scenario.task(innocent.id)["crash_count"] == 0
    assert {line["pid"] for line in scenario.effects("start", innocent.id)} != {pid}
