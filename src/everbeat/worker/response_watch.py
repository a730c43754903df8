"""Reports worker processes that say nothing to their supervisor, and those that respond again; it ends none of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from everbeat.domain.silence import UNRESPONSIVE_S
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.worker.children import Child

_LOOK_EVERY_S: Final = 1.0


class WorkerUnresponsive(Event, frozen=True, kw_only=True):
    """A worker process has said nothing for `silent_s`: it is stopped, or code blocks it. It keeps what it holds.

    `fix`: the command for an operator who wants its tasks to run elsewhere.
    """

    room = "worker"
    level = logging.WARNING
    worker_id: str
    pid: int
    silent_s: float
    held: int
    fix: str


class WorkerResponds(Event, frozen=True, kw_only=True):
    """A worker process that was reported as unresponsive responds again, after `silent_s`."""

    room = "worker"
    level = logging.WARNING
    worker_id: str
    pid: int
    silent_s: float


class ResponseWatch:
    """A service of the supervisor. It reports each silence once."""

    name = "response_watch"

    def __init__(
        self,
        *,
        children: Callable[[], Iterable[Child]],
        events: EventBus,
        clock: Clock,
        after_s: float = UNRESPONSIVE_S,
    ) -> None:
        self.interval_s = min(_LOOK_EVERY_S, after_s / 4)
        self._children = children
        self._events = events
        self._clock = clock
        self._after_s = after_s
        self._looked_at = self._present_since = clock.monotonic()
        self._reported: dict[int, float] = {}

    async def tick(self) -> float | None:
        """One look. A supervisor that was stopped itself waits anew: messages that arrived meanwhile are still unread."""
        now = self._clock.monotonic()
        if now - self._looked_at > 2 * self.interval_s:
            self._present_since = now
        self._looked_at = now
        children = list(self._children())
        self._reported = {
            pid: at for pid, at in self._reported.items() if pid in {one.process.pid for one in children}
        }
        for child in children:
            self._look(child, now)
        return None

    def _look(self, child: Child, now: float) -> None:
        pid, worker_id = child.process.pid, "" if child.seat is None else child.seat.worker_id
        silent_since = self._reported.get(pid)
        if silent_since is not None:
            if child.heard_at > silent_since:
                del self._reported[pid]
                self._events.emit(
                    WorkerResponds(
                        worker_id=worker_id, pid=pid, silent_s=round(child.heard_at - silent_since, 1)
                    )
                )
            return
        is_watched = child.is_ready and not child.has_left and child.killed_because is None
        if is_watched and now - max(child.heard_at, self._present_since) >= self._after_s:
            self._reported[pid] = child.heard_at
            self._events.emit(
                WorkerUnresponsive(
                    worker_id=worker_id,
                    pid=pid,
                    silent_s=round(now - child.heard_at, 1),
                    held=0 if child.seat is None else len(child.seat.held),
                    fix=f"everbeat workers release {worker_id}",
                )
            )
