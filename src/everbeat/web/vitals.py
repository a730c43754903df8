"""The state of the whole installation, which the header of each page shows. All viewers of a process share one look."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct, structs

from everbeat.app import App
from everbeat.client.database_access import database_of
from everbeat.client.trees import states_of_trees
from everbeat.domain.inspection import QueueInfo
from everbeat.domain.pulse.judging import TreeCounts
from everbeat.domain.recovery.liveness import FAREWELL
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.store import inspection
from everbeat.store.plan import ask
from everbeat.store.statement import Statement

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

    `at_least`: there are more tasks than were counted. `problem` is the code of the error if the database could not be asked.
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

    async def read(self, app: App, *, now: datetime, crew: TreeCounts | None, fresh: bool = False) -> Vitals:
        """Return the vitals. `crew` is what a watched page shows of the trees now, or None. Never raises DatabaseError.

        `fresh`: look again, because a part of the page could not be read.
        """
        async with self._reading:
            if fresh or self._clock.monotonic() >= self._until:
                self._last = await _read(app, now=now, crew=crew)
                self._until = self._clock.monotonic() + _FRESH_S
        last = self._last
        return last if crew is None or last.problem else structs.replace(last, **structs.asdict(crew))


async def _read(app: App, *, now: datetime, crew: TreeCounts | None) -> Vitals:
    try:
        trees, waiting = await asyncio.gather(
            _trees(app, now=now, crew=crew), database_of(app).arun(ask(counted_queues()))
        )
    except DatabaseError as problem:
        return Vitals(problem=problem.code)
    oldest = [queue.oldest_due_s for queue in waiting if queue.oldest_due_s is not None]
    return Vitals(
        **structs.asdict(trees),
        due=sum(queue.pending for queue in waiting),
        scheduled=sum(queue.scheduled for queue in waiting),
        claimed=sum(queue.claimed for queue in waiting),
        running=sum(queue.running for queue in waiting),
        at_least=any(queue.at_least for queue in waiting),
        oldest_due_s=max(oldest, default=None),
    )


async def _trees(app: App, *, now: datetime, crew: TreeCounts | None) -> TreeCounts:
    if crew is not None:
        return crew
    states, trees = await asyncio.gather(
        database_of(app).arun(states_of_trees(app.recovery)), app.alist_supervisors(limit=_MOST_TREES)
    )
    dead = sum(
        tree.ended_at is not None and tree.ended_how != FAREWELL and tree.ended_at > now - _DEAD_FOR
        for tree in trees
    )
    return TreeCounts.of(states.values(), dead=dead)


def counted_queues() -> Statement[list[QueueInfo]]:
    """Return the queues with live tasks and their counts, which stop early enough for a page."""
    return inspection.queues(most=_MOST_COUNTED, most_of_all=_MOST_OF_ALL)
