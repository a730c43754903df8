"""Code that kills the process it shares with others: it is found out, and its neighbours are not charged for it."""

from __future__ import annotations

from itertools import cycle
from types import ModuleType

import pytest

from tests.stories.stage import SLACK, Stage

pytestmark = pytest.mark.story
NEIGHBOURS = 9
TOGETHER = 40
ROUNDS_PER_TREE = 5
"""A tree whose processes keep dying replaces them after ever longer pauses."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "rounds", [2, pytest.param(20, marks=pytest.mark.long)], ids=["2 rounds", "20 rounds"]
)
def test_poison_among_nine_neighbours_in_one_process(
    stage: Stage, deeds: ModuleType, rounds: int
) -> None:  # E13
    # The first two have one each of both ways to run and both ways to die; four rounds have all of them.
    ways = cycle(
        [
            (deeds.poison_on_the_loop, "exit"),
            (deeds.poison_in_thread, "signal"),
            (deeds.poison_on_the_loop, "signal"),
            (deeds.poison_in_thread, "exit"),
        ]
    )
    for number, (poison_task, how) in zip(range(rounds), ways, strict=False):
        if number % ROUNDS_PER_TREE == 0:
            for tree in stage.trees[-1:]:
                assert tree.stop() == 0
            stage.ready_tree(worker={"async_concurrency": 20, "thread_concurrency": 20})
        calls = [
            (deeds.wait_for_on_crash, deeds.wait_in_thread_on_crash)[n % 2].call(f"end {number}")
            for n in range(NEIGHBOURS)
        ]
        poison, *neighbours = deeds.app.send_many([poison_task.call(f"die {number}", how), *calls])
        ids = {str(each.id) for each in (poison, *neighbours)}
        stage.until(
            lambda ids=ids: {line["task"] for line in stage.effects("start")} >= ids,
            within=20 * SLACK,
            what=f"round {number}: ten run",
        )
        together = {line["pid"] for line in stage.effects("start") if line["task"] in ids}
        assert len(together) == 1, "all ten in one process"
        stage.open_gate(f"die {number}")
        stage.until(
            lambda ids=ids: len({str(one["task_id"]) for one in stage.recoveries()} & ids) == len(ids),
            within=10 * SLACK,
            what="all ten recovered",
        )
        stage.open_gate(f"end {number}")
        failed = poison.outcome(timeout=60)
        assert (failed.error.code, failed.error.data["poison"]) == ("WORKER_CRASHED", True)
        assert [each.result(timeout=60) for each in neighbours] == ["done"] * NEIGHBOURS
        row = stage.task(poison.id)
        assert (row["crash_count"], row["loss_count"]) == (2, 1)
        assert [each["outcome"] for each in stage.attempts(poison.id)] == [
            "LOST",
            "CRASHED",
            "CRASHED",
        ]
        assert all(
            ("139" if how == "exit" else "SIGSEGV") in one["cause"] for one in stage.recoveries(poison.id)
        )
        for each in neighbours:
            row = stage.task(each.id)
            assert (row["crash_count"], row["loss_count"], row["suspect"]) == (0, 1, False)
            assert [one["outcome"] for one in stage.attempts(each.id)] == ["LOST", "COMPLETED"]
            (recovery,) = stage.recoveries(each.id)
            assert (recovery["charge"], recovery["suspect"]) == ("loss", True)


def test_who_came_later_is_not_drawn_into_it(stage: Stage, deeds: ModuleType) -> None:  # E13
    """The shared process is replaced at once and works on, while the suspects take their turns alone."""
    stage.ready_tree()
    poison, neighbour = deeds.app.send_many(
        [deeds.poison_on_the_loop.call("die", "exit"), deeds.wait_for_on_crash.call("end")]
    )
    for each in (poison, neighbour):
        stage.until(stage.started(each.id), within=20, what="it runs")
    stage.open_gate("die")
    stage.until(lambda: len(stage.recoveries()) >= 2, within=10, what="both recovered")
    later = deeds.app.send_many([deeds.quick.call(n) for n in range(20)])
    assert [each.result(timeout=20) for each in later] == list(range(20))
    assert {len(stage.attempts(each.id)) for each in later} == {1}
    stage.open_gate("end")
    assert neighbour.result(timeout=20) == "done"
    assert poison.outcome(timeout=20).error.data["poison"] is True


def test_two_lost_trees_make_nobody_a_suspect(stage: Stage, deeds: ModuleType) -> None:  # E13
    """A lost host is no evidence against the code that ran on it: its tasks run again side by side, not two at a time."""
    doomed = stage.ready_tree()
    tasks = deeds.app.send_many([deeds.wait_for_on_crash.call("end") for _ in range(TOGETHER)])
    for round_number in (1, 2):
        stage.until(
            lambda number=round_number: len(stage.effects("start")) == number * TOGETHER,
            within=20 * SLACK,
            what=f"all run for the {round_number}. time",
        )
        doomed.kill()
        doomed = stage.ready_tree()
    stage.until(
        lambda: len(stage.effects("start")) == 3 * TOGETHER, within=10 * SLACK, what="all run side by side"
    )
    rows = stage.query("select crash_count, loss_count, suspect from {schema}.tasks")
    assert {tuple(row.values()) for row in rows} == {(0, 2, False)}
    assert len({line["pid"] for line in stage.effects("start")}) == 3, "each time all in one process"
    stage.open_gate("end")
    assert [each.result(timeout=30) for each in tasks] == ["done"] * TOGETHER
