"""The state of the whole installation, which the header of each page shows. All viewers of a process share one look."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.app import App
from everbeat.client.database_access import database_of
from everbeat.domain.inspection import QueueInfo, SupervisorInfo
from everbeat.domain.recovery.liveness import FAREWELL
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.store import inspection
from everbeat.store.plan import ask

_FRESH_S: Final = 2.0
_DEAD_FOR: Final = timedelta(hours=1)
"""For how long the header counts a death."""
_MOST_TREES: Final = 1_000
_MOST_COUNTED: Final = 1_000
"""The tasks of a queue and state are counted up to this number. Every page waits for the header."""
_MOST_OF_ALL: Final = 30_000
"""The tasks of all queues are counted up to about this number."""


class Vitals(Struct, frozen=True, kw_only=True):
    """The numbers of trees that beat, are late, and died in the last hour, and of tasks by state. `oldest_due_s` is in seconds.

    `at_least`: there are more tasks than were counted. `problem` is why the database could not be asked.
    """

    beat: int = 0
    late: int = 0
    dead: int = 0
    due: int = 0
    scheduled: int = 0
    claimed: int = 0
    running: int = 0
    at_least: bool = False
    oldest_due_s: float | None = None
    problem: str | None = None


class VitalsWatch:
    """Reads the vitals for all viewers, at most once in two seconds."""

    def __init__(self) -> None:
        self._last = Vitals()
        self._until = 0.0
        self._clock = SystemClock()
        self._reading = asyncio.Lock()

    async def read(self, app: App, *, now: datetime, fresh: bool = False) -> Vitals:
        """Return the vitals. `fresh`: look again, because a part of the page could not be read. Never raises DatabaseError."""
        async with self._reading:
            if fresh or self._clock.monotonic() >= self._until:
                self._last = await _read(app, now=now)
                self._until = self._clock.monotonic() + _FRESH_S
        return self._last


async def _read(app: App, *, now: datetime) -> Vitals:
    try:
        trees, waiting = await asyncio.gather(app.alist_supervisors(limit=_MOST_TREES), counted_queues(app))
    except DatabaseError as problem:
        return Vitals(problem=problem.message)
    return vitals_of(trees, waiting, now=now)


async def counted_queues(app: App) -> list[QueueInfo]:
    """Return the queues with their counts, which stop early enough for a page."""
    statement = inspection.queues(most=_MOST_COUNTED, most_of_all=_MOST_OF_ALL)
    return await database_of(app).arun(ask(statement))


def vitals_of(trees: Sequence[SupervisorInfo], waiting: Sequence[QueueInfo], *, now: datetime) -> Vitals:
    """Return the vitals of these trees and queues."""
    live = [tree for tree in trees if tree.ended_at is None]
    late = sum(is_late(tree) for tree in live)
    dead = sum(
        is_dead(tree) and tree.ended_at is not None and tree.ended_at > now - _DEAD_FOR for tree in trees
    )
    oldest = [queue.oldest_due_s for queue in waiting if queue.oldest_due_s is not None]
    return Vitals(
        beat=len(live) - late,
        late=late,
        dead=dead,
        due=sum(queue.pending for queue in waiting),
        scheduled=sum(queue.scheduled for queue in waiting),
        claimed=sum(queue.claimed for queue in waiting),
        running=sum(queue.running for queue in waiting),
        at_least=any(queue.at_least for queue in waiting),
        oldest_due_s=max(oldest, default=None),
    )


def is_late(tree: SupervisorInfo) -> bool:
    """Return whether a live tree has stopped beating, or lost its session."""
    return bool(tree.is_stale) or tree.session_lost


def is_dead(tree: SupervisorInfo) -> bool:
    """Return whether a tree ended without saying farewell."""
    return tree.ended_at is not None and tree.ended_how != FAREWELL
