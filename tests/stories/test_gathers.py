"""A task gathers many children: it holds no slot, each child is sent once, and the results survive kills."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from uuid import UUID

import pytest

from everbeat import TaskFailed
from tests.stories.scenario import Scenario, program_of

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 1, "thread_concurrency": 1}


@pytest.fixture
def gathering(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "gathering") as program:
        yield program


def children(scenario: Scenario, parent: UUID) -> list[dict[str, object]]:
    return scenario.query("select * from {schema}.tasks where parent_id = %s order by id", parent)


def is_suspended(scenario: Scenario, task_id: UUID) -> bool:
    row = scenario.task(task_id)
    return row["state"] == "PENDING" and row["wake_at"] is not None


def test_a_worker_with_one_slot_runs_a_thousand_children_while_their_parent_waits(
    scenario: Scenario, gathering: ModuleType
) -> None:  # K11
    scenario.ready_tree(program="gathering", worker=ALONE)
    task = gathering.sum_of_squares.send(1_000)
    assert task.result(timeout=90) == sum(number * number for number in range(1_000))
    attempts = [one["outcome"] for one in scenario.attempts(task.id)]
    assert attempts == ["SUSPENDED", "COMPLETED"], "the parent is woken only once"
    assert len(children(scenario, task.id)) == 1_000
    steps = [line["step"] for line in scenario.effects()]
    assert sorted(step for step in steps if step.startswith("square")) == sorted(
        f"square {number}" for number in range(1_000)
    )


def test_a_gather_survives_kills_of_the_whole_tree(scenario: Scenario, gathering: ModuleType) -> None:  # K11
    worker = {**ALONE, "async_concurrency": 4}
    tree = scenario.ready_tree(program="gathering", worker=worker)
    task = gathering.sum_of_squares.send(1_000)
    for share in (1, 200, 500, 800):
        scenario.until(
            lambda share=share: (
                len([line for line in scenario.effects() if line["step"] != "sum starts"]) >= share
            ),
            within=60,
            what=f"{share} children have started",
        )
        tree.kill()
        tree = scenario.ready_tree(program="gathering", worker=worker)
    assert task.result(timeout=90) == sum(number * number for number in range(1_000))
    sent = children(scenario, task.id)
    assert len(sent) == 1_000
    assert {one["state"] for one in sent} == {"COMPLETED"}
    # A child runs again only if its process was killed: at most as many as were held by a killed worker.
    runs = [line["step"] for line in scenario.effects() if line["step"].startswith("square")]
    again = len(runs) - len(set(runs))
    print(f"{again} children ran again after 4 kills")
    assert len(set(runs)) == 1_000
    recovered = scenario.query(
        "select count(*) as n from {schema}.attempts where outcome <> 'COMPLETED' and task_id <> %s", task.id
    )
    assert again <= recovered[0]["n"]


@pytest.mark.long
def test_kills_between_two_gathers_repeat_no_child(scenario: Scenario, gathering: ModuleType) -> None:
    scenario.ready_tree(program="gathering", worker=ALONE)
    task = gathering.twice.send(30)
    assert task.result(timeout=90) == [sum(number * number for number in range(30)), 0, 1]
    assert len(children(scenario, task.id)) == 32
    runs = [line["step"] for line in scenario.effects() if line["step"].startswith("square")]
    assert len(runs) == len(set(runs)) == 30


def test_a_failure_is_raised_after_all_children_have_ended(scenario: Scenario, gathering: ModuleType) -> None:
    scenario.ready_tree(program="gathering", worker=ALONE)
    task = gathering.strict.send()
    with pytest.raises(TaskFailed, match="3 is odd"):
        task.result(timeout=60)
    assert {one["state"] for one in children(scenario, task.id)} == {"COMPLETED", "FAILED"}


def test_a_child_that_is_retried_later_does_not_change_the_outcome_of_the_gather(
    scenario: Scenario, gathering: ModuleType
) -> None:
    scenario.ready_tree(program="gathering", worker=ALONE)
    task = gathering.mixed.send(naps="8s")
    scenario.until(
        lambda: any(
            one["kind"] == "sleep"
            for one in scenario.query("select * from {schema}.steps where task_id = %s", task.id)
        ),
        within=30,
        what="it has read the outcomes, and sleeps",
    )
    (failed,) = [one for one in children(scenario, task.id) if one["state"] == "FAILED"]
    scenario.query("update {schema}.tasks set name = 'square' where id = %s returning 1", failed["id"])
    retried = gathering.app.handle(failed["id"])
    retried.retry()
    assert retried.result(timeout=30) == 9
    assert task.result(timeout=60) == ["4", "ODD", "16"]


def test_a_cancel_of_the_parent_cancels_the_gathered_children(
    scenario: Scenario, gathering: ModuleType
) -> None:
    tree = scenario.ready_tree(program="gathering", worker=ALONE)
    task = gathering.sum_of_squares.send(600)
    scenario.until(lambda: is_suspended(scenario, task.id), within=30, what="it waits")
    assert task.cancel().verdict == "CANCELLED"
    states = [one["state"] for one in children(scenario, task.id)]
    assert set(states) <= {"CANCELLED", "COMPLETED", "RUNNING"}
    assert states.count("CANCELLED") > 0
    assert tree.stop() == 0
