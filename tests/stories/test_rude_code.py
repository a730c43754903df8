"""User code does what it should not. Its own task ends somehow; the others, and the tree, do not notice for long."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest

from tests.stories.stage import SLACK, Stage

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]


def long(*values: object) -> Any:
    """One of those that only the long run tries."""
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("task", "how", "end"),
    [
        ("rude_on_the_loop", "os._exit(0)", "FAILED"),
        long("rude_on_the_loop", "sys.exit", "FAILED"),
        long("rude_on_the_loop", "stop the loop", None),
        ("rude_on_the_loop", "cancel everything", "FAILED"),
        ("rude_on_the_loop", "own signal handler", "FAILED"),
        long("rude_on_the_loop", "stray tasks", "COMPLETED"),
        long("rude_in_a_thread", "os._exit(0)", "FAILED"),
        long("rude_in_a_thread", "os._exit(1)", "FAILED"),
        long("rude_in_a_thread", "close all descriptors", None),
        ("rude_in_a_thread", "fork that lives on", "COMPLETED"),
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
        ("rude_in_a_process", "exit in a thread", "FAILED"),
        long("rude_in_a_process", "own handlers", "COMPLETED"),
    ],
)
def test_rude_code_harms_itself_only(
    stage: Stage, mischief: ModuleType, task: str, how: str, end: str | None
) -> None:  # E4, promises 1 and 3
    tree = stage.ready_tree(program="mischief")
    rude = getattr(mischief, task).send(how)
    took = stage.until(
        lambda: stage.task(rude.id)["state"] in ("COMPLETED", "FAILED"),
        within=12,
        what=f"{how}: its end",
        tree=tree,
    )
    state = stage.task(rude.id)["state"]
    print(how, state, f"{took:.2f}", stage.task(rude.id)["error"] and stage.task(rude.id)["error"]["code"])
    assert state == (end or state)
    assert mischief.quickly.send(7).result(timeout=10) == 7
    assert len(stage.effects("start", rude.id)) == 1
    began = time.monotonic()
    assert tree.stop() == 0
    print(f"{how}: left after {time.monotonic() - began:.2f} s")
    assert time.monotonic() - began < 2.0 * SLACK


def test_code_that_does_not_end_does_not_hold_up_the_leaving(
    stage: Stage, mischief: ModuleType
) -> None:  # B12, L7
    tree = stage.ready_tree(program="mischief", worker={"grace": "1s", "prefetch": 2})
    tasks = [
        task.send()
        for task in (mischief.endless_thread, mischief.deaf_coroutine, mischief.deaf_process)
        for _ in range(2)
    ]
    tasks.append(mischief.rude_in_a_thread.send("stray threads"))
    stage.until(lambda: len(stage.effects("start")) == 7, within=20, what="all run")
    began = time.monotonic()
    assert tree.stop() == 0
    took = time.monotonic() - began
    print(f"left after {took:.2f} s")
    assert took < 1.0 + 2.0 * 2  # on a slow machine
    for task in tasks[:6]:
        assert stage.task(task.id)["error"]["code"] == "WORKER_STOPPED"
        assert stage.task(task.id)["retry_count"] == 0
        assert [one["outcome"] for one in stage.attempts(task.id)] == ["FAILED"]


def test_a_thread_given_up_is_counted_among_those_who_may_have_killed_the_process(
    stage: Stage, deeds: ModuleType, mischief: ModuleType
) -> None:  # E13
    """Code that goes on after its attempt was given up: who is left in its process is not charged for what it does."""
    stage.ready_tree(program="mischief")
    stray = mischief.kill_the_process_later.send("die")
    assert stray.outcome(timeout=20 * SLACK).error.code == "TASK_TIMEOUT"
    innocent = deeds.wait_for_on_crash.send("end")
    stage.until(stage.started(innocent.id), within=20 * SLACK, what="the innocent runs")
    (pid,) = {line["pid"] for line in stage.effects("start")}
    stage.open_gate("die")
    stage.until(lambda: stage.recoveries(innocent.id), within=10 * SLACK, what="it is recovered")
    stage.open_gate("end")
    assert innocent.result(timeout=20 * SLACK) == "done"
    (recovery,) = stage.recoveries(innocent.id)
    assert (recovery["charge"], recovery["suspect"]) == ("loss", True)
    assert "SIGSEGV" in recovery["cause"]
    assert stage.task(innocent.id)["crash_count"] == 0
    assert {line["pid"] for line in stage.effects("start", innocent.id)} != {pid}
