"""Streams of real workers: items are numbered without gaps through kills, reach readers exactly once, and zombies store none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest

from everbeat.domain.task.streams import StreamItem
from everbeat.errors import WaitTimeout
from tests.stories.scenario import BY_AGE, FAST, Scenario, program_of
from tests.variants import long_except

pytestmark = [pytest.mark.story, pytest.mark.timeout(180)]

ALONE = {"processes": 1, "process_concurrency": 1, "async_concurrency": 2, "thread_concurrency": 2}


@pytest.fixture
def emitting(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "emitting") as program:
        yield program


class Reader:
    """Follows a stream in a thread."""

    def __init__(self, handle: Any, name: str = "numbers", **options: Any) -> None:
        self.items: list[StreamItem[Any]] = []
        self.problem: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(handle, name, options), daemon=True)
        self._thread.start()

    def _read(self, handle: Any, name: str, options: dict[str, Any]) -> None:
        try:
            for item in handle.stream(name, **options):
                self.items.append(item)
        except BaseException as problem:  # noqa: BLE001 - reported by `end`
            self.problem = problem

    def end(self, within: float) -> list[StreamItem[Any]]:
        """Return all items after the reader has reached the end of the stream."""
        self._thread.join(within)
        assert not self._thread.is_alive(), "the reader has not reached the end of the stream"
        if self.problem is not None:
            raise self.problem
        return self.items


def stored(scenario: Scenario, task_id: UUID) -> list[dict[str, Any]]:
    return scenario.query(
        "select * from {schema}.stream_items where task_id = %s order by name, number", task_id
    )


@pytest.mark.parametrize("mode", long_except(["async", "in_thread", "in_process"], "in_process"))
def test_a_reader_sees_each_item_once_and_in_order_although_the_workers_are_killed(
    scenario: Scenario, emitting: ModuleType, mode: str
) -> None:
    doomed = scenario.ready_tree(program="emitting", worker=ALONE)
    task = getattr(emitting, f"emit_{mode}").send()
    reader = Reader(task)
    scenario.until(lambda: len(reader.items) >= 100, within=30, what="100 items have arrived")
    doomed.kill()
    scenario.ready_tree(program="emitting", worker=ALONE)
    items = reader.end(within=60)
    assert task.result(timeout=1) == "done"
    assert [item.number for item in items] == [*range(1, len(items) + 1)]
    assert [item.value["attempt"] for item in items] == [item.attempt for item in items]
    first = [item.value["n"] for item in items if item.attempt == 1]
    second = [item.value["n"] for item in items if item.attempt == 2]
    assert first == [*range(len(items) - emitting.SECOND_ATTEMPT)]
    assert second == [*range(emitting.SECOND_ATTEMPT)]
    assert [row["number"] for row in stored(scenario, task.id)] == [item.number for item in items]


@pytest.mark.long
def test_a_worker_that_was_declared_dead_stores_no_more_items(
    scenario: Scenario, emitting: ModuleType
) -> None:
    frozen = scenario.ready_tree(program="emitting", worker=ALONE, recovery=FAST | BY_AGE)
    task = emitting.emit_forever_then_once.send()
    scenario.until(lambda: len(stored(scenario, task.id)) >= 20, within=30, what="20 items are stored")
    frozen.freeze()
    scenario.ready_tree(program="emitting", worker=ALONE, recovery=FAST | BY_AGE)
    assert task.result(timeout=60) == "done"
    rows = stored(scenario, task.id)
    assert [row["attempt"] for row in rows] == [1] * (len(rows) - 1) + [2]
    frozen.thaw()
    scenario.until_logged(frozen, "leases_lost", within=30)
    assert frozen.stop() == 0  # it has written all that it wanted to write
    assert stored(scenario, task.id) == rows


def test_a_completed_task_has_all_its_items(scenario: Scenario, emitting: ModuleType) -> None:
    scenario.ready_tree(program="emitting", worker=ALONE)
    tasks = [emitting.emit_many.send(items) for items in (1, 499, 500, 501, 5_000)]
    for task, items in zip(tasks, (1, 499, 500, 501, 5_000), strict=True):
        assert task.result(timeout=30) == "done"
        assert [row["value"] for row in stored(scenario, task.id)] == [*range(items)]
        assert [(each.name, each.items) for each in task.streams()] == [("numbers", items)]


def test_a_reader_resumes_after_a_number(scenario: Scenario, emitting: ModuleType) -> None:
    scenario.ready_tree(program="emitting", worker=ALONE)
    task = emitting.emit_at_gates.send("one", "two", "three")
    first = next(iter(task.stream("gates", type=str)))
    assert (first.number, first.value, first.attempt) == (1, "one", 1)
    with pytest.raises(WaitTimeout):
        next(task.stream("gates", after=1, timeout="200ms"))
    later = Reader(task, "gates", after=1)
    for name in ("one", "two", "three"):
        scenario.open_gate(name)
    assert [(item.number, item.value) for item in later.end(within=30)] == [(2, "two"), (3, "three")]

    async def again() -> list[str]:
        return [item.value async for item in task.astream("gates", after=2)]

    assert asyncio.run(again()) == ["three"]
    assert [item.number for item in task.stream("gates", follow=False)] == [1, 2, 3]


def test_the_items_of_a_failed_task_can_be_read(scenario: Scenario, emitting: ModuleType) -> None:
    scenario.ready_tree(program="emitting", worker=ALONE)
    task = emitting.emit_and_fail.send(3)
    reader = Reader(task)
    scenario.until(lambda: len(reader.items) == 3, within=30, what="the items arrive while the task runs")
    assert scenario.task(task.id)["state"] == "RUNNING"
    scenario.open_gate("fail")
    assert [item.value for item in reader.end(within=30)] == [0, 1, 2]
    assert task.outcome(timeout=5).error.type == "ValueError"
