"""Test the channel on which a supervisor calls recovery hooks in its worker processes, over real sockets."""

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

from everbeat.client.registry import HookRegistry
from everbeat.domain.inspection import Progress
from everbeat.domain.recovery.hooks import (
    FailWithBackoff,
    HookAnswer,
    HookScopes,
    HookSet,
    HooksUnreachable,
    NoAnswer,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.domain.task.states import TaskState
from everbeat.domain.tracing.tracing import Tracing
from everbeat.protocol import AskHooks, FromWorkerProcess, HookAnswers, TellHooks, ToWorkerProcess
from everbeat.recovering.hooks import LocalHooks
from everbeat.recovering.traced import RecoveriesNotTraced
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, EventBus, HookFailed
from everbeat.runtime.task_scope import TaskScope
from everbeat.runtime.tracing_log import log_tracer_failure
from everbeat.supervisor import remote_hooks
from everbeat.supervisor.processes import WorkerChild
from everbeat.supervisor.remote_hooks import HookNewsLost, RemoteHooks
from everbeat.worker.process import HookRequests

NOON = datetime(2030, 1, 1, 12, 0, 0, 123_456, tzinfo=UTC)


def context(name: str = "work") -> RecoveryContext:
    return RecoveryContext(
        task_id=uuid4(), name=name, queue="default", state=TaskState.RUNNING, attempt=2, retry_count=1, crash_count=0, loss_count=1,
        flags={"slow": True}, progress=Progress(stage="packing", fraction=0.5), sweeping_worker_id="s1", previous_worker_id="w1",
        hostname=None, reason="worker_crashed", cause="gone", noticed_by="session",
    )  # fmt: skip


class HookChannel:
    """The supervisor's side and any number of worker processes; `silent` ones read calls and do not answer."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.bus = EventBus()
        self.bus.subscribe(self.events.append)
        self.hooks = RemoteHooks(ProcessEnvironment(events=self.bus))
        self.hooks.open(HookScopes(every_task=True, has_interrupted_hook=True), timeout_s=0.3)
        self.scope = TaskScope(name="test")
        self.channels: list[AsyncChannel] = []
        self.asked: list[str] = []

    async def child(
        self, name: str, registry: HookRegistry | None = None, *, silent: bool = False
    ) -> WorkerChild:
        here, there = socket.socketpair()
        mine = await AsyncChannel.open(here, messages=FromWorkerProcess)
        theirs = await AsyncChannel.open(there, messages=ToWorkerProcess)
        self.channels += [mine, theirs]
        child = WorkerChild(SimpleNamespace(pid=len(self.channels)), mine, clock=SystemClock())  # type: ignore[arg-type]
        hooks = LocalHooks((registry or HookRegistry()).hooks(), timeout_s=5.0, events=self.bus)
        requests = HookRequests(hooks, channel=theirs, scope=self.scope)
        self.scope.start(self._serve(name, theirs, requests, silent=silent), name=f"process {name}")
        self.scope.start(self._hear(mine), name=f"channel to {name}")
        self.hooks.join(child)
        return child

    async def _serve(self, name: str, channel: AsyncChannel, requests: HookRequests, *, silent: bool) -> None:
        while True:
            message: ToWorkerProcess = await channel.receive()
            self.asked.append(name)
            if not silent and isinstance(message, AskHooks | TellHooks):
                requests.obey(message)

    async def _hear(self, channel: AsyncChannel) -> None:
        while True:
            message = await channel.receive()
            if isinstance(message, HookAnswers):
                self.hooks.receive(message)

    def problems(self) -> list[str]:
        return [event.problem for event in self.events if isinstance(event, HookFailed)]

    def lost(self) -> list[HookNewsLost]:
        return [event for event in self.events if isinstance(event, HookNewsLost)]

    async def until(self, truth: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not truth():
                await asyncio.sleep(0.001)  # the awaited change comes through sockets and threads


@pytest.fixture
async def channel() -> AsyncIterator[HookChannel]:
    made = HookChannel()
    yield made
    await made.hooks.close()
    await made.scope.close()
    for channel in made.channels:
        await channel.aclose()


def answering(answer: Callable[[RecoveryContext], HookAnswer | Any]) -> HookRegistry:
    registry = HookRegistry()
    registry.deciding(answer)
    return registry


async def test_remote_hooks_return_every_kind_of_answer_unchanged(channel: HookChannel) -> None:  # F7
    seen: list[RecoveryContext] = []
    answers: dict[str, HookAnswer] = {
        "at": Reschedule(NOON, 3), "in": Reschedule(timedelta(milliseconds=1_500)), "again": FailWithBackoff(), "skip": Skip(),
    }  # fmt: skip

    async def answer(given: RecoveryContext) -> HookAnswer:
        seen.append(given)
        return answers[given.name]

    await channel.child("a", answering(answer))
    asked = [context(name) for name in answers]
    found = await channel.hooks.decide(asked)
    assert {each.name: found[each.task_id] for each in asked} == answers
    assert sorted(seen, key=lambda each: each.name) == sorted(asked, key=lambda each: each.name)
    assert channel.problems() == []


async def test_an_exception_of_a_remote_hook_is_returned_as_its_problem(channel: HookChannel) -> None:
    def boom(_: RecoveryContext) -> HookAnswer:
        raise ValueError("boom")

    await channel.child("a", answering(boom))
    assert list((await channel.hooks.decide([context()])).values()) == [NoAnswer("raised ValueError: boom")]


async def test_remote_hook_calls_are_grouped_to_fit_into_one_timeout(channel: HookChannel) -> None:
    await channel.child("a", answering(lambda _: Skip()))
    asked = [context() for _ in range(40)]
    assert len(await channel.hooks.decide(asked)) == 40
    assert channel.asked == ["a"] * 3


async def test_a_worker_that_does_not_answer_a_hook_call_is_replaced_once(channel: HookChannel) -> None:
    await channel.child("willing", answering(lambda _: Skip()))
    silent = await channel.child("silent", silent=True)
    silent.heard_at += 10  # the worker with the latest message gets the first call
    asked = context()
    channel.hooks._timeout_s = -0.8  # the channel adds a second, so the test does not wait longer
    assert await channel.hooks.decide([asked]) == {asked.task_id: Skip()}
    assert channel.asked == ["silent", "willing"]
    assert channel.problems() == []


async def test_a_hook_call_without_an_answer_counts_as_default_and_is_reported(channel: HookChannel) -> None:
    for name in ("one", "two", "three"):
        await channel.child(name, silent=True)
    channel.hooks._timeout_s = -0.8  # the channel adds a second, so the test does not wait longer
    asked = context()
    (reply,) = (await channel.hooks.decide([asked])).values()
    assert isinstance(reply, NoAnswer)
    assert "was not answered by worker process" in reply.problem, "the problem is stored with the recovery"
    assert len(channel.asked) == 2
    (event,) = [event for event in channel.events if isinstance(event, HookFailed)]
    assert "was not answered by worker process" in event.problem
    assert (event.task_id, event.task_name) == (asked.task_id, "work")


async def test_a_worker_that_becomes_ready_in_time_gets_the_hook_call(channel: HookChannel) -> None:
    asked = context()
    answer = asyncio.ensure_future(channel.hooks.decide([asked]))
    await asyncio.sleep(0)  # lets the call wait for a worker
    await channel.child("late", answering(lambda _: Skip()))
    assert await answer == {asked.task_id: Skip()}


async def test_a_decision_without_a_ready_worker_is_postponed(channel: HookChannel) -> None:
    with pytest.raises(HooksUnreachable):
        await channel.hooks.decide([context()])
    assert channel.problems() == []
    await channel.child("ready at last", answering(lambda _: Skip()))
    assert list((await channel.hooks.decide([context()])).values()) == [Skip()]


async def test_a_decision_without_a_ready_worker_for_a_minute_counts_as_default(channel: HookChannel) -> None:
    with pytest.raises(HooksUnreachable):
        await channel.hooks.decide([context()])
    assert channel.hooks._absent_since is not None
    channel.hooks._absent_since -= 60.0
    (reply,) = (await channel.hooks.decide([context()])).values()
    assert reply == NoAnswer("was not asked: no worker process is ready")
    assert channel.problems() == ["was not asked: no worker process is ready"]


async def test_a_worker_that_left_in_good_order_does_not_lead_to_a_default_decision(
    channel: HookChannel,
) -> None:
    leaver = await channel.child("leaver", silent=True)
    answer = asyncio.ensure_future(channel.hooks.decide([context()]))
    while channel.asked != ["leaver"]:
        await asyncio.sleep(0.001)  # the call is on its way
    leaver.has_left = True
    channel.hooks.leave(leaver)
    with pytest.raises(HooksUnreachable):
        await answer
    assert channel.problems() == []


async def test_hook_notifications_wait_for_the_first_ready_worker(channel: HookChannel) -> None:
    await channel.hooks.interrupted([context()])
    await channel.child("late")
    while channel.asked == []:
        await asyncio.sleep(0.001)  # the notification is on its way
    assert channel.problems() == []


def telling(told: list[UUID]) -> HookRegistry:
    registry = HookRegistry()
    registry.other("on_interrupted", lambda given: told.append(given.task_id))
    return registry


async def test_hook_notifications_are_delivered_after_the_pause_that_follows_a_death(
    channel: HookChannel, monkeypatch: pytest.MonkeyPatch
) -> None:  # F7
    monkeypatch.setattr("everbeat.supervisor.remote_hooks.REST_S", 0.5)
    told: list[UUID] = []
    doomed = await channel.child("doomed", silent=True)
    channel.hooks._timeout_s = 20.0
    answer = asyncio.ensure_future(channel.hooks.decide([context()]))
    await channel.until(lambda: channel.asked == ["doomed"])
    channel.hooks.leave(doomed)
    await answer
    await channel.child("ready", telling(told))
    news = [context() for _ in range(40)]
    await channel.hooks.interrupted(news)
    assert channel.hooks._processes.rest_s > 0
    await channel.until(lambda: len(told) == 40)
    assert channel.hooks._processes.rest_s <= 0
    assert sorted(told) == sorted(one.task_id for one in news)
    assert channel.lost() == []


async def test_the_oldest_hook_notifications_are_dropped_above_the_limit(
    channel: HookChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_hooks, "MOST_NEWS", 3)
    news = [context() for _ in range(5)]
    await channel.hooks.interrupted(news)
    (lost,) = channel.lost()
    assert lost.task_ids == tuple(one.task_id for one in news[:2])
    assert lost.problem == "was not called: no worker process is ready, and only 3 calls can wait"
    told: list[UUID] = []
    await channel.child("ready", telling(told))
    await channel.until(lambda: len(told) == 3)
    assert sorted(told) == sorted(one.task_id for one in news[2:])


async def test_an_app_with_tracers_only_reports_missing_spans_and_no_lost_hook(channel: HookChannel) -> None:
    channel.hooks.open(HookSet(tracing=Tracing([], log_tracer_failure)).scopes, timeout_s=0.3)
    news = context()
    await channel.hooks.interrupted([news])
    await channel.hooks.close()
    assert channel.lost() == []
    (lost,) = [event for event in channel.events if isinstance(event, RecoveriesNotTraced)]
    assert (lost.count, lost.task_ids) == (1, (news.task_id,))
    assert lost.problem == "was not called: no worker process is ready, and the supervisor is shutting down"


async def test_a_hook_notification_that_killed_its_worker_is_reported_and_not_repeated(
    channel: HookChannel,
) -> None:
    told: list[UUID] = []
    await channel.child("other", telling(told))
    doomed = await channel.child("doomed", silent=True)
    doomed.heard_at += 10
    news = context()
    await channel.hooks.interrupted([news])
    await channel.until(lambda: channel.asked == ["doomed"])
    channel.hooks.leave(doomed)
    (lost,) = channel.lost()
    assert (lost.hook, lost.task_ids) == ("on_interrupted", (news.task_id,))
    assert "died during the call; hooks rest for 1m" in lost.problem
    later = context()
    await channel.hooks.interrupted([later])
    await asyncio.sleep(0.1)  # a time in which nothing must happen
    assert told == []
    await channel.hooks.close()
    assert channel.lost()[1].task_ids == (later.task_id,)
    assert channel.lost()[1].problem == "was not called: hooks rest, and the supervisor is shutting down"


async def test_an_unacknowledged_hook_notification_of_a_worker_that_left_goes_to_another(
    channel: HookChannel,
) -> None:
    told: list[UUID] = []
    leaver = await channel.child("leaver", silent=True)
    news = context()
    await channel.hooks.interrupted([news])
    await channel.until(lambda: channel.asked == ["leaver"])
    leaver.has_left = True
    channel.hooks.leave(leaver)
    await channel.child("other", telling(told))
    await channel.until(lambda: told == [news.task_id])
    assert channel.lost() == []


async def test_undelivered_hook_notifications_are_reported_at_close(channel: HookChannel) -> None:
    news = context()
    summary = SweepSummary(
        worker_ids=("w1",), recovered_count=1, task_ids=(news.task_id,), sweeping_worker_id="s1"
    )
    await channel.hooks.interrupted([news])
    await channel.hooks.recovered(summary)
    await channel.hooks.close()
    assert [(event.hook, event.task_ids, event.problem) for event in channel.lost()] == [
        (
            hook,
            (news.task_id,),
            "was not called: no worker process is ready, and the supervisor is shutting down",
        )
        for hook in ("on_interrupted", "on_recovered")
    ]


async def test_after_a_worker_died_during_a_hook_call_no_worker_gets_one_for_a_minute(
    channel: HookChannel,
) -> None:
    await channel.child("other", answering(lambda _: Skip()))
    doomed = await channel.child("doomed", silent=True)
    doomed.heard_at += 10
    channel.hooks._timeout_s = 20.0  # the channel adds a second, so the test does not wait longer
    answer = asyncio.ensure_future(channel.hooks.decide([context()]))
    while channel.asked != ["doomed"]:
        await asyncio.sleep(0.001)  # the call is on its way
    channel.hooks.leave(doomed)
    (reply,) = (await answer).values()
    assert isinstance(reply, NoAnswer)
    assert "died while it was asked" in reply.problem
    assert list((await channel.hooks.decide([context()])).values()) == [NoAnswer("was not asked: hooks rest")]
    assert channel.asked == ["doomed"]
    assert "died while it was asked" in channel.problems()[0]


async def test_hook_notifications_carry_the_interrupted_tasks_and_the_summary(
    channel: HookChannel,
) -> None:  # F7
    told: list[UUID] = []
    passes: list[SweepSummary] = []
    done = threading.Event()
    registry = HookRegistry()

    def note(summary: SweepSummary) -> None:
        passes.append(summary)
        done.set()

    registry.other("on_interrupted", lambda given: told.append(given.task_id))
    registry.other("on_recovered", note)
    await channel.child("a", registry)
    asked = context()
    summary = SweepSummary(
        worker_ids=("w1",), recovered_count=1, task_ids=(asked.task_id,), sweeping_worker_id="s1"
    )
    await channel.hooks.interrupted([asked])
    await channel.hooks.recovered(summary)
    assert await asyncio.to_thread(done.wait, 20)
    assert passes == [summary]
    while told != [asked.task_id]:
        await asyncio.sleep(0.001)  # the two hooks run concurrently
