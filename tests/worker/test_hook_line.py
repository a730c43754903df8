"""The line on which a supervisor asks its worker processes about recovery hooks: both ends, over real sockets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.client.hooks import HookRegistry
from everbeat.domain.hooks import (
    FailWithBackoff,
    HookAnswer,
    HookScopes,
    HooksUnreachable,
    NoAnswer,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.domain.inspection import Progress
from everbeat.domain.states import TaskState
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus, HookFailed
from everbeat.runtime.nursery import Nursery
from everbeat.services.hooks import LocalHooks
from everbeat.worker.children import Child
from everbeat.worker.hook_line import HookDesk, HookLine
from everbeat.worker.protocol import AskHooks, FromWorkerProcess, HookAnswers, TellHooks, ToWorkerProcess

NOON = datetime(2030, 1, 1, 12, 0, 0, 123_456, tzinfo=UTC)


def context(name: str = "work") -> RecoveryContext:
    return RecoveryContext(
        task_id=uuid4(), name=name, queue="default", state=TaskState.RUNNING, attempt=2, retry_count=1, crash_count=0, loss_count=1,
        flags={"slow": True}, progress=Progress(stage="packing", fraction=0.5), sweeping_worker_id="s1", previous_worker_id="w1",
        hostname=None, reason="worker_crashed", cause="gone", noticed_by="session",
    )  # fmt: skip


class Line:
    """A supervisor's end, and as many worker processes as a test asks for; `deaf` ones hear and do not answer."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.bus = EventBus()
        self.bus.subscribe(self.events.append)
        self.line = HookLine(events=self.bus, clock=SystemClock())
        self.line.open(HookScopes(every_task=True), timeout_s=0.3)
        self.nursery = Nursery(name="test")
        self.channels: list[AsyncChannel] = []
        self.asked: list[str] = []

    async def child(self, name: str, registry: HookRegistry | None = None, *, deaf: bool = False) -> Child:
        here, there = socket.socketpair()
        mine = await AsyncChannel.open(here, messages=FromWorkerProcess)
        theirs = await AsyncChannel.open(there, messages=ToWorkerProcess)
        self.channels += [mine, theirs]
        child = Child(SimpleNamespace(pid=len(self.channels)), mine, clock=SystemClock())  # type: ignore[arg-type]
        hooks = LocalHooks((registry or HookRegistry()).hooks(), timeout_s=5.0, events=self.bus)
        desk = HookDesk(hooks, channel=theirs, nursery=self.nursery)
        self.nursery.start(self._serve(name, theirs, desk, deaf=deaf), name=f"process {name}")
        self.nursery.start(self._hear(mine), name=f"line to {name}")
        self.line.join(child)
        return child

    async def _serve(self, name: str, channel: AsyncChannel, desk: HookDesk, *, deaf: bool) -> None:
        while True:
            message: ToWorkerProcess = await channel.receive()
            self.asked.append(name)
            if not deaf and isinstance(message, AskHooks | TellHooks):
                desk.obey(message)

    async def _hear(self, channel: AsyncChannel) -> None:
        while True:
            message = await channel.receive()
            if isinstance(message, HookAnswers):
                self.line.hear(message)

    def problems(self) -> list[str]:
        return [event.problem for event in self.events if isinstance(event, HookFailed)]


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    made = Line()
    yield made
    await made.nursery.close()
    for channel in made.channels:
        await channel.aclose()


def answering(answer: Callable[[RecoveryContext], HookAnswer | Any]) -> HookRegistry:
    registry = HookRegistry()
    registry.deciding(answer)
    return registry


async def test_answers_come_back_as_they_were_given(line: Line) -> None:  # F7
    seen: list[RecoveryContext] = []
    answers: dict[str, HookAnswer] = {
        "at": Reschedule(NOON, 3), "in": Reschedule(timedelta(milliseconds=1_500)), "again": FailWithBackoff(), "skip": Skip(),
    }  # fmt: skip

    async def answer(given: RecoveryContext) -> HookAnswer:
        seen.append(given)
        return answers[given.name]

    await line.child("a", answering(answer))
    asked = [context(name) for name in answers]
    found = await line.line.decide(asked)
    assert {each.name: found[each.task_id] for each in asked} == answers
    assert sorted(seen, key=lambda each: each.name) == sorted(asked, key=lambda each: each.name)
    assert line.problems() == []


async def test_what_kept_a_hook_from_answering_comes_over_the_line(line: Line) -> None:
    def boom(_: RecoveryContext) -> HookAnswer:
        raise ValueError("boom")

    await line.child("a", answering(boom))
    assert list((await line.line.decide([context()])).values()) == [NoAnswer("raised ValueError: boom")]


async def test_many_are_asked_in_groups_that_fit_into_one_limit(line: Line) -> None:
    await line.child("a", answering(lambda _: Skip()))
    asked = [context() for _ in range(40)]
    assert len(await line.line.decide(asked)) == 40
    assert line.asked == ["a"] * 3


async def test_one_that_does_not_answer_is_replaced_once(line: Line) -> None:
    await line.child("willing", answering(lambda _: Skip()))
    deaf = await line.child("deaf", deaf=True)
    deaf.heard_at += 10  # the one that was heard of last is asked first
    asked = context()
    line.line._timeout_s = -0.8  # a second on the way comes on top: the test need not wait longer
    assert await line.line.decide([asked]) == {asked.task_id: Skip()}
    assert line.asked == ["deaf", "willing"]
    assert line.problems() == []


async def test_when_nobody_answers_it_is_default_and_reported(line: Line) -> None:
    for name in ("one", "two", "three"):
        await line.child(name, deaf=True)
    line.line._timeout_s = -0.8  # a second on the way comes on top: the test need not wait longer
    asked = context()
    (reply,) = (await line.line.decide([asked])).values()
    assert isinstance(reply, NoAnswer)
    assert "was not answered by worker process" in reply.problem, "it is kept with the recovery"
    assert len(line.asked) == 2
    (event,) = [event for event in line.events if isinstance(event, HookFailed)]
    assert "was not answered by worker process" in event.problem
    assert (event.task_id, event.task_name) == (asked.task_id, "work")


async def test_whoever_becomes_ready_in_time_is_asked(line: Line) -> None:
    asked = context()
    answer = asyncio.ensure_future(line.line.decide([asked]))
    await asyncio.sleep(0)  # it waits
    await line.child("late", answering(lambda _: Skip()))
    assert await answer == {asked.task_id: Skip()}


async def test_without_any_process_a_decision_is_put_off_for_a_minute(line: Line) -> None:
    with pytest.raises(HooksUnreachable):
        await line.line.decide([context()])
    assert line.problems() == []
    await line.child("ready at last", answering(lambda _: Skip()))
    assert list((await line.line.decide([context()])).values()) == [Skip()]


async def test_after_a_minute_without_any_process_it_is_default(line: Line) -> None:
    with pytest.raises(HooksUnreachable):
        await line.line.decide([context()])
    assert line.line._nobody_since is not None
    line.line._nobody_since -= 60.0
    (reply,) = (await line.line.decide([context()])).values()
    assert reply == NoAnswer("was not asked: no worker process is ready")
    assert line.problems() == ["was not asked: no worker process is ready"]


async def test_a_process_that_left_in_good_order_is_no_reason_to_decide_without_the_hook(line: Line) -> None:
    leaver = await line.child("leaver", deaf=True)
    answer = asyncio.ensure_future(line.line.decide([context()]))
    while line.asked != ["leaver"]:
        await asyncio.sleep(0.001)  # the question is on its way
    leaver.has_left = True
    line.line.leave(leaver)
    with pytest.raises(HooksUnreachable):
        await answer
    assert line.problems() == []


async def test_news_wait_for_the_first_process_that_is_ready(line: Line) -> None:
    await line.line.interrupted([context()])
    await line.child("late")
    while line.asked == []:
        await asyncio.sleep(0.001)  # the news is on its way
    assert line.problems() == []


async def test_after_a_death_while_it_was_asked_nobody_else_is_asked_for_a_minute(line: Line) -> None:
    await line.child("other", answering(lambda _: Skip()))
    doomed = await line.child("doomed", deaf=True)
    doomed.heard_at += 10
    line.line._timeout_s = 20.0  # a second on the way comes on top: the test need not wait longer
    answer = asyncio.ensure_future(line.line.decide([context()]))
    while line.asked != ["doomed"]:
        await asyncio.sleep(0.001)  # the question is on its way
    line.line.leave(doomed)
    (reply,) = (await answer).values()
    assert isinstance(reply, NoAnswer)
    assert "died while it was asked" in reply.problem
    assert list((await line.line.decide([context()])).values()) == [NoAnswer("was not asked: hooks rest")]
    assert line.asked == ["doomed"]
    assert "died while it was asked" in line.problems()[0]


async def test_what_happened_is_told(line: Line) -> None:  # F7
    told: list[UUID] = []
    passes: list[SweepSummary] = []
    done = threading.Event()
    registry = HookRegistry()

    def note(summary: SweepSummary) -> None:
        passes.append(summary)
        done.set()

    registry.other("on_interrupted", lambda given: told.append(given.task_id))
    registry.other("on_recovered", note)
    await line.child("a", registry)
    asked = context()
    summary = SweepSummary(
        worker_ids=("w1",), recovered_count=1, task_ids=(asked.task_id,), sweeping_worker_id="s1"
    )
    await line.line.interrupted([asked])
    await line.line.recovered(summary)
    assert await asyncio.to_thread(done.wait, 20)
    assert passes == [summary]
    while told != [asked.task_id]:
        await asyncio.sleep(0.001)  # the two are told side by side
