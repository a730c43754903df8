"""Ends worker processes that reach no database while their supervisor does: what they finished could never be settled.

What lives here: that judgement. What may not: the worker's own part (`reach`), and outages, which end nobody.

While a worker process says that an outcome waits without any answer of the database to anything, the supervisor opens a new
connection at every look. It ends the process when both have gone on for two thresholds: every question of the process was
in vain, and every connection and beat of the supervisor succeeded. The report that counts is one that arrived after those two
thresholds, so a process that recovers together with the database is never ended. Then it is the process that is broken (no
file descriptors left, dead sockets), and a new one will do better. A row that another session keeps locked, a server without free
connections or without writes, a network that is down for all: none of these ends a process.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

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
    """A service of the supervisor. `can_connect()` opens a new connection and asks something.

    `disturbances()`: how often a beat of the supervisor failed or a session of it was lost, so far.
    """

    name = "cut_off_watch"

    def __init__(
        self,
        *,
        threshold_s: float,
        children: Callable[[], Iterable[Child]],
        disturbances: Callable[[], int],
        can_connect: Callable[[], Awaitable[bool]],
        events: EventBus,
        clock: Clock,
    ) -> None:
        self.interval_s = min(1.0, threshold_s / _LOOKS_PER_THRESHOLD)
        self._children = children
        self._disturbances = disturbances
        self._can_connect = can_connect
        self._events = events
        self._clock = clock
        self._too_long_s = _THRESHOLDS * threshold_s
        self._seen = disturbances()
        self._looked_at = clock.monotonic()
        self._reached_since: float | None = None

    async def tick(self) -> float | None:
        """One look."""
        was_away = self._clock.monotonic() - self._looked_at > 2 * self.interval_s
        is_asked = not was_away and any(_cut_off_s(child) > 0 for child in self._children())
        if not is_asked or not await self._reaches():
            self._reached_since = None
        elif self._reached_since is None:
            self._reached_since = self._clock.monotonic()
        self._seen, self._looked_at = self._disturbances(), self._clock.monotonic()
        for child in list(self._children()):
            if self._is_cut_off(child):
                self._end(child)
        return None

    def _is_cut_off(self, child: Child) -> bool:
        if self._reached_since is None or child.seat is None or child.killed_because is not None:
            return False
        reached_s = child.seat.ticked_at - self._reached_since
        return min(reached_s, _cut_off_s(child)) >= self._too_long_s

    async def _reaches(self) -> bool:
        return await self._can_connect() and self._disturbances() == self._seen

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
