"""Calls an app's recovery hooks on behalf of its supervisor. The supervisor imports no user code, so a worker process runs the hooks."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeAlias
from uuid import UUID

from everbeat.domain.recovery.hooks import (
    CALLS_AT_ONCE,
    HookKind,
    HookReply,
    HookScopes,
    HooksUnreachable,
    NoAnswer,
    RecoveryContext,
    SweepSummary,
)
from everbeat.domain.settings.units import spelled_duration
from everbeat.protocol import AskHooks, HookAnswers, TellHooks, answer_of
from everbeat.recovering.traced import RecoveriesNotTraced
from everbeat.runtime.clock import Clock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, EventBus, HookFailed
from everbeat.runtime.task_scope import TaskScope
from everbeat.supervisor.processes import WorkerChild

News: TypeAlias = RecoveryContext | SweepSummary

MOST_NEWS: Final = 10_000
REST_S: Final = 60.0
_RECHECK_S: Final = 1.0


class HookNewsLost(Event, frozen=True, kw_only=True):
    """Tasks were recovered, but the hook will not be called for them. `problem` is the reason."""

    component = "supervisor"
    level = logging.ERROR
    hook: HookKind
    count: int
    task_ids: tuple[UUID, ...]
    problem: str


class HookProcesses:
    """The worker processes that can call hooks.

    If a process dies while it is being asked for a decision, no process is asked again until `rest_until`.
    """

    def __init__(self, clock: Clock) -> None:
        self.children: list[WorkerChild] = []
        self.rest_until = 0.0
        self.joined = asyncio.Event()
        self._clock = clock
        self._last_call = 0

    def new_call(self) -> int:
        """Return a new number that identifies one call."""
        self._last_call += 1
        return self._last_call

    def ready(self, but: Sequence[WorkerChild] = ()) -> WorkerChild | None:
        """Return the process not in `but` that sent a message most recently, or None if no such process is ready."""
        others = [child for child in self.children if child not in but and not child.has_left]
        return max(others, key=lambda child: child.heard_at, default=None)

    @property
    def rest_s(self) -> float:
        """Return how many more seconds to wait before any process may be asked again. Zero or less means now."""
        return self.rest_until - self._clock.monotonic()


class HookNotices:
    """Makes the hook calls that need no answer, in order, as soon as a process is ready.

    A process that dies during such a call might have died because of the call. The call is then not repeated, and no other call is
    made for a minute.

    `scopes` says whether the app has an `on_interrupted` hook, or only tracers, which get the same calls.
    """

    scopes = HookScopes()

    def __init__(self, processes: HookProcesses, *, events: EventBus, clock: Clock) -> None:
        self._processes = processes
        self._events = events
        self._clock = clock
        self._waiting: deque[News] = deque()
        self._sent: dict[int, tuple[WorkerChild, list[News]]] = {}
        self._rest_until = 0.0
        self._changed = asyncio.Event()
        self._scope = TaskScope(name="notices for hooks")
        self._delivery: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, news: Sequence[News]) -> None:
        """Queue hook calls. If too many calls are waiting, the oldest ones are dropped and reported."""
        self._waiting.extend(news)
        too_many = len(self._waiting) - MOST_NEWS
        if too_many > 0:
            oldest = [self._waiting.popleft() for _ in range(too_many)]
            self._lost(
                oldest, f"was not called: {self._why_they_wait()}, and only {MOST_NEWS:,} calls can wait"
            )
        if self._is_closed:
            self._drop_all()
        elif self._delivery is None or self._delivery.done():
            self._delivery = self._scope.start(self._deliver(), name="delivery")
        self.try_again()

    def try_again(self) -> None:
        """Try again to deliver the waiting calls, because a process might be ready now."""
        self._changed.set()

    def acknowledge(self, call: int) -> None:
        """Record that a process has made this call."""
        if self._sent.pop(call, None) is not None:
            self.try_again()

    def left(self, child: WorkerChild) -> None:
        """Handle the exit of a process. If it shut down cleanly, another process gets the calls that it did not acknowledge."""
        calls = [call for call, (receiver, _) in self._sent.items() if receiver is child]
        unconfirmed = [one for call in calls for one in self._sent.pop(call)[1]]
        if unconfirmed and child.has_left:
            self._waiting.extendleft(reversed(unconfirmed))
            self.put([])
        elif unconfirmed:
            self._rest_until = self._clock.monotonic() + REST_S
            pid, pause = child.process.pid, spelled_duration(REST_S)
            self._lost(unconfirmed, f"worker process {pid} died during the call; hooks rest for {pause}")
        self.try_again()

    async def close(self) -> None:
        """Stop delivering calls, and report the calls that were not delivered as lost."""
        self._is_closed = True
        await self._scope.close()
        self._waiting.extendleft(one for _, news in self._sent.values() for one in news)
        self._sent.clear()
        self._drop_all()

    def _drop_all(self) -> None:
        self._lost(
            self._waiting, f"was not called: {self._why_they_wait()}, and the supervisor is shutting down"
        )
        self._waiting.clear()

    async def _deliver(self) -> None:
        while self._waiting:
            pause_s = self._rest_s()
            if pause_s > 0:
                await self._clock.sleep(pause_s)
                continue
            child = self._processes.ready([receiver for receiver, _ in self._sent.values()])
            if child is None:
                self._changed.clear()
                await self._clock.wait(self._changed, timeout_s=_RECHECK_S)
                continue
            self._send(child)

    def _send(self, child: WorkerChild) -> None:
        call = self._processes.new_call()
        match self._waiting[0]:
            case SweepSummary() as summary:
                news: list[News] = [self._waiting.popleft()]
                message = TellHooks([], summary, call)
            case _:
                contexts = list(islice(_contexts(self._waiting), CALLS_AT_ONCE))
                news = [self._waiting.popleft() for _ in contexts]
                message = TellHooks(contexts, None, call)
        self._sent[call] = child, news
        child.send(message)

    def _rest_s(self) -> float:
        return max(self._rest_until - self._clock.monotonic(), self._processes.rest_s)

    def _why_they_wait(self) -> str:
        if self._rest_s() > 0:
            return "hooks rest"
        return (
            "no worker process is ready"
            if self._processes.ready() is None
            else "earlier hook calls are taking too long"
        )

    def _lost(self, news: Sequence[News], problem: str) -> None:
        interrupted = tuple(one.task_id for one in news if isinstance(one, RecoveryContext))
        summaries = [one for one in news if isinstance(one, SweepSummary)]
        if interrupted and self.scopes.has_interrupted_hook:
            self._report_lost("on_interrupted", len(interrupted), interrupted, problem)
        elif interrupted:
            count = len(interrupted)
            self._events.emit(RecoveriesNotTraced(count=count, task_ids=interrupted, problem=problem))
        if summaries:
            recovered = tuple(task_id for one in summaries for task_id in one.task_ids)
            self._report_lost("on_recovered", len(summaries), recovered, problem)

    def _report_lost(self, hook: HookKind, count: int, task_ids: tuple[UUID, ...], problem: str) -> None:
        self._events.emit(HookNewsLost(hook=hook, count=count, task_ids=task_ids, problem=problem))


def _contexts(news: Sequence[News]) -> Iterator[RecoveryContext]:
    """Yield the contexts at the start of `news`, up to the first SweepSummary."""
    for one in news:
        if not isinstance(one, RecoveryContext):
            return
        yield one


_ON_THE_WAY_S: Final = 1.0
_TRIES: Final = 2
_PATIENCE_S: Final = 60.0


class RemoteHooks:
    """The `HookRunner` of a supervisor, which asks a worker process. If that process does not answer, one other process is asked.

    A process that dies while it is being asked might have died because of the hook, so no process is asked for a minute.
    """

    def __init__(self, environment: ProcessEnvironment) -> None:
        self.scopes = HookScopes()
        self._events = environment.events
        self._clock = environment.clock
        self._timeout_s = 5.0
        self._processes = HookProcesses(self._clock)
        self._calls: dict[int, tuple[WorkerChild, asyncio.Future[HookAnswers | None]]] = {}
        self._absent_since: float | None = None
        self._notices = HookNotices(self._processes, events=self._events, clock=self._clock)

    def open(self, scopes: HookScopes, *, timeout_s: float) -> None:
        """Store which hooks the app has registered, as reported by the first worker process."""
        self.scopes, self._timeout_s = scopes, timeout_s
        self._notices.scopes = scopes

    def join(self, child: WorkerChild) -> None:
        """Add a process that is ready to call hooks."""
        self._processes.children.append(child)
        self._absent_since = None
        self._processes.joined.set()
        self._notices.try_again()

    def leave(self, child: WorkerChild) -> None:
        """Remove a process that has exited."""
        if child in self._processes.children:
            self._processes.children.remove(child)
        if not self._processes.children:
            self._processes.joined.clear()
        for asked, reply in self._calls.values():
            if asked is child and not reply.done():
                reply.set_result(None)
        self._notices.left(child)

    def receive(self, answers: HookAnswers) -> None:
        """Handle the answers of a process. Late answers are ignored."""
        self._notices.acknowledge(answers.call)
        _, reply = self._calls.get(answers.call, (None, None))
        if reply is not None and not reply.done():
            reply.set_result(answers)

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """Ask the hooks to decide on these tasks, and return the answers by task id.

        Raises HooksUnreachable if no process is ready. If none has been ready for a minute, the answers are NoAnswer instead.
        """
        answers: dict[UUID, HookReply] = {}
        for first in range(0, len(contexts), CALLS_AT_ONCE):
            answers |= await self._asked(contexts[first : first + CALLS_AT_ONCE])
        return answers

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Queue calls of the `on_interrupted` hook, which are made as soon as a process is ready."""
        self._notices.put(contexts)

    async def recovered(self, summary: SweepSummary) -> None:
        """Queue a call of the `on_recovered` hook, which is made as soon as a process is ready."""
        self._notices.put([summary])

    async def close(self) -> None:
        """Drop the calls that were not made, and report them as lost."""
        await self._notices.close()

    async def _asked(self, contexts: Sequence[RecoveryContext]) -> dict[UUID, HookReply]:
        asked: list[WorkerChild] = []
        why = "hooks rest" if self._processes.rest_s > 0 else "no worker process is ready"
        problem = f"was not asked: {why}"
        while len(asked) < _TRIES and (child := await self._next(asked)) is not None:
            asked.append(child)
            reply = await self._call(child, contexts)
            if isinstance(reply, HookAnswers):
                return {word.task_id: answer_of(word) for word in reply.words}
            if child.has_left:
                asked.remove(child)  # it shut down cleanly, so it does not count as asked
                continue
            problem = reply
        if not asked and self._is_worth_waiting():
            raise HooksUnreachable
        for context in contexts:
            self._fail(context, problem)
        return {context.task_id: NoAnswer(problem) for context in contexts}

    async def _call(self, child: WorkerChild, contexts: Sequence[RecoveryContext]) -> HookAnswers | str:
        """Ask one process, and return its answers, or the reason why there are none."""
        call = self._processes.new_call()
        reply: asyncio.Future[HookAnswers | None] = asyncio.get_running_loop().create_future()
        self._calls[call] = child, reply
        try:
            child.send(AskHooks(call, list(contexts)))
            limit_s = self._timeout_s + _ON_THE_WAY_S
            await asyncio.wait({reply}, timeout=limit_s)
            if not reply.done():
                return f"was not answered by worker process {child.process.pid} within {spelled_duration(limit_s)}"
            answers = reply.result()
            if answers is None and child.has_left:
                return "has left"
            if answers is None:
                self._processes.rest_until = self._clock.monotonic() + REST_S
                return f"worker process {child.process.pid} died while it was asked; hooks rest for {spelled_duration(REST_S)}"
            return answers
        finally:
            del self._calls[call]

    def _is_worth_waiting(self) -> bool:
        now = self._clock.monotonic()
        if self._processes.rest_s > 0:
            return False
        if self._absent_since is None:
            self._absent_since = now
        return now - self._absent_since < _PATIENCE_S

    async def _next(self, asked: Sequence[WorkerChild]) -> WorkerChild | None:
        """Return a ready process that is not in `asked`, or None. If there is no process at all, wait for the first one."""
        if self._processes.rest_s > 0:
            return None
        if not self._processes.children:
            await self._clock.wait(self._processes.joined, timeout_s=self._timeout_s)
        return self._processes.ready(asked)

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
