"""Test the log lines about tasks that a worker releases because of their argument names."""

from __future__ import annotations

import asyncio
from uuid import UUID

from everbeat.runtime.events import Event, EventBus, event_text
from everbeat.worker.declines import MOST_KINDS, Declines, TaskDeclined


class RecordedEvents:
    """Records the events of a bus; `wait_for(count)` waits for this many."""

    def __init__(self) -> None:
        self.bus = EventBus()
        self.events: list[TaskDeclined] = []
        self._changed = asyncio.Event()
        self.bus.subscribe(self._record)

    def _record(self, event: Event) -> None:
        assert isinstance(event, TaskDeclined)
        self.events.append(event)
        self._changed.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.events) < count:
                self._changed.clear()
                await self._changed.wait()


def test_similar_declined_tasks_are_logged_once_and_later_with_their_count() -> None:  # J2
    async def run() -> list[TaskDeclined]:
        recorded = RecordedEvents()
        declines = Declines(recorded.bus, every_s=0.05)
        for number in range(500):
            declines.note(UUID(int=number), "welcome", unknown=["locale"], missing=[])
        assert [event.count for event in recorded.events] == [1]
        await recorded.wait_for(2)
        declines.note(UUID(int=500), "welcome", unknown=["locale"], missing=[])
        await recorded.wait_for(3)
        return recorded.events

    first, folded, later = asyncio.run(run())
    assert (first.task_id, first.unknown, first.missing) == (UUID(int=0), ("locale",), ())
    assert (folded.task_id, folded.count) == (UUID(int=499), 499)
    assert (later.task_id, later.count) == (UUID(int=500), 1)
    text = event_text(first)
    assert text == f"task_declined task_id={UUID(int=0)} name=welcome unknown=locale missing= count=1"


def test_each_kind_of_declined_task_is_logged_and_close_reports_the_rest() -> None:  # J2
    async def run() -> list[TaskDeclined]:
        recorded = RecordedEvents()
        declines = Declines(recorded.bus)
        for unknown, missing in ((["a"], []), ([], ["b"]), (["a"], []), (["a"], ["b"])):
            declines.note(UUID(int=1), "welcome", unknown=unknown, missing=missing)
        declines.close()
        declines.close()
        return recorded.events

    assert [(event.unknown, event.missing, event.count) for event in asyncio.run(run())] == [
        (("a",), (), 1),
        ((), ("b",), 1),
        (("a",), ("b",), 1),
        (("a",), (), 1),
    ]


def test_invented_argument_names_cannot_exceed_the_limit_of_declined_kinds() -> None:  # J2
    async def run() -> list[TaskDeclined]:
        recorded = RecordedEvents()
        declines = Declines(recorded.bus)
        for number in range(10 * MOST_KINDS):
            declines.note(UUID(int=number), "welcome", unknown=[f"x{number}" * 1_000], missing=["m"] * 1_000)
        declines.close()
        return recorded.events

    events = asyncio.run(run())
    assert len(events) == MOST_KINDS + 2
    assert events[-1].count == 9 * MOST_KINDS - 1
    assert max(len(event_text(event)) for event in events) < 1_000
