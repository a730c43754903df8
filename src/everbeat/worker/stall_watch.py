"""Code that lives but says nothing: noticed by this worker's own clock, for tasks whose policy sets a `stall_timeout`.

What lives here: measuring the silence. What may not: what becomes of the attempt (`conductor`), and blocked loops, which
cannot watch themselves: their supervisor does (`services.stalls`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final
from uuid import UUID

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event
from everbeat.worker.attempt import Attempt, Stage

LOOK_EVERY_S: Final = 1.0
HEARD_LATE_S: Final = 0.25
"""A task process passes on what its code says five times a second, so its last word may be this much younger."""
_LATE_S: Final = 0.25


class TaskStalled(Event, frozen=True, kw_only=True):
    """Running code said nothing for its stall_timeout and is stopped; a task process writes its stacks to standard error."""

    room = "worker"
    level = logging.ERROR
    task_id: UUID
    name: str
    attempt: int
    silent_s: float
    stack: str


class StallWatch:
    """A service. `on_stalled(attempt, silent_s)` is told of running code that has been silent for too long."""

    name = "stall watch"
    interval_s = 3_600.0

    def __init__(self, *, clock: Clock, on_stalled: Callable[[Attempt, float], None]) -> None:
        self.wake = asyncio.Event()
        self._clock = clock
        self._on_stalled = on_stalled
        self._watched: dict[Attempt, float] = {}
        self._due_at: float | None = None

    def watch(self, attempt: Attempt) -> None:
        """Its code begins now; without a limit nothing is watched."""
        attempt.spoke_at = attempt.launched_at
        if (limit_s := attempt.stall_timeout_s) is not None:
            self._watched[attempt] = limit_s
            if self._due_at is None:
                self._due_at = attempt.spoke_at  # the look that is asked for here
            self.wake.set()

    async def tick(self) -> float | None:
        """One look, at least once a second while anything is watched."""
        now = self._clock.monotonic()
        self._forgive(now)
        for attempt, limit_s in list(self._watched.items()):
            if attempt.stage is not Stage.RUNNING:
                del self._watched[attempt]
            elif attempt.unanswered:
                attempt.spoke_at = now
            elif now - attempt.spoke_at >= limit_s + HEARD_LATE_S:
                del self._watched[attempt]
                self._on_stalled(attempt, now - attempt.spoke_at)
        waits = [
            attempt.spoke_at + limit_s + HEARD_LATE_S - now for attempt, limit_s in self._watched.items()
        ]
        wait_s = max(0.0, min(LOOK_EVERY_S, *waits)) if waits else None
        self._due_at = None if wait_s is None else now + wait_s
        return wait_s

    def _forgive(self, now: float) -> None:
        """A look that comes late found this loop blocked or the process frozen: meanwhile nobody could be heard, and some not speak."""
        late_s = 0.0 if self._due_at is None else now - self._due_at
        if late_s > _LATE_S:
            for attempt in self._watched:
                attempt.spoke_at = min(now, attempt.spoke_at + late_s)
