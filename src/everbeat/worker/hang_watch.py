"""Names and ends worker processes that stopped ticking; opt-in, because a process may be busy for good reasons."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.worker.children import Child

_TIME_FOR_THE_STACKS_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHangs(Event):
    """A worker process said nothing for so long that it is killed; its stacks are on its standard error."""

    room = "worker"
    level = logging.ERROR
    worker_id: str
    pid: int
    silent_s: float


class HangWatch:
    """A service of the supervisor."""

    name = "hang_watch"

    def __init__(
        self, *, timeout_s: float, children: Callable[[], Iterable[Child]], events: EventBus, clock: Clock
    ) -> None:
        self.interval_s = min(1.0, timeout_s / 4)
        self._timeout_s = timeout_s
        self._children = children
        self._events = events
        self._clock = clock
        self._looked_at = clock.monotonic()

    async def tick(self) -> float | None:
        """One look. A supervisor that was stopped itself judges nobody: what was said meanwhile is still to be read."""
        now = self._clock.monotonic()
        was_away = now - self._looked_at > 2 * self.interval_s
        self._looked_at = now
        for child in list(self._children()):
            if was_away:
                child.heard_at = now
            elif child.is_ready and not child.is_hanging and now - child.heard_at >= self._timeout_s:
                await self._end(child, silent_s=now - child.heard_at)
        return None

    async def _end(self, child: Child, *, silent_s: float) -> None:
        child.is_hanging = True
        worker_id = "" if child.seat is None else child.seat.worker_id
        self._events.emit(WorkerHangs(worker_id=worker_id, pid=child.process.pid, silent_s=silent_s))
        child.process.dump_stacks()
        await asyncio.sleep(_TIME_FOR_THE_STACKS_S)
        child.process.kill()
