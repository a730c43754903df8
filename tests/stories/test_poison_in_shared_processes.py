"""Code that kills the process it shares with other tasks: it is identified, and its neighbours are not charged for it."""

from __future__ import annotations

from itertools import cycle
from types import ModuleType

import pytest

from tests.stories.scenario import SLACK, Scenario

pytestmark = pytest.mark.story
NEIGHBOURS = 9
TOGETHER = 40
ROUNDS_PER_TREE = 5
"""A tree whose processes keep dying replaces them after growing pauses."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rounds", [1, pytest.param(20, marks=pytest.mark.long)], ids=["1 round", "20 rounds"]
)
def test_a_poison_task_among_nine_neighbours_is_identified(
    scenario: Scenario, sample_tasks: ModuleType, rounds: int
) -> None:  # E13
    # Two rounds cover both executors and both ways to die; four rounds cover all combinations.
    ways = cycle(
        [
            (sample_tasks.poison_on_the_loop, "exit"),
            (sample_tasks.poison_in_thread, "signal"),
            (sample_tasks.poison_on_the_loop, "signal"),
            (sample_tasks.poison_in_thread, "exit"),
        ]
    )
    for number, (poison_task, how) in zip(range(rounds), ways, strict=False):
        if number % ROUNDS_PER_TREE == 0:
            for tree in scenario.trees[-1:]:
                assert tree.stop() == 0
            scenario.ready_tree(worker={"async_concurrency": 20, "thread_concurrency": 20})
        calls = [
            (sample_tasks.wait_for_on_crash, sample_tasks.wait_in_thread_on_crash)[n % 2].call(
                f"end {number}"
            )
            for n in range(NEIGHBOURS)
        ]
        poison, *neighbours = sample_tasks.app.send_many([poison_task.call(f"die {number}", how), *calls])
        ids = {str(each.id) for each in (poison, *neighbours)}
        scenario.until(
            lambda ids=ids: {line["task"] for line in scenario.effects("start")} >= ids,
            within=20 * SLACK,
            what=f"round {number}: ten run",
        )
        together = {line["pid"] for line in scenario.effects("start") if line["task"] in ids}
        assert len(together) == 1, "all ten in one process"
        scenario.open_gate(f"die {number}")
        scenario.until(
            lambda ids=ids: len({str(one["task_id"]) for one in scenario.recoveries()} & ids) == len(ids),
            within=10 * SLACK,
            what="all ten recovered",
        )
        scenario.open_gate(f"end {number}")
        failed = poison.outcome(timeout=60)
        assert (failed.error.code, failed.error.data["poison"]) == ("WORKER_CRASHED", True)
        assert [each.result(timeout=60) for each in neighbours] == ["done"] * NEIGHBOURS
        row = scenario.task(poison.id)
        assert (row["crash_count"], row["loss_count"]) == (2, 1)
        assert [each["outcome"] for each in scenario.attempts(poison.id)] == [
            "LOST",
            "CRASHED",
            "CRASHED",
        ]
        assert all(
            ("139" if how == "exit" else "SIGSEGV") in one["cause"] for one in scenario.recoveries(poison.id)
        )
        for each in neighbours:
            row = scenario.task(each.id)
            assert (row["crash_count"], row["loss_count"], row["suspect"]) == (0, 1, False)
            assert [one["outcome"] for one in scenario.attempts(each.id)] == ["LOST", "COMPLETED"]
            (recovery,) = scenario.recoveries(each.id)
            assert (recovery["charge"], recovery["suspect"]) == ("loss", True)


def test_tasks_claimed_after_a_poison_crash_are_not_affected(
    scenario: Scenario, sample_tasks: ModuleType
) -> None:  # E13
    """The shared process is replaced at once and continues, while the suspects run alone one after another."""
    scenario.ready_tree()
    poison, neighbour = sample_tasks.app.send_many(
        [sample_tasks.poison_on_the_loop.call("die", "exit"), sample_tasks.wait_for_on_crash.call("end")]
    )
    for each in (poison, neighbour):
        scenario.until(scenario.started(each.id), within=20, what="it runs")
    scenario.open_gate("die")
    scenario.until(lambda: len(scenario.recoveries()) >= 2, within=10, what="both recovered")
    later = sample_tasks.app.send_many([sample_tasks.quick.call(n) for n in range(20)])
    assert [each.result(timeout=20) for each in later] == list(range(20))
    assert {len(scenario.attempts(each.id)) for each in later} == {1}
    scenario.open_gate("end")
    assert neighbour.result(timeout=20) == "done"
    assert poison.outcome(timeout=20).error.data["poison"] is True


@pytest.mark.long
def test_two_lost_trees_make_no_task_a_suspect(scenario: Scenario, sample_tasks: ModuleType) -> None:  # E13
    """A lost host is not evidence against the code that ran on it: its tasks run again side by side."""
    doomed = scenario.ready_tree()
    tasks = sample_tasks.app.send_many([sample_tasks.wait_for_on_crash.call("end") for _ in range(TOGETHER)])
    for round_number in (1, 2):
        scenario.until(
            lambda number=round_number: len(scenario.effects("start")) == number * TOGETHER,
            within=20 * SLACK,
            what=f"all run for the {round_number}. time",
        )
        doomed.kill()
        doomed = scenario.ready_tree()
    scenario.until(
        lambda: len(scenario.effects("start")) == 3 * TOGETHER, within=10 * SLACK, what="all run side by side"
    )
    rows = scenario.query("select crash_count, loss_count, suspect from {schema}.tasks")
    assert {tuple(row.values()) for row in rows} == {(0, 2, False)}
    assert len({line["pid"] for line in scenario.effects("start")}) == 3, "each time all in one process"
    scenario.open_gate("end")
    assert [each.result(timeout=30) for each in tasks] == ["done"] * TOGETHER
