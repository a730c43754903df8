"""Serial lines with real workers: strictly one at a time and in order, through kills, retries and second thoughts."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType

import psutil
import pytest

from tests.stories.stage import SLACK, Stage, program_of

pytestmark = pytest.mark.story
PROGRAM = "lines"


@pytest.fixture
def lines(stage: Stage) -> Iterator[ModuleType]:
    """The program with the lines as a sender imports it, in the surroundings of the stories' other program."""
    with program_of(stage, PROGRAM) as program:
        yield program


def starts(stage: Stage) -> list[int]:
    """The numbers of what began, in order."""
    return [line["number"] for line in stage.effects("start")]


def begun(stage: Stage, *numbers: int, within: float = 20) -> None:
    stage.until(lambda: starts(stage) == list(numbers), within=within, what=f"the starts are {numbers}")


def test_four_workers_take_a_queue_strictly_one_at_a_time_in_order(
    stage: Stage, lines: ModuleType
) -> None:  # F8
    for _ in range(2):
        stage.ready_tree(program=PROGRAM, worker={"processes": 2})
    handles = [lines.book.send(number) for number in range(60)]
    beside = lines.app.send_many([lines.pay.call(number) for number in range(100, 140)])
    assert [each.result(timeout=60) for each in handles] == list(range(60))
    assert len([each.result(timeout=60) for each in beside]) == 40
    mine = [line for line in stage.effects() if line["name"] == "book"]
    assert [(line["step"], line["number"]) for line in mine] == [
        (step, number) for number in range(60) for step in ("start", "end")
    ]
    print(f"{len({line['pid'] for line in mine})} worker processes shared the line")
    assert stage.recoveries() == []


class TestKill:
    @pytest.mark.parametrize("kind", ["queue", "function", "key"])
    def test_the_first_of_three_starts_again_before_the_second(
        self, stage: Stage, lines: ModuleType, kind: str
    ) -> None:  # F8
        task = {
            "queue": lines.book,
            "function": lines.close_month,
            "key": lines.pay.with_options(serial="customer-42"),
        }[kind]
        tree = stage.ready_tree(program=PROGRAM, worker={"processes": 2})
        first, second, third = task.send(1, "first"), task.send(2), task.send(3)
        begun(stage, 1)
        holder = stage.task(first.id)["claimed_by_worker_id"]
        (row,) = [row for row in stage.workers(tree) if row["id"] == holder]
        psutil.Process(row["pid"]).kill()
        begun(stage, 1, 1)
        assert [stage.task(each.id)["state"] for each in (second, third)] == ["PENDING"] * 2
        stage.open_gate("first")
        assert [each.result(timeout=20) for each in (first, second, third)] == [1, 2, 3]
        assert starts(stage) == [1, 1, 2, 3]

    def test_a_dead_tree_cannot_hold_the_line(self, stage: Stage, lines: ModuleType) -> None:  # F8
        doomed = stage.ready_tree(program=PROGRAM)
        handles = [lines.book.send(1, "first"), lines.book.send(2), lines.book.send(3)]
        begun(stage, 1)
        doomed.kill()
        stage.start_tree(program=PROGRAM)
        begun(stage, 1, 1, within=3 * SLACK)
        stage.open_gate("first")
        assert [each.result(timeout=20) for each in handles] == [1, 2, 3]
        assert starts(stage) == [1, 1, 2, 3]

    def test_poison_at_the_head_holds_it_for_so_many_crashes_only(
        self, stage: Stage, lines: ModuleType
    ) -> None:
        stage.ready_tree(program=PROGRAM)
        line = {"serial": "customer-42"}
        first, second = lines.poison.with_options(**line).send(1), lines.pay.with_options(**line).send(2)
        failed = first.outcome(timeout=60)
        assert failed.error.data["poison"] is True
        assert second.result(timeout=20) == 2
        assert starts(stage)[-1] == 2
        assert set(starts(stage)[:-1]) == {1}
        assert stage.recoveries(second.id) == []


class TestOrder:
    def test_a_head_that_waits_for_its_retry_blocks_the_others(
        self, stage: Stage, lines: ModuleType
    ) -> None:  # F8
        stage.ready_tree(program=PROGRAM)
        task = lines.pay.with_options(serial="customer-42")
        handles = [task.send(1, fails=1), task.send(2), task.send(3)]
        assert [each.result(timeout=20) for each in handles] == [1, 2, 3]
        assert starts(stage) == [1, 1, 2, 3]
        first, again, second, _ = stage.effects("start")
        assert again["at"] - first["at"] >= 2.0, "the retry waited, and the line with it"
        assert second["at"] >= again["at"]

    def test_two_keys_run_side_by_side(self, stage: Stage, lines: ModuleType) -> None:  # F8
        stage.ready_tree(program=PROGRAM)
        one, other = (lines.pay.with_options(serial=key) for key in ("customer-1", "customer-2"))
        held, behind = one.send(1, "one"), one.send(2)
        beside = [other.send(number) for number in (11, 12)]
        assert [each.result(timeout=20) for each in beside] == [11, 12]
        assert stage.task(held.id)["state"] == "RUNNING"
        assert stage.task(behind.id)["state"] == "PENDING"
        stage.open_gate("one")
        assert behind.result(timeout=20) == 2

    @pytest.mark.parametrize("how", ["cancelled while it waits", "cancelled while it runs", "expired"])
    def test_a_head_that_ends_in_another_way_frees_the_line(
        self, stage: Stage, lines: ModuleType, how: str
    ) -> None:  # F8
        stage.ready_tree(
            program=PROGRAM, options=("--queues", "default"), recovery={"check_interval_ms": 1_000}
        )
        task = lines.pay.with_options(serial="customer-42")
        match how:
            case "cancelled while it runs":
                head = task.send(1, "never")
                begun(stage, 1)
            case "cancelled while it waits":
                head = lines.pay.with_options(serial="customer-42", queue="unserved").send(1)
            case _:
                soon = datetime.now(UTC) + timedelta(seconds=2)
                head = lines.pay.with_options(serial="customer-42", queue="unserved", good_until=soon).send(1)
        second = task.send(2)
        plain = lines.pay.send(3)
        assert plain.result(timeout=20) == 3
        assert stage.task(second.id)["state"] == "PENDING"
        if how.startswith("cancelled"):
            head.cancel()
        assert second.result(timeout=20) == 2
        assert stage.task(head.id)["state"] == ("EXPIRED" if how == "expired" else "CANCELLED")

    def test_an_operators_retry_goes_to_the_end(self, stage: Stage, lines: ModuleType) -> None:  # F8
        stage.ready_tree(program=PROGRAM)
        line = {"serial": "customer-42"}
        task = lines.pay.with_options(**line)
        first, second, third = lines.refuse.with_options(**line).send(1), task.send(2, "second"), task.send(3)
        begun(stage, 1, 2)
        first.retry()
        stage.open_gate("second")
        assert [each.result(timeout=20) for each in (second, third)] == [2, 3]
        stage.until(stage.state_is(first.id, "FAILED"), within=20, what="it was run again")
        assert starts(stage) == [1, 2, 3, 1]
