"""Recorded steps stay done and sleeping tasks wake up: through kills of the process, of the whole tree, and without any worker."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from tests.stories.scenario import SLACK, Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}


@pytest.fixture
def durable(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "durable") as program:
        yield program


def is_suspended(scenario: Scenario, task_id: UUID) -> bool:
    row = scenario.task(task_id)
    return row["state"] == "PENDING" and row["wake_at"] is not None


def steps(scenario: Scenario, task_id: UUID) -> list[dict[str, Any]]:
    return scenario.query("select * from {schema}.steps where task_id = %s order by recorded_at", task_id)


@pytest.mark.parametrize("place", ["inside", pytest.param("behind", marks=pytest.mark.long)])
def test_five_steps_survive_a_kill_at_each_of_them(
    scenario: Scenario, durable: ModuleType, place: str
) -> None:
    scenario.ready_tree(program="durable", worker=ALONE)
    task = durable.pay_all.send(place)
    assert task.result(timeout=90) == 54_321
    paid = [line["step"] for line in scenario.effects(task_id=task.id) if line["step"] != "start"]
    # A kill between the effect and its record repeats the effect once; a recorded step is never repeated.
    times = 2 if place == "inside" else 1
    assert paid == [f"pay {number}" for number in range(1, 6) for _ in range(times)]
    assert [one["result"] for one in steps(scenario, task.id)] == [*durable.PRICES]
    attempts = [one["outcome"] for one in scenario.attempts(task.id)]
    assert attempts == ["CRASHED"] * 5 + ["COMPLETED"]


@pytest.mark.long
def test_the_tries_of_a_step_are_counted_through_the_death_of_its_process(
    scenario: Scenario, durable: ModuleType
) -> None:  # I2
    scenario.ready_tree(program="durable", worker=ALONE)
    task = durable.insist.send()
    outcome = task.outcome(timeout=60)
    assert outcome.error.type == "ConnectionError"
    # The first try; the first retry, which died; the same retry again; the second and last retry.
    assert [line["step"] for line in scenario.effects(task_id=task.id)] == ["try"] * 4
    assert [one["name"] for one in steps(scenario, task.id)] == ["reach#1/retry", "reach#1/retry#2"]
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["CRASHED", "FAILED"]


@pytest.mark.long
def test_a_sleeping_task_wakes_on_time_although_its_whole_tree_was_killed(
    scenario: Scenario, durable: ModuleType
) -> None:
    doomed = scenario.ready_tree(program="durable", worker=ALONE)
    task = durable.sleep_for.send("8s")
    scenario.until(lambda: is_suspended(scenario, task.id), within=20, what="it sleeps")
    # Its only task process is free for other tasks meanwhile.
    assert durable.sleep_for.send("1ms").result(timeout=6) == "attempt 1"
    doomed.kill()
    scenario.ready_tree(program="durable", worker=ALONE)
    assert scenario.task(task.id)["state"] == "PENDING"
    assert task.result(timeout=30) == "attempt 2"
    sleep = next(one for one in steps(scenario, task.id) if one["kind"] == "sleep")
    row = scenario.task(task.id)
    # The task is claimed on time; its process starts only then.
    late_s, began_s = ((row[at] - sleep["due_at"]).total_seconds() for at in ("claimed_at", "started_at"))
    print(f"woken {late_s:.3f} s late, began after {began_s:.3f} s")
    assert 0 <= late_s < SLACK
    assert began_s < 5 * SLACK
    assert [line["step"] for line in scenario.effects(task_id=task.id)] == [
        "start",
        "asleep",
        "start",
        "awake",
    ]
    assert [one["outcome"] for one in scenario.attempts(task.id)] == ["SUSPENDED", "COMPLETED"]
    assert (row["retry_count"], row["crash_count"], row["loss_count"]) == (0, 0, 0)


def test_a_signal_sent_while_no_worker_runs_is_received(scenario: Scenario, durable: ModuleType) -> None:
    doomed = scenario.ready_tree(program="durable", worker=ALONE)
    early, waiting = durable.wait_for_word, durable.wait_for_word.send()
    scenario.until(lambda: is_suspended(scenario, waiting.id), within=20, what="it waits")
    assert durable.app.explain(waiting.id).reasons[0].text == "it is waiting for event 'word'"
    doomed.kill()
    never_started = early.send()
    durable.app.signal(waiting, "word", "come")
    durable.app.signal(never_started.id, "word", "already there")
    scenario.ready_tree(program="durable", worker=ALONE)
    assert waiting.result(timeout=30) == "come"
    assert never_started.result(timeout=30) == "already there"
    assert [one["outcome"] for one in scenario.attempts(never_started.id)] == ["COMPLETED"]


def test_a_cancel_reaches_the_children_of_a_sleeping_task(scenario: Scenario, durable: ModuleType) -> None:
    tree = scenario.ready_tree(program="durable", worker=ALONE)
    parent = durable.beget.send(3)
    scenario.until(lambda: is_suspended(scenario, parent.id), within=20, what="it has children, and waits")
    children = durable.app.list_tasks(parent=parent.id)
    assert len(children) == 3
    scenario.until(
        lambda: all(is_suspended(scenario, child.id) for child in children), within=20, what="they wait"
    )
    assert parent.cancel().verdict == "CANCELLED"
    assert {task.state for task in durable.app.list_tasks(parent=parent.id)} == {"CANCELLED"}
    assert tree.stop() == 0


def test_a_signal_to_a_workflow_reaches_each_of_its_waiting_tasks(
    scenario: Scenario, durable: ModuleType
) -> None:
    doomed = scenario.ready_tree(program="durable", worker=ALONE)
    flow = durable.app.workflow("words")
    first, second = flow.add(durable.wait_for_word), flow.add(durable.wait_for_word)
    last = flow.add(durable.wait_for_word).after(first, second)
    handle = flow.start(output=last)

    def waiting() -> list[dict[str, Any]]:
        return scenario.query(
            "select id from {schema}.tasks where workflow_id = %s and state = 'PENDING' and waits_for = 'word'",
            handle.id,
        )

    scenario.until(lambda: len(waiting()) == 2, within=20, what="two of them wait")
    doomed.kill()
    durable.app.signal(handle, "word", "go")
    scenario.ready_tree(program="durable", worker=ALONE)
    assert handle.result(timeout=60) == "go", "a task that starts later receives it, too"
    heard = scenario.effects("heard")
    assert len({line["task"] for line in heard}) == len(heard) == 3
