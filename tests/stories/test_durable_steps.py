"""What was done for good stays done, and who sleeps wakes: through kills of the process, of the whole tree, and without any worker."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from tests.stories.stage import SLACK, Stage, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}


@pytest.fixture
def durable(stage: Stage) -> Iterator[ModuleType]:
    with program_of(stage, "durable") as program:
        yield program


def is_suspended(stage: Stage, task_id: UUID) -> bool:
    row = stage.task(task_id)
    return row["state"] == "PENDING" and row["wake_at"] is not None


def steps(stage: Stage, task_id: UUID) -> list[dict[str, Any]]:
    return stage.query("select * from {schema}.steps where task_id = %s order by recorded_at", task_id)


@pytest.mark.parametrize("place", ["inside", "behind"])
def test_five_steps_killed_at_each_of_them(stage: Stage, durable: ModuleType, place: str) -> None:
    stage.ready_tree(program="durable", worker=ALONE)
    task = durable.pay_all.send(place)
    assert task.result(timeout=90) == 54_321
    paid = [line["step"] for line in stage.effects(task_id=task.id) if line["step"] != "start"]
    # Cut off between the effect and its record it is repeated, once; what is recorded is never done again.
    times = 2 if place == "inside" else 1
    assert paid == [f"pay {number}" for number in range(1, 6) for _ in range(times)]
    assert [one["result"] for one in steps(stage, task.id)] == [*durable.PRICES]
    attempts = [one["outcome"] for one in stage.attempts(task.id)]
    assert attempts == ["CRASHED"] * 5 + ["COMPLETED"]


def test_a_sleeper_wakes_on_time_though_its_whole_tree_was_killed(stage: Stage, durable: ModuleType) -> None:
    doomed = stage.ready_tree(program="durable", worker=ALONE)
    task = durable.sleep_for.send("8s")
    stage.until(lambda: is_suspended(stage, task.id), within=20, what="it sleeps")
    # Its process, of which there is one, is free for others meanwhile.
    assert durable.sleep_for.send("1ms").result(timeout=6) == "attempt 1"
    doomed.kill()
    stage.ready_tree(program="durable", worker=ALONE)
    assert stage.task(task.id)["state"] == "PENDING"
    assert task.result(timeout=30) == "attempt 2"
    sleep = next(one for one in steps(stage, task.id) if one["kind"] == "sleep")
    row = stage.task(task.id)
    # Claimed on time; the process it begins in is started only then.
    late_s, began_s = ((row[at] - sleep["due_at"]).total_seconds() for at in ("claimed_at", "started_at"))
    print(f"woken {late_s:.3f} s late, began after {began_s:.3f} s")
    assert 0 <= late_s < SLACK
    assert began_s < 5 * SLACK
    assert [line["step"] for line in stage.effects(task_id=task.id)] == ["start", "asleep", "start", "awake"]
    assert [one["outcome"] for one in stage.attempts(task.id)] == ["SUSPENDED", "COMPLETED"]
    assert (row["retry_count"], row["crash_count"], row["loss_count"]) == (0, 0, 0)


def test_a_signal_of_a_time_without_workers_is_received(stage: Stage, durable: ModuleType) -> None:
    doomed = stage.ready_tree(program="durable", worker=ALONE)
    early, waiting = durable.wait_for_word, durable.wait_for_word.send()
    stage.until(lambda: is_suspended(stage, waiting.id), within=20, what="it waits")
    assert durable.app.explain(waiting.id).reasons[0].text == "it waits for event 'word'"
    doomed.kill()
    never_started = early.send()
    durable.app.signal(waiting, "word", "come")
    durable.app.signal(never_started.id, "word", "already there")
    stage.ready_tree(program="durable", worker=ALONE)
    assert waiting.result(timeout=30) == "come"
    assert never_started.result(timeout=30) == "already there"
    assert [one["outcome"] for one in stage.attempts(never_started.id)] == ["COMPLETED"]


def test_a_cancel_reaches_the_children_of_one_that_sleeps(stage: Stage, durable: ModuleType) -> None:
    tree = stage.ready_tree(program="durable", worker=ALONE)
    parent = durable.beget.send(3)
    stage.until(lambda: is_suspended(stage, parent.id), within=20, what="it has children, and waits")
    children = durable.app.list_tasks(parent=parent.id)
    assert len(children) == 3
    stage.until(lambda: all(is_suspended(stage, child.id) for child in children), within=20, what="they wait")
    assert parent.cancel().verdict == "CANCELLED"
    assert {task.state for task in durable.app.list_tasks(parent=parent.id)} == {"CANCELLED"}
    assert tree.stop() == 0


def test_a_signal_to_a_workflow_reaches_each_of_its_tasks_that_waits(
    stage: Stage, durable: ModuleType
) -> None:
    doomed = stage.ready_tree(program="durable", worker=ALONE)
    flow = durable.app.workflow("words")
    first, second = flow.add(durable.wait_for_word), flow.add(durable.wait_for_word)
    last = flow.add(durable.wait_for_word).after(first, second)
    handle = flow.start(output=last)

    def waiting() -> list[dict[str, Any]]:
        return stage.query(
            "select id from {schema}.tasks where workflow_id = %s and state = 'PENDING' and waits_for = 'word'",
            handle.id,
        )

    stage.until(lambda: len(waiting()) == 2, within=20, what="two of them wait")
    doomed.kill()
    durable.app.signal(handle, "word", "go")
    stage.ready_tree(program="durable", worker=ALONE)
    assert handle.result(timeout=60) == "go", "the one that comes later has it, too"
    heard = stage.effects("heard")
    assert len({line["task"] for line in heard}) == len(heard) == 3
