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
from everbeat.worker import hook_news
from everbeat.worker.children import Child
from everbeat.worker.hook_line import HookDesk, HookLine
from everbeat.worker.hook_news import HookNewsLost
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

    def lost(self) -> list[HookNewsLost]:
        return [event for event in self.events if isinstance(event, HookNewsLost)]

    async def until(self, truth: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not truth():
                await asyncio.sleep(0.001)  # what is awaited goes through sockets and threads


@pytest.fixture
async def line() -> AsyncIterator[Line]:
    made = Line()
    yield made
    await made.line.close()
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


def telling(told: list[UUID]) -> HookRegistry:
    registry = HookRegistry()
    registry.other("on_interrupted", lambda given: told.append(given.task_id))
    return registry


async def test_news_that_waited_for_the_end_of_a_rest_are_told(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:  # F7
    monkeypatch.setattr("everbeat.worker.hook_line._MUTE_S", 0.5)
    told: list[UUID] = []
    doomed = await line.child("doomed", deaf=True)
    line.line._timeout_s = 20.0
    answer = asyncio.ensure_future(line.line.decide([context()]))
    await line.until(lambda: line.asked == ["doomed"])
    line.line.leave(doomed)
    await answer
    await line.child("ready", telling(told))
    news = [context() for _ in range(40)]
    await line.line.interrupted(news)
    assert line.line._is_mute
    await line.until(lambda: len(told) == 40)
    assert not line.line._is_mute
    assert sorted(told) == sorted(one.task_id for one in news)
    assert line.lost() == []


async def test_more_news_than_may_wait_push_out_the_oldest(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_news, "MOST_NEWS", 3)
    news = [context() for _ in range(5)]
    await line.line.interrupted(news)
    (lost,) = line.lost()
    assert lost.task_ids == tuple(one.task_id for one in news[:2])
    assert lost.problem == "was not told: no worker process is ready, and only 3 may wait"
    told: list[UUID] = []
    await line.child("ready", telling(told))
    await line.until(lambda: len(told) == 3)
    assert sorted(told) == sorted(one.task_id for one in news[2:])


async def test_what_was_told_to_a_process_that_died_of_it_is_named_and_told_to_nobody_else(
    line: Line,
) -> None:
    told: list[UUID] = []
    await line.child("other", telling(told))
    doomed = await line.child("doomed", deaf=True)
    doomed.heard_at += 10
    news = context()
    await line.line.interrupted([news])
    await line.until(lambda: line.asked == ["doomed"])
    line.line.leave(doomed)
    (lost,) = line.lost()
    assert (lost.hook, lost.task_ids) == ("on_interrupted", (news.task_id,))
    assert "died while it was told; hooks rest for 1m" in lost.problem
    later = context()
    await line.line.interrupted([later])
    await asyncio.sleep(0.1)  # only time can show that nothing happens in it
    assert told == []
    await line.line.close()
    assert line.lost()[1].task_ids == (later.task_id,)
    assert line.lost()[1].problem == "was not told: hooks rest, and the supervisor ends"


async def test_what_a_process_that_left_in_good_order_did_not_acknowledge_is_told_to_another(
    line: Line,
) -> None:
    told: list[UUID] = []
    leaver = await line.child("leaver", deaf=True)
    news = context()
    await line.line.interrupted([news])
    await line.until(lambda: line.asked == ["leaver"])
    leaver.has_left = True
    line.line.leave(leaver)
    await line.child("other", telling(told))
    await line.until(lambda: told == [news.task_id])
    assert line.lost() == []


async def test_what_nobody_could_be_told_is_reported_at_the_end(line: Line) -> None:
    news = context()
    summary = SweepSummary(
        worker_ids=("w1",), recovered_count=1, task_ids=(news.task_id,), sweeping_worker_id="s1"
    )
    await line.line.interrupted([news])
    await line.line.recovered(summary)
    await line.line.close()
    assert [(event.hook, event.task_ids, event.problem) for event in line.lost()] == [
        (hook, (news.task_id,), "was not told: no worker process is ready, and the supervisor ends")
        for hook in ("on_interrupted", "on_recovered")
    ]


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
