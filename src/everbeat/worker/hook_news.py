"""News for the hooks that are only told, on their way from a supervisor to one of its worker processes.

What lives here: keeping them until a process can be told, one message to each at a time. What may not: questions
(`hook_line`), and calling the functions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeAlias
from uuid import UUID

from everbeat.domain.duration import spelled
from everbeat.domain.hooks import CALLS_AT_ONCE, HookKind, RecoveryContext, SweepSummary
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.nursery import Nursery
from everbeat.worker.children import Child
from everbeat.worker.protocol import TellHooks

News: TypeAlias = RecoveryContext | SweepSummary

MOST_NEWS: Final = 10_000
REST_S: Final = 60.0
_LOOK_AGAIN_S: Final = 1.0


class HookNewsLost(Event, frozen=True, kw_only=True):
    """These tasks were recovered, and the hook will not be told of them; `problem` says why."""

    room = "services"
    level = logging.ERROR
    hook: HookKind
    count: int
    task_ids: tuple[UUID, ...]
    problem: str


class HookNews:
    """Told in order, as soon as a process is ready. `ready(but)` names one that is none of those; `rests_until()` is a moment of
    the clock before which nobody is to be told.

    A process that dies while it is told may have died of it: nobody is told the same, and for a minute nobody is told anything.
    """

    def __init__(
        self,
        *,
        ready: Callable[[Sequence[Child]], Child | None],
        rests_until: Callable[[], float],
        new_call: Callable[[], int],
        events: EventBus,
        clock: Clock,
    ) -> None:
        self._ready = ready
        self._others_rest_until = rests_until
        self._new_call = new_call
        self._events = events
        self._clock = clock
        self._waiting: deque[News] = deque()
        self._telling: dict[int, tuple[Child, list[News]]] = {}
        self._rests_until = 0.0
        self._changed = asyncio.Event()
        self._nursery = Nursery(name="news for hooks")
        self._courier: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, news: Sequence[News]) -> None:
        """To be told; the oldest are given up where too many wait."""
        self._waiting.extend(news)
        too_many = len(self._waiting) - MOST_NEWS
        if too_many > 0:
            oldest = [self._waiting.popleft() for _ in range(too_many)]
            self._lost(oldest, f"was not told: {self._why_they_wait()}, and only {MOST_NEWS:,} may wait")
        if self._is_closed:
            self._give_up()
        elif self._courier is None or self._courier.done():
            self._courier = self._nursery.start(self._deliver(), name="courier")
        self.look()

    def look(self) -> None:
        """A process may be ready now."""
        self._changed.set()

    def heard(self, call: int) -> None:
        """The hooks have been called."""
        if self._telling.pop(call, None) is not None:
            self.look()

    def left(self, child: Child) -> None:
        """This process has ended. What one that left in good order has not acknowledged is told to another."""
        calls = [call for call, (told, _) in self._telling.items() if told is child]
        unheard = [one for call in calls for one in self._telling.pop(call)[1]]
        if unheard and child.has_left:
            self._waiting.extendleft(reversed(unheard))
            self.put([])
        elif unheard:
            self._rests_until = self._clock.monotonic() + REST_S
            pid, pause = child.process.pid, spelled(REST_S)
            self._lost(unheard, f"worker process {pid} died while it was told; hooks rest for {pause}")
        self.look()

    async def close(self) -> None:
        """Tells nobody any more; what is undelivered is given up."""
        self._is_closed = True
        await self._nursery.close()
        self._waiting.extendleft(one for _, news in self._telling.values() for one in news)
        self._telling.clear()
        self._give_up()

    def _give_up(self) -> None:
        self._lost(self._waiting, f"was not told: {self._why_they_wait()}, and the supervisor ends")
        self._waiting.clear()

    async def _deliver(self) -> None:
        while self._waiting:
            pause_s = self._rest_s()
            if pause_s > 0:
                await self._clock.sleep(pause_s)
                continue
            child = self._ready([told for told, _ in self._telling.values()])
            if child is None:
                self._changed.clear()
                await self._clock.wait(self._changed, timeout_s=_LOOK_AGAIN_S)
                continue
            self._tell(child)

    def _tell(self, child: Child) -> None:
        call = self._new_call()
        match self._waiting[0]:
            case SweepSummary() as summary:
                news: list[News] = [self._waiting.popleft()]
                message = TellHooks([], summary, call)
            case _:
                contexts = list(islice(_contexts(self._waiting), CALLS_AT_ONCE))
                news = [self._waiting.popleft() for _ in contexts]
                message = TellHooks(contexts, None, call)
        self._telling[call] = child, news
        child.tell(message)

    def _rest_s(self) -> float:
        return max(self._rests_until, self._others_rest_until()) - self._clock.monotonic()

    def _why_they_wait(self) -> str:
        if self._rest_s() > 0:
            return "hooks rest"
        return "no worker process is ready" if self._ready(()) is None else "the hooks before it take long"

    def _lost(self, news: Sequence[News], problem: str) -> None:
        interrupted = tuple(one.task_id for one in news if isinstance(one, RecoveryContext))
        summaries = [one for one in news if isinstance(one, SweepSummary)]
        if interrupted:
            self._tell_lost("on_interrupted", len(interrupted), interrupted, problem)
        if summaries:
            recovered = tuple(task_id for one in summaries for task_id in one.task_ids)
            self._tell_lost("on_recovered", len(summaries), recovered, problem)

    def _tell_lost(self, hook: HookKind, count: int, task_ids: tuple[UUID, ...], problem: str) -> None:
        self._events.emit(HookNewsLost(hook=hook, count=count, task_ids=task_ids, problem=problem))


def _contexts(news: Sequence[News]) -> Iterator[RecoveryContext]:
    """Those at the beginning, up to the end of a pass."""
    for one in news:
        if not isinstance(one, RecoveryContext):
            return
        yield one
