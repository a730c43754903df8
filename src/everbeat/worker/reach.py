"""Whether this worker reaches the database at all, asked only while an outcome waits for long to be settled.

What lives here: the question, and for how long it was not answered. What may not: what follows; that is the supervisor's
(`cut_off_watch`). An outcome may wait for other reasons, such as a row that somebody keeps locked: then the question is
answered, and nothing follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.store.leases import check_leases
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.worker.attempt import Stage
from everbeat.worker.leases import LeaseTable

_ASKS_PER_THRESHOLD: Final = 4
_LONGEST_S: Final = 15.0
_ONE_TRY: Final = 0.0


class Reach:
    """A service. It asks on a session of its own, made anew each time, so that a broken one proves nothing.

    `answers()` counts what the database answered to the rest of the worker. A question may take a whole threshold: a far or
    busy database is no reason.
    """

    name = "reach"

    def __init__(
        self,
        target: Target,
        session_name: Callable[[], str],
        *,
        table: LeaseTable,
        recovery: RecoveryConfig,
        answers: Callable[[], int],
        clock: Clock,
    ) -> None:
        self.wake = asyncio.Event()
        threshold_s = recovery.running_stale_threshold_ms / 1_000
        self.interval_s = min(threshold_s / _ASKS_PER_THRESHOLD, _LONGEST_S)
        self._patience_s = max(threshold_s, self.interval_s)
        self._answers = answers
        self._seen = answers()
        self._target = target
        self._session_name = session_name
        self._table = table
        self._clock = clock
        self._answered_at = self._looked_at = clock.monotonic()
        self._in_vain_s = 0.0

    def cut_off_s(self) -> float:
        """For how long an outcome has waited while questions went unanswered; 0 while none waits.

        Time in which nothing was asked does not count: the process was frozen, or its loop blocked.
        """
        since = self._oldest()
        waited_s = 0.0 if since is None else self._clock.monotonic() - max(since, self._answered_at)
        return min(waited_s, self._in_vain_s)

    async def tick(self) -> float | None:
        """Ask, if an outcome has waited for an interval."""
        since, now = self._oldest(), self._clock.monotonic()
        looked_at, self._looked_at = self._looked_at, now
        if since is None or now - since < self.interval_s:
            self._in_vain_s = 0.0
            return None
        if self._answers() != self._seen:  # something of this worker was answered
            self._seen = self._answers()
            self._answered_at, self._in_vain_s = now, 0.0
            return None
        session = Session(self._target, self._session_name(), reply_timeout_s=self._patience_s)
        try:
            await session.run(check_leases([]), patience_s=_ONE_TRY)
            self._answered_at = self._clock.monotonic()
            self._in_vain_s = 0.0
        except (DatabaseError, OSError):
            self._in_vain_s += min(self._clock.monotonic() - looked_at, self._patience_s + self.interval_s)
        finally:
            await session.drop()
        self._looked_at = self._clock.monotonic()
        return None

    def _oldest(self) -> float | None:
        return min((attempt.settling_since for attempt in self._table.at(Stage.SETTLING)), default=None)
