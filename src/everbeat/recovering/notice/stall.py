"""Detect stalled code that its worker cannot detect, because the code is blocking the worker's event loop.

A worker sends a message to its supervisor every second, over a socket that needs no database. If no message arrives for a second plus a
whole `stall_timeout`, no code on the loop has run for that long. If a single task is running in that process, this task is blocking the
loop. If several tasks are running, it is unknown which of them is blocking, so all are left alone (`hang_timeout_ms` covers this case).

Only the worker's own supervisor judges. Other supervisors cannot distinguish a worker whose code is silent from one that is cut off
from the database.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final, Protocol

from everbeat.domain.recovery.decision import Charge, Stall
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TaskState
from everbeat.recovering.observer import ONE_TRY
from everbeat.recovering.orders import Death, LostLease, facts_of
from everbeat.recovering.recoverer import Recoverer, Recovery
from everbeat.store import leases
from everbeat.store.leases import Lease

SAYS_SOMETHING_EVERY_S: Final = 1.0
_SUSPICIOUS_S: Final = 2 * SAYS_SOMETHING_EVERY_S
_SOONEST_S: Final = 0.05
_MOST: Final = 10_000


class LocalWorker(Protocol):
    """The interface of a worker whose supervisor runs in this process."""

    @property
    def worker_id(self) -> str:
        """Return the worker's current id. A worker that was declared dead and came back has a new id."""
        ...

    @property
    def heard_at(self) -> float:
        """Return when the worker last sent a message, on this process's monotonic clock."""
        ...

    @property
    def on_loop(self) -> Collection[str]:
        """Return the names of the task functions that run on the worker's event loop."""
        ...


class LocalSupervisor(Protocol):
    """The interface of the supervisor in this process."""

    @property
    def workers(self) -> Sequence[LocalWorker]:
        """Return the workers for which the supervisor currently sends heartbeats."""
        ...


class BlockedLoopWatch:
    """A service in every supervisor that recovers tasks that block a worker's event loop.

    It queries the database only for workers that are silent.
    """

    name = "stalls"
    interval_s = SAYS_SOMETHING_EVERY_S

    def __init__(self, recoverer: Recoverer, *, supervisor: LocalSupervisor) -> None:
        self._environment = recoverer.environment
        self._recoverer = recoverer
        self._supervisor = supervisor
        self._clock = recoverer.environment.clock
        self._looked_at = self._since = self._clock.monotonic()

    async def tick(self) -> float | None:
        """Judge all silent workers once. Return the seconds until another silence reaches its timeout, if that is soon."""
        now = self._clock.monotonic()
        if now - self._looked_at > 2 * self.interval_s:
            self._since = now  # this process was suspended or busy, and messages are still unread
        self._looked_at = now
        waits = [
            await self._judge(worker)
            for worker in self._supervisor.workers
            if self._silent_s(worker, at=now) >= _SUSPICIOUS_S
        ]
        self._looked_at = self._clock.monotonic()
        soonest = min((wait for wait in waits if wait is not None), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None

    def _silent_s(self, worker: LocalWorker, *, at: float) -> float:
        return at - max(worker.heard_at, self._since)

    async def _judge(self, worker: LocalWorker) -> float | None:
        """Recover the stalled task of a silent worker. If the task is not stalled yet, return the seconds until it will be."""
        heard_at, worker_id = worker.heard_at, worker.worker_id
        held = await self._environment.run_once(leases.leases_of_worker(worker_id, limit=_MOST))
        sharing = [lease for lease in held if lease.state is TaskState.RUNNING and not lease.alone]
        # If several tasks are running, it is unknown which of them is blocking the loop or holding the GIL. The others are not stalled.
        blocked = [lease for lease in sharing if len(sharing) == 1 and lease.name in worker.on_loop]
        if (worker.heard_at, worker.worker_id) != (heard_at, worker_id):
            return None  # the worker has come back
        # The code might have reported progress up to a second after the last message, just before the loop was blocked.
        stood_s = self._silent_s(worker, at=self._clock.monotonic()) - SAYS_SOMETHING_EVERY_S
        waits = []
        for lease in blocked:
            limit_s = _stall_timeout_s(lease)
            if limit_s is None:
                continue
            if stood_s < limit_s:
                waits.append(limit_s - stood_s)
                continue
            death = Death.by_stall(Stall(silent_s=stood_s, timeout_s=limit_s, loop_blocked=True))
            await self._recoverer.recover(
                Recovery(lost=[LostLease(lease, death, Charge.CRASH)], patience_s=ONE_TRY)
            )
        return min(waits, default=None)


def _stall_timeout_s(lease: Lease) -> float | None:
    policy: StoredPolicy = facts_of(lease).policy
    return None if policy.stall_timeout_ms is None else policy.stall_timeout_ms / 1_000
