"""Ends worker processes that reach no database while their supervisor does: what they finished could never be settled.

What lives here: that judgement. What may not: the worker's own part (`reach`), and outages, which end nobody.

Three things must come together: the worker says that an outcome has waited for two thresholds without any answer of the
database to anything; the supervisor's own beats went undisturbed for as long; and it can open a new connection right now.
Then it is the process that is broken (no file descriptors left, dead sockets), and a new one will do better. A row that
somebody keeps locked, a server without free connections, a network that is down for all: none of these ends a process.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.worker.children import Child

_LOOKS_PER_THRESHOLD: Final = 4
_THRESHOLDS: Final = 2


class WorkerCutOff(Event, frozen=True, kw_only=True):
    """A worker process reached no database for so long, alone of its tree, that it is killed."""

    room = "worker"
    level = logging.ERROR
    worker_id: str
    pid: int
    for_s: float


class CutOffWatch:
    """A service of the supervisor. `probe()` opens a new connection and asks something; raises a DatabaseError.

    `disturbances()`: how often a beat of the supervisor failed or a session of it was lost, so far.
    """

    name = "cut_off_watch"

    def __init__(
        self,
        *,
        threshold_s: float,
        children: Callable[[], Iterable[Child]],
        disturbances: Callable[[], int],
        probe: Callable[[], Awaitable[object]],
        events: EventBus,
        clock: Clock,
    ) -> None:
        self.interval_s = min(1.0, threshold_s / _LOOKS_PER_THRESHOLD)
        self._threshold_s = threshold_s
        self._children = children
        self._disturbances = disturbances
        self._probe = probe
        self._events = events
        self._clock = clock
        self._seen = disturbances()
        self._looked_at = self._calm_since = clock.monotonic()

    async def tick(self) -> float | None:
        """One look."""
        now = self._clock.monotonic()
        was_away = now - self._looked_at > 2 * self.interval_s
        if was_away or self._disturbances() != self._seen:
            self._seen, self._calm_since = self._disturbances(), now
        self._looked_at = now
        if now - self._calm_since < self._threshold_s:
            return None
        cut_off = [child for child in self._children() if self._is_cut_off(child)]
        if cut_off and await self._reaches():
            for child in cut_off:
                self._end(child)
        self._looked_at = self._clock.monotonic()
        return None

    def _is_cut_off(self, child: Child) -> bool:
        return child.killed_because is None and _cut_off_s(child) >= _THRESHOLDS * self._threshold_s

    async def _reaches(self) -> bool:
        try:
            await self._probe()
        except (DatabaseError, OSError):
            return False
        return self._disturbances() == self._seen

    def _end(self, child: Child) -> None:
        for_s = _cut_off_s(child)
        worker_id = "" if child.seat is None else child.seat.worker_id
        self._events.emit(WorkerCutOff(worker_id=worker_id, pid=child.process.pid, for_s=for_s))
        child.kill(
            because=f"it reached no database for {for_s:.1f} s to settle what it had finished, while others did"
        )


def _cut_off_s(child: Child) -> float:
    tick = None if child.seat is None else child.seat.tick
    return 0.0 if tick is None else tick.cut_off_s
