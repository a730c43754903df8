"""Recovery hooks of a supervisor: it imports no user code, so it asks one of its worker processes.

What lives here: both ends of that line. What may not: calling the functions (whoever made the `HookRunner` does), and what
follows from an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from everbeat.domain.duration import spelled
from everbeat.domain.hooks import (
    CALLS_AT_ONCE,
    DEFAULT,
    FailWithBackoff,
    HookReply,
    HookRunner,
    HookScopes,
    HooksUnreachable,
    NoAnswer,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, HookFailed
from everbeat.runtime.frames import ChannelError
from everbeat.runtime.nursery import Nursery
from everbeat.worker.children import Child
from everbeat.worker.hook_news import HookNews
from everbeat.worker.protocol import (
    AskHooks,
    HookAnswers,
    HookWord,
    TellHooks,
)

_ON_THE_WAY_S: Final = 1.0
_MUTE_S: Final = 60.0
_TRIES: Final = 2
_PATIENCE_S: Final = 60.0


class HookLine:
    """The supervisor's end, which is its `HookRunner`. A child that does not answer is replaced once by another.

    One that dies while it is asked may have died of the hook: for a minute nobody else is asked.
    """

    def __init__(self, *, events: EventBus, clock: Clock) -> None:
        self.scopes = HookScopes()
        self._events = events
        self._clock = clock
        self._timeout_s = 5.0
        self._children: list[Child] = []
        self._somebody = asyncio.Event()
        self._calls: dict[int, tuple[Child, asyncio.Future[HookAnswers | None]]] = {}
        self._last_call = 0
        self._mute_until = 0.0
        self._nobody_since: float | None = None
        self._news = HookNews(
            ready=self._ready,
            rests_until=lambda: self._mute_until,
            new_call=self._new_call,
            events=events,
            clock=clock,
        )

    def open(self, scopes: HookScopes, *, timeout_s: float) -> None:
        """What the first worker process said there is to call."""
        self.scopes, self._timeout_s = scopes, timeout_s

    def join(self, child: Child) -> None:
        """This process is ready to be asked."""
        self._children.append(child)
        self._nobody_since = None
        self._somebody.set()
        self._news.look()

    def leave(self, child: Child) -> None:
        """This process has ended."""
        if child in self._children:
            self._children.remove(child)
        if not self._children:
            self._somebody.clear()
        for asked, reply in self._calls.values():
            if asked is child and not reply.done():
                reply.set_result(None)
        self._news.left(child)

    def hear(self, answers: HookAnswers) -> None:
        """A process has answered; one that comes too late is not waited for any more."""
        self._news.heard(answers.call)
        _, reply = self._calls.get(answers.call, (None, None))
        if reply is not None and not reply.done():
            reply.set_result(answers)

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """The answers by task id. Raises HooksUnreachable while no process is ready, for a minute."""
        answers: dict[UUID, HookReply] = {}
        for first in range(0, len(contexts), CALLS_AT_ONCE):
            answers |= await self._asked(contexts[first : first + CALLS_AT_ONCE])
        return answers

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Passes it on, beside whatever goes on: a process that may be told may be a while in coming."""
        self._news.put(contexts)

    async def recovered(self, summary: SweepSummary) -> None:
        """The same."""
        self._news.put([summary])

    async def close(self) -> None:
        """The supervisor ends: what nobody could be told is reported."""
        await self._news.close()

    async def _asked(self, contexts: Sequence[RecoveryContext]) -> dict[UUID, HookReply]:
        deaf: list[Child] = []
        why = "hooks rest" if self._is_mute else "no worker process is ready"
        problem = f"was not asked: {why}"
        while len(deaf) < _TRIES and (child := await self._next(deaf)) is not None:
            deaf.append(child)
            reply = await self._call(child, contexts)
            if isinstance(reply, HookAnswers):
                return {word.task_id: answer_of(word) for word in reply.words}
            if child.has_left:
                deaf.remove(child)  # it left in good order, and was not asked in effect
                continue
            problem = reply
        if not deaf and self._may_still_be_asked():
            raise HooksUnreachable
        for context in contexts:
            self._fail(context, problem)
        return {context.task_id: NoAnswer(problem) for context in contexts}

    async def _call(self, child: Child, contexts: Sequence[RecoveryContext]) -> HookAnswers | str:
        """The answers, or what was wrong."""
        call = self._new_call()
        reply: asyncio.Future[HookAnswers | None] = asyncio.get_running_loop().create_future()
        self._calls[call] = child, reply
        try:
            child.tell(AskHooks(call, list(contexts)))
            limit_s = self._timeout_s + _ON_THE_WAY_S
            await asyncio.wait({reply}, timeout=limit_s)
            if not reply.done():
                return f"was not answered by worker process {child.process.pid} within {spelled(limit_s)}"
            answers = reply.result()
            if answers is None and child.has_left:
                return "has left"
            if answers is None:
                self._mute_until = self._clock.monotonic() + _MUTE_S
                return f"worker process {child.process.pid} died while it was asked; hooks rest for {spelled(_MUTE_S)}"
            return answers
        finally:
            del self._calls[call]

    def _new_call(self) -> int:
        self._last_call += 1
        return self._last_call

    @property
    def _is_mute(self) -> bool:
        """A process died while it was asked, a moment ago."""
        return self._clock.monotonic() < self._mute_until

    def _may_still_be_asked(self) -> bool:
        now = self._clock.monotonic()
        if self._is_mute:
            return False
        if self._nobody_since is None:
            self._nobody_since = now
        return now - self._nobody_since < _PATIENCE_S

    async def _next(self, deaf: Sequence[Child]) -> Child | None:
        """The process that was heard of last, but none of these; the first one that becomes ready where there is none."""
        if self._is_mute:
            return None
        if not self._children:
            await self._clock.wait(self._somebody, timeout_s=self._timeout_s)
        return self._ready(deaf)

    def _ready(self, but: Sequence[Child]) -> Child | None:
        others = [child for child in self._children if child not in but and not child.has_left]
        return max(others, key=lambda child: child.heard_at, default=None)

    def _fail(self, context: RecoveryContext, problem: str) -> None:
        self._events.emit(
            HookFailed(
                hook="on_recovery",
                function="",
                task_id=context.task_id,
                task_name=context.name,
                problem=problem,
            )
        )


class HookDesk:
    """The worker process's end: calls the hooks beside its other work, and answers."""

    def __init__(self, hooks: HookRunner, *, channel: AsyncChannel, nursery: Nursery) -> None:
        self._hooks = hooks
        self._channel = channel
        self._nursery = nursery

    def obey(self, message: AskHooks | TellHooks) -> None:
        """Begins what the supervisor wishes."""
        match message:
            case AskHooks():
                self._nursery.start(self._answer(message), name="recovery hooks")
            case TellHooks():
                self._nursery.start(self._tell(message), name="recovery hooks")

    async def _answer(self, question: AskHooks) -> None:
        answers = await self._hooks.decide(question.contexts)
        words = [word_of(task_id, answer) for task_id, answer in answers.items()]
        with contextlib.suppress(ChannelError):
            self._channel.send_nowait(HookAnswers(question.call, words))

    async def _tell(self, news: TellHooks) -> None:
        if news.interrupted:
            await self._hooks.interrupted(news.interrupted)
        if news.recovered is not None:
            await self._hooks.recovered(news.recovered)
        with contextlib.suppress(ChannelError):
            self._channel.send_nowait(HookAnswers(news.call, []))


def word_of(task_id: UUID, answer: HookReply) -> HookWord:
    """An answer for the line."""
    kind = type(answer).__name__
    match answer:
        case Reschedule(run_at=timedelta() as delay, attempts=attempts):
            return HookWord(task_id, kind, in_s=delay.total_seconds(), attempts=attempts)
        case Reschedule(run_at=datetime() as moment, attempts=attempts):
            return HookWord(task_id, kind, run_at=moment, attempts=attempts)
        case NoAnswer(problem=problem):
            return HookWord(task_id, kind, problem=problem)
        case _:
            return HookWord(task_id, kind)


def answer_of(word: HookWord) -> HookReply:
    """The answer that came over the line."""
    match word:
        case HookWord(kind="Reschedule", in_s=float(seconds), attempts=attempts):
            return Reschedule(timedelta(seconds=seconds), attempts)
        case HookWord(kind="Reschedule", run_at=moment, attempts=attempts) if moment is not None:
            return Reschedule(moment, attempts)
        case HookWord(kind="FailWithBackoff"):
            return FailWithBackoff()
        case HookWord(kind="Skip"):
            return Skip()
        case HookWord(kind="NoAnswer", problem=str(problem)):
            return NoAnswer(problem)
        case _:
            return DEFAULT
