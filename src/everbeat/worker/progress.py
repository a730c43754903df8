"""Progress that running code reports, written at most once a second for each task; the last word wins.

What lives here: the throttle and the write. What may not: what silence means (`stall_watch`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.store.leases import record_progress
from everbeat.store.session import Session
from everbeat.worker.attempt import Attempt, Stage

WRITE_EVERY_S: Final = 1.0


class ProgressRecorder:
    """A service. `on_lost` is told of running attempts whose lease turned out to be lost."""

    name = "progress"
    interval_s = 3_600.0

    def __init__(self, session: Session, *, clock: Clock, on_lost: Callable[[Attempt], None]) -> None:
        self.wake = asyncio.Event()
        self._session = session
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._dirty: dict[Attempt, float] = {}
        self._written_at: dict[Attempt, float] = {}

    def note(self, attempt: Attempt) -> None:
        """New progress waits in this attempt; from any thread."""
        attempt.spoke_at = self._clock.monotonic()
        if not attempt.progress_noted:
            attempt.progress_noted = True
            self._loop.call_soon_threadsafe(self._note, attempt)

    async def tick(self) -> float | None:
        """Write what is due."""
        now = self._clock.monotonic()
        for attempt in [attempt for attempt, due_at in self._dirty.items() if due_at <= now]:
            await self.write(attempt)
        return min((due_at - now for due_at in self._dirty.values()), default=None)

    async def write(self, attempt: Attempt) -> None:
        """Write what waits, due or not, unless the lease is over."""
        self._dirty.pop(attempt, None)
        attempt.progress_noted = False
        progress, attempt.progress = attempt.progress, None
        if progress is None or attempt.stage is Stage.GONE:
            return
        self._written_at[attempt] = self._clock.monotonic()
        held = await self._session.run(record_progress(attempt.id, attempt.claim_id, progress))
        if not held and attempt.stage is Stage.RUNNING:
            self._on_lost(attempt)

    def forget(self, attempt: Attempt) -> None:
        """The lease is over."""
        self._dirty.pop(attempt, None)
        self._written_at.pop(attempt, None)

    def _note(self, attempt: Attempt) -> None:
        if attempt.stage is Stage.RUNNING and not attempt.holds_progress:
            self._dirty[attempt] = self._written_at.get(attempt, -WRITE_EVERY_S) + WRITE_EVERY_S
            self.wake.set()
