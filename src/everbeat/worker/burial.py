"""The burial of a worker: final, asked again until the database has answered.

What lives here: ending the rows of workers. What may not: noticing that one ended.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.exit_report import ExitReport
from everbeat.store import workers
from everbeat.store.session import Session
from everbeat.worker.seat import Seat

_AGAIN_S: Final = 1.0
_log = logging.getLogger("everbeat.worker")


class RecoverWorker(Protocol):
    """Settles what a buried worker held, until it lands; `died_at` by the monotonic clock, `astray` as the seat says."""

    async def __call__(self, worker_id: str, report: ExitReport, *, died_at: float, astray: int) -> None:
        """Raises a DatabaseError where the database refuses."""
        ...


class SettleStopped(Protocol):
    """Settles the code of a stopped worker by what each policy says of a stop; if `code_runs`, only what never runs again."""

    async def __call__(self, worker_id: str, *, code_runs: bool = False) -> None:
        """Raises a DatabaseError where the database refuses."""
        ...


class Burials:
    """How the workers of one supervision end; nothing vouches for any of them any more."""

    def __init__(
        self,
        session: Session,
        config: RecoveryConfig,
        *,
        settle_stopped: SettleStopped,
        recover_worker: RecoverWorker,
        clock: Clock,
    ) -> None:
        self._session = session
        self._settle_stopped = settle_stopped
        self._recover_worker = recover_worker
        self._clock = clock
        self._threshold_s = max(config.claimed_stale_threshold_ms, config.running_stale_threshold_ms) / 1_000

    async def by_exit(self, seat: Seat, report: ExitReport, *, died_at: float) -> None:
        """Its process was seen to end: its row ends, and what it held is settled."""
        # Before the row ends: from then on a sweep of any tree could take the stop for a death.
        if report.stopped:
            await self._until_answered(lambda: self._settle_stopped(seat.worker_id))
        await self._until_answered(lambda: self._end(seat, how="child_exit", report=report))
        await self._until_answered(
            lambda: self._recover_worker(seat.worker_id, report, died_at=died_at, astray=seat.astray)
        )

    async def by_age(self, seat: Seat, report: ExitReport) -> None:
        """The same where an exit is no proof: its row ends after a whole threshold; the next sweep settles what it held."""
        await self._clock.sleep(self._threshold_s)
        await self._until_answered(lambda: self._end(seat, how="age", report=report))

    async def in_order(self, seat: Seat) -> None:
        """It has settled or given back everything but what a recovery hook left to it, and is gone: sweeps offer that again."""
        await self._until_answered(lambda: self._end(seat, how="left"))

    async def with_running_code(self, seat: Seat) -> None:
        """It has left, and code of its tasks goes on in a process that does not end: what never runs again is settled."""
        await self._until_answered(lambda: self._settle_stopped(seat.worker_id, code_runs=True))

    async def after_code(self, seat: Seat, settle: Callable[[], Awaitable[None]]) -> None:
        """The same when that code has ended, which `settle` waits for: the rest is settled, and its row ends."""
        await self._until_answered(settle)
        await self._until_answered(lambda: self._settle_stopped(seat.worker_id))
        await self._until_answered(lambda: self._end(seat, how="left"))

    async def _end(self, seat: Seat, *, how: str, report: ExitReport | None = None) -> None:
        await self._session.run(
            workers.bury_workers(
                worker_ids=[seat.worker_id],
                how=how,
                cause=None if report is None else report.cause,
                exit_code=None if report is None else report.exit_code,
                signal=None if report is None else report.signal_number,
            )
        )

    async def _until_answered(self, ask: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                return await ask()
            except DatabaseError as problem:
                _log.error("burial_refused problem=%s", problem)
                await self._clock.sleep(_AGAIN_S)
