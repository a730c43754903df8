"""Names and ends worker processes that stopped ticking; opt-in, because a process may be busy for good reasons."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.nursery import Nursery
from everbeat.worker.children import Child

_TIME_FOR_THE_STACKS_S: Final = 0.5
_TIME_FOR_THE_NAMES_S: Final = 1.0


class WorkerHangs(Event, frozen=True, kw_only=True):
    """A worker process said nothing for so long that it is killed; its stacks are on its standard error.

    `running`: the tasks whose code had begun in it, name and id; None where the database could not tell in time.
    """

    room = "worker"
    level = logging.ERROR
    worker_id: str
    pid: int
    silent_s: float
    running: tuple[str, ...] | None


class HangWatch:
    """A service of the supervisor. `running(worker_id)` asks which tasks run in a worker."""

    name = "hang_watch"

    def __init__(
        self,
        *,
        timeout_s: float,
        children: Callable[[], Iterable[Child]],
        running: Callable[[str], Awaitable[Sequence[str]]],
        events: EventBus,
        clock: Clock,
        nursery: Nursery,
    ) -> None:
        self.interval_s = min(1.0, timeout_s / 4)
        self._timeout_s = timeout_s
        self._children = children
        self._running = running
        self._events = events
        self._clock = clock
        self._nursery = nursery
        self._looked_at = clock.monotonic()

    async def tick(self) -> float | None:
        """One look. A supervisor that was stopped itself judges nobody: what was said meanwhile is still to be read."""
        now = self._clock.monotonic()
        was_away = now - self._looked_at > 2 * self.interval_s
        self._looked_at = now
        for child in list(self._children()):
            if was_away:
                child.heard_at = now
            elif child.is_ready and child.killed_because is None and now - child.heard_at >= self._timeout_s:
                silent_s = now - child.heard_at
                child.killed_because = f"its loop stood still for {silent_s:.1f} s"
                self._nursery.start(self._end(child, silent_s=silent_s), name=f"end of {child.process.pid}")
        return None

    async def _end(self, child: Child, *, silent_s: float) -> None:
        child.process.dump_stacks()
        worker_id = "" if child.seat is None else child.seat.worker_id
        asked = self._nursery.start(self._names(worker_id), name=f"what runs in {worker_id}")
        await asyncio.sleep(_TIME_FOR_THE_STACKS_S)
        await asyncio.wait({asked}, timeout=_TIME_FOR_THE_NAMES_S - _TIME_FOR_THE_STACKS_S)
        self._events.emit(
            WorkerHangs(
                worker_id=worker_id,
                pid=child.process.pid,
                silent_s=silent_s,
                running=asked.result() if asked.done() else None,
            )
        )
        child.process.kill()

    async def _names(self, worker_id: str) -> tuple[str, ...] | None:
        try:
            return tuple(await self._running(worker_id))
        except DatabaseError:
            return None
