"""Writes the progress that running code reports, and detects code that reports nothing for longer than its `stall_timeout`."""

from __future__ import annotations

import asyncio
import logging
from typing import Final
from uuid import UUID

from everbeat.domain.tracing.model import TraceIds
from everbeat.runtime.events import Event
from everbeat.store.leases import record_progress
from everbeat.worker.attempt import CODE_RUNS, OVER, Attempt
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import AttemptLost, AttemptStalled

WRITE_EVERY_S: Final = 1.0


class ProgressRecorder:
    """A service that writes the progress of running code to the database."""

    name = "progress"
    interval_s = 3_600.0

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        self._session = environment.session
        self._clock = environment.clock
        self._send = environment.send
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[Attempt, float] = {}
        self._written_at: dict[Attempt, float] = {}

    def note(self, attempt: Attempt) -> None:
        """Write the attempt's pending progress soon. Safe to call from any thread."""
        attempt.reported_at = self._clock.monotonic()
        if not attempt.progress_noted:
            attempt.progress_noted = True
            self._loop.call_soon_threadsafe(self._note, attempt)

    async def tick(self) -> float | None:
        """Write all progress that is due."""
        now = self._clock.monotonic()
        for attempt in [attempt for attempt, due_at in self._dirty.items() if due_at <= now]:
            await self.write(attempt)
        return min((due_at - now for due_at in self._dirty.values()), default=None)

    async def write(self, attempt: Attempt) -> None:
        """Write the attempt's progress now, unless its lease is over."""
        self._dirty.pop(attempt, None)
        attempt.progress_noted = False
        progress, attempt.progress = attempt.progress, None
        if progress is None or attempt.stage in OVER:
            return
        self._written_at[attempt] = self._clock.monotonic()
        held = await self._session.run(record_progress(attempt.id, attempt.claim_id, progress))
        if not held and attempt.stage in CODE_RUNS:
            self._send(AttemptLost(attempt, in_write=True))

    def forget(self, attempt: Attempt) -> None:
        """Discard the pending progress of an attempt whose lease is over."""
        self._dirty.pop(attempt, None)
        self._written_at.pop(attempt, None)

    def _note(self, attempt: Attempt) -> None:
        if attempt.stage in CODE_RUNS and not attempt.holds_progress:
            self._dirty[attempt] = self._written_at.get(attempt, -WRITE_EVERY_S) + WRITE_EVERY_S
            self.wake.set()


CHECK_EVERY_S: Final = 1.0
REPORTED_LATE_S: Final = 0.25
"""How many seconds later than the worker knows the code might have reported. A task process forwards progress five times per second."""
_LATE_S: Final = 0.25


class TaskStalled(Event, frozen=True, kw_only=True):
    """Running code is being stopped because it reported nothing for longer than its `stall_timeout`.

    A task process writes its stacks to standard error.
    """

    component = "worker"
    level = logging.ERROR
    task_id: UUID
    name: str
    attempt: int
    silent_s: float
    stack: str
    trace_ids: TraceIds | None = None


class StallWatch:
    """A service that detects running code that has reported nothing for longer than its `stall_timeout`."""

    name = "stall watch"
    interval_s = 3_600.0

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        self._clock = environment.clock
        self._send = environment.send
        self._watched: dict[Attempt, float] = {}
        self._due_at: float | None = None

    def watch(self, attempt: Attempt) -> None:
        """Watch an attempt whose code is starting now, if its policy has a `stall_timeout`."""
        attempt.reported_at = attempt.launched_at
        if (limit_s := attempt.stall_timeout_s) is not None:
            self._watched[attempt] = limit_s
            if self._due_at is None:
                self._due_at = attempt.reported_at  # the wake-up below requests a check at once
            self.wake.set()

    async def tick(self) -> float | None:
        """Send `AttemptStalled` for code that is silent for too long. This runs at least once per second while attempts are watched."""
        now = self._clock.monotonic()
        self._forgive(now)
        for attempt, limit_s in list(self._watched.items()):
            if attempt.stage not in CODE_RUNS:
                del self._watched[attempt]
            elif attempt.unanswered:
                attempt.reported_at = now
            elif now - attempt.reported_at >= limit_s + REPORTED_LATE_S:
                del self._watched[attempt]
                self._send(AttemptStalled(attempt, now - attempt.reported_at))
        waits = [
            attempt.reported_at + limit_s + REPORTED_LATE_S - now
            for attempt, limit_s in self._watched.items()
        ]
        wait_s = max(0.0, min(CHECK_EVERY_S, *waits)) if waits else None
        self._due_at = None if wait_s is None else now + wait_s
        return wait_s

    def _forgive(self, now: float) -> None:
        """Extend each limit by the delay of a late tick. Code could not report while the loop was blocked or the process frozen."""
        late_s = 0.0 if self._due_at is None else now - self._due_at
        if late_s > _LATE_S:
            for attempt in self._watched:
                attempt.reported_at = min(now, attempt.reported_at + late_s)
