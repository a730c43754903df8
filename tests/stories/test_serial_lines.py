"""Serial lines on real workers: strictly one task at a time and in order, through kills, retries and cancels."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import ModuleType

import psutil
import pytest

from tests.stories.scenario import SLACK, Scenario, program_of

pytestmark = pytest.mark.story
PROGRAM = "lines"


@pytest.fixture
def lines(scenario: Scenario) -> Iterator[ModuleType]:
    """Import the program with the serial lines as a sender does."""
    with program_of(scenario, PROGRAM) as program:
        yield program


def starts(scenario: Scenario) -> list[int]:
    """Return the numbers of the started tasks, in order."""
    return [line["number"] for line in scenario.effects("start")]


def begun(scenario: Scenario, *numbers: int, within: float = 20) -> None:
    scenario.until(lambda: starts(scenario) == list(numbers), within=within, what=f"the starts are {numbers}")


def test_four_workers_run_the_tasks_of_a_serial_queue_one_at_a_time_in_order(
    scenario: Scenario, lines: ModuleType
) -> None:  # F8
    for _ in range(2):
        scenario.ready_tree(program=PROGRAM, worker={"processes": 2})
    handles = [lines.book.send(number) for number in range(60)]
    beside = lines.app.send_many([lines.pay.call(number) for number in range(100, 140)])
    assert [each.result(timeout=60) for each in handles] == list(range(60))
    assert len([each.result(timeout=60) for each in beside]) == 40
    mine = [line for line in scenario.effects() if line["name"] == "book"]
    assert [(line["step"], line["number"]) for line in mine] == [
        (step, number) for number in range(60) for step in ("start", "end")
    ]
    print(f"{len({line['pid'] for line in mine})} worker processes shared the line")
    assert scenario.recoveries() == []


class TestKill:
    @pytest.mark.parametrize(
        "kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("queue", "function")), "key"]
    )
    def test_a_killed_head_of_a_serial_line_runs_again_before_the_second_task(
        self, scenario: Scenario, lines: ModuleType, kind: str
    ) -> None:  # F8
        task = {
            "queue": lines.book,
            "function": lines.close_month,
            "key": lines.pay.with_options(serial="customer-42"),
        }[kind]
        tree = scenario.ready_tree(program=PROGRAM, worker={"processes": 2})
        first, second, third = task.send(1, "first"), task.send(2), task.send(3)
        begun(scenario, 1)
        holder = scenario.task(first.id)["claimed_by_worker_id"]
        (row,) = [row for row in scenario.workers(tree) if row["id"] == holder]
        psutil.Process(row["pid"]).kill()
        begun(scenario, 1, 1)
        assert [scenario.task(each.id)["state"] for each in (second, third)] == ["PENDING"] * 2
        scenario.open_gate("first")
        assert [each.result(timeout=20) for each in (first, second, third)] == [1, 2, 3]
        assert starts(scenario) == [1, 1, 2, 3]

    @pytest.mark.long
    def test_a_dead_tree_does_not_block_its_serial_line(
        self, scenario: Scenario, lines: ModuleType
    ) -> None:  # F8
        doomed = scenario.ready_tree(program=PROGRAM)
        handles = [lines.book.send(1, "first"), lines.book.send(2), lines.book.send(3)]
        begun(scenario, 1)
        doomed.kill()
        scenario.start_tree(program=PROGRAM)
        begun(scenario, 1, 1, within=3 * SLACK)
        scenario.open_gate("first")
        assert [each.result(timeout=20) for each in handles] == [1, 2, 3]
        assert starts(scenario) == [1, 1, 2, 3]

    @pytest.mark.long
    def test_a_poison_head_blocks_its_serial_line_only_until_max_crashes(
        self, scenario: Scenario, lines: ModuleType
    ) -> None:
        scenario.ready_tree(program=PROGRAM)
        line = {"serial": "customer-42"}
        first, second = lines.poison.with_options(**line).send(1), lines.pay.with_options(**line).send(2)
        failed = first.outcome(timeout=60)
        assert failed.error.data["poison"] is True
        assert second.result(timeout=20) == 2
        assert starts(scenario)[-1] == 2
        assert set(starts(scenario)[:-1]) == {1}
        assert scenario.recoveries(second.id) == []


class TestOrder:
    @pytest.mark.long
    def test_a_head_that_waits_for_its_retry_blocks_its_line(
        self, scenario: Scenario, lines: ModuleType
    ) -> None:  # F8
        scenario.ready_tree(program=PROGRAM)
        task = lines.pay.with_options(serial="customer-42")
        handles = [task.send(1, fails=1), task.send(2), task.send(3)]
        assert [each.result(timeout=20) for each in handles] == [1, 2, 3]
        assert starts(scenario) == [1, 1, 2, 3]
        first, again, second, _ = scenario.effects("start")
        assert again["at"] - first["at"] >= 2.0, "the retry waited, and the line with it"
        assert second["at"] >= again["at"]

    def test_lines_with_different_keys_run_side_by_side(
        self, scenario: Scenario, lines: ModuleType
    ) -> None:  # F8
        scenario.ready_tree(program=PROGRAM)
        one, other = (lines.pay.with_options(serial=key) for key in ("customer-1", "customer-2"))
        held, behind = one.send(1, "one"), one.send(2)
        beside = [other.send(number) for number in (11, 12)]
        assert [each.result(timeout=20) for each in beside] == [11, 12]
        assert scenario.task(held.id)["state"] == "RUNNING"
        assert scenario.task(behind.id)["state"] == "PENDING"
        scenario.open_gate("one")
        assert behind.result(timeout=20) == 2

    @pytest.mark.parametrize(
        "how",
        [
            pytest.param("cancelled while it waits", marks=pytest.mark.long),
            "cancelled while it runs",
            "expired",
        ],
    )
    def test_a_head_that_is_cancelled_or_expires_frees_its_line(
        self, scenario: Scenario, lines: ModuleType, how: str
    ) -> None:  # F8
        scenario.ready_tree(
            program=PROGRAM, options=("--queues", "default"), recovery={"check_interval_ms": 1_000}
        )
        task = lines.pay.with_options(serial="customer-42")
        match how:
            case "cancelled while it runs":
                head = task.send(1, "never")
                begun(scenario, 1)
            case "cancelled while it waits":
                head = lines.pay.with_options(serial="customer-42", queue="unserved").send(1)
            case _:
                soon = datetime.now(UTC) + timedelta(seconds=2)
                head = lines.pay.with_options(serial="customer-42", queue="unserved", good_until=soon).send(1)
        second = task.send(2)
        plain = lines.pay.send(3)
        assert plain.result(timeout=20) == 3
        assert scenario.task(second.id)["state"] == "PENDING"
        if how.startswith("cancelled"):
            head.cancel()
        assert second.result(timeout=20) == 2
        assert scenario.task(head.id)["state"] == ("EXPIRED" if how == "expired" else "CANCELLED")

    def test_an_operator_retry_moves_the_task_to_the_end_of_its_line(
        self, scenario: Scenario, lines: ModuleType
    ) -> None:  # F8
        scenario.ready_tree(program=PROGRAM)
        line = {"serial": "customer-42"}
        task = lines.pay.with_options(**line)
        first, second, third = lines.refuse.with_options(**line).send(1), task.send(2, "second"), task.send(3)
        begun(scenario, 1, 2)
        first.retry()
        scenario.open_gate("second")
        assert [each.result(timeout=20) for each in (second, third)] == [2, 3]
        scenario.until(scenario.state_is(first.id, "FAILED"), within=20, what="it was run again")
        assert starts(scenario) == [1, 2, 3, 1]
