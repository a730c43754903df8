"""Stalled code that its worker cannot notice: an event loop that stands still watches nothing, so its supervisor does.

What lives here: that judgement, about the workers of this supervisor only. What may not: code on a loop that turns, which
the worker judges itself (`worker.stall_watch`), and ending the worker (`hang_timeout_ms`).

A worker says something every second over a line that needs no database. Once it has been silent for longer than that and
a whole `stall_timeout`, no code on its loop has run for that long. If one task alone runs in that process, it is the one
that blocks; of several nobody knows which, so they are left alone (`hang_timeout_ms` ends such a process). Nobody else
judges: from outside, a worker that is cut off from the database looks the same as one whose code is silent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final, Protocol

from everbeat.domain.policy import StoredPolicy
from everbeat.domain.recovery import Charge
from everbeat.domain.stall import Stall
from everbeat.domain.states import TaskState
from everbeat.runtime.clock import Clock
from everbeat.services.death import Death
from everbeat.services.observer import Statements
from everbeat.services.orders import facts_of
from everbeat.services.recovery import Recoverer, always
from everbeat.store import leases
from everbeat.store.leases import Lease

SAYS_SOMETHING_EVERY_S: Final = 1.0
_SUSPICIOUS_S: Final = 2 * SAYS_SOMETHING_EVERY_S
_SOONEST_S: Final = 0.05
_ONE_TRY: Final = 0.0
_MOST: Final = 10_000


class Holder(Protocol):
    """A worker of this supervisor."""

    @property
    def worker_id(self) -> str:
        """Its present id; a new one after it was declared dead and came back."""
        ...

    @property
    def heard_at(self) -> float:
        """When it last said anything, by this process's monotonic clock."""
        ...

    @property
    def on_loop(self) -> Collection[str]:
        """The task functions that run on its event loop."""
        ...


class Stalls:
    """A service of every supervisor; it asks the database only about workers that have fallen silent."""

    name = "stalls"
    interval_s = SAYS_SOMETHING_EVERY_S

    def __init__(
        self,
        statements: Statements,
        *,
        holders: Callable[[], Sequence[Holder]],
        recoverer: Recoverer,
        clock: Clock,
    ) -> None:
        self._statements = statements
        self._holders = holders
        self._recoverer = recoverer
        self._clock = clock
        self._looked_at = self._since = clock.monotonic()

    async def tick(self) -> float | None:
        """One look. Asks for the next one at the very moment in which a silence becomes too long."""
        now = self._clock.monotonic()
        if now - self._looked_at > 2 * self.interval_s:
            self._since = now  # this process was stopped or busy: what was said meanwhile is still to be read
        self._looked_at = now
        waits = [
            await self._judge(holder)
            for holder in self._holders()
            if self._silent_s(holder, at=now) >= _SUSPICIOUS_S
        ]
        self._looked_at = self._clock.monotonic()
        soonest = min((wait for wait in waits if wait is not None), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None

    def _silent_s(self, holder: Holder, *, at: float) -> float:
        return at - max(holder.heard_at, self._since)

    async def _judge(self, holder: Holder) -> float | None:
        """Recovers what has stalled under one silent worker; answers in how many seconds the next of its tasks will have."""
        heard_at, worker_id = holder.heard_at, holder.worker_id
        page = leases.leases_of_worker(worker_id, limit=_MOST)
        held = await self._statements.run(page, patience_s=_ONE_TRY)
        sharing = [lease for lease in held if lease.state is TaskState.RUNNING and not lease.alone]
        # Of several nobody knows which one blocks the loop, or holds the GIL, and the others are alive.
        blocked = [lease for lease in sharing if len(sharing) == 1 and lease.name in holder.on_loop]
        if (holder.heard_at, holder.worker_id) != (heard_at, worker_id):
            return None  # it has come back
        # It may have spoken right before it fell silent to us, and its last word to us was up to a second before that.
        stood_s = self._silent_s(holder, at=self._clock.monotonic()) - SAYS_SOMETHING_EVERY_S
        waits = []
        for lease in blocked:
            limit_s = _stall_timeout_s(lease)
            if limit_s is None:
                continue
            if stood_s < limit_s:
                waits.append(limit_s - stood_s)
                continue
            death = Death.by_stall(Stall(silent_s=stood_s, timeout_s=limit_s, loop_blocked=True))
            await self._recoverer.carry_out(
                [lease], always(death), charge=always(Charge.CRASH), patience_s=_ONE_TRY
            )
        return min(waits, default=None)


def _stall_timeout_s(lease: Lease) -> float | None:
    policy: StoredPolicy = facts_of(lease).policy
    return None if policy.stall_timeout_ms is None else policy.stall_timeout_ms / 1_000
