"""Recovery: reads the leases of the dead, lets the domain decide, and carries out in bounded batches.

What lives here: the one way from a death to settled tasks, for all who notice one. What may not: the noticing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Final, TypeVar
from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.domain.recovery import Charge, RecoveryRules
from everbeat.domain.states import TaskState
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, TaskRecovered
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.death import Death, DeathOf
from everbeat.services.observer import Statements
from everbeat.services.orders import order_for
from everbeat.store import leases, workers
from everbeat.store.leases import Lease, Recovered, RecoveryOrder
from everbeat.store.statement import Statement

_MOST_OF_ONE_WORKER: Final = 10_000
_UNTIL_IT_LANDS: Final = None
_ONE_TRY: Final = 0.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0

V = TypeVar("V")


class Recoverer:
    """Recovers what the dead held. `observer_id` says in whose name; every method may be repeated and run beside others."""

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        channel: str,
        observer_id: Callable[[], str],
        events: EventBus,
        clock: Clock,
        random: Random,
    ) -> None:
        self._statements = statements
        self._config = config
        self._channel = channel
        self._observer_id = observer_id
        self._events = events
        self._clock = clock
        self._random = random
        self.rules = RecoveryRules(
            requeue_claimed=config.auto_requeue_stale_claimed,
            settle_running=config.auto_fail_stale_running,
            delay_ms=config.recovery_delay_ms,
            max_crashes=config.max_crashes,
            max_losses=config.max_losses,
        )

    async def recover_worker(self, worker_id: str, report: ExitReport, *, died_at: float) -> int:
        """Settles what a buried worker process held, until it lands; `died_at` by the monotonic clock."""
        page = leases.leases_of_worker(worker_id, limit=_MOST_OF_ONE_WORKER)
        found = await self._statements.run(page)
        # Judged before anything is changed: what is left after a first batch looks as if it had been alone.
        running = sum(lease.state is TaskState.RUNNING for lease in found)
        charge = Charge.CRASH if running == 1 else Charge.LOSS
        death = Death.by_exit(report, after_s=self._clock.monotonic() - died_at)
        return await self._recover_pages(
            page, always(death), charge=always(charge), found=found, waits_for_locks=True
        )

    async def recover_lease(
        self, task_id: UUID, claim_id: UUID, report: ExitReport, *, died_at: float | None = None
    ) -> Recovered | None:
        """Settles one attempt whose task process died under it, until it lands; None when the lease was lost before.

        Not subject to the switches of automatic recovery: the holder lives and knows how its attempt ended.
        """
        after_s = 0.0 if died_at is None else self._clock.monotonic() - died_at
        death = Death.by_exit(report, after_s=after_s, pid=report.pid)
        rules = replace(self.rules, requeue_claimed=True, settle_running=True)
        pause_s = _FIRST_PAUSE_S
        while True:
            found = await self._statements.run(leases.leases_by_id([task_id]))
            held = [lease for lease in found if lease.claim_id == claim_id]
            if not held:
                return None
            if landed := await self.carry_out(held, always(death), charge=always(Charge.CRASH), rules=rules):
                return landed[0]
            await self._clock.sleep(pause_s)  # somebody has the row locked
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def recover_supervisor(self, supervisor_id: str, death: Death) -> int:
        """Settles what the workers of an ended supervisor held, until it lands."""
        page = leases.leases_of_supervisor(supervisor_id, limit=self._config.sweep_batch_size)
        return await self._recover_pages(page, always(death), charge=always(Charge.LOSS))

    async def recover_ended(self) -> int:
        """Buries workers of ended supervisors and settles what ended workers still hold; for every sweep."""
        await self._statements.run(workers.bury_orphans(), patience_s=_ONE_TRY)
        claimed = (TaskState.CLAIMED,) if self.rules.requeue_claimed else ()
        running = (TaskState.RUNNING,) if self.rules.settle_running else ()
        page = leases.leases_of_ended(limit=self._config.sweep_batch_size, states=(*claimed, *running))
        return await self._recover_pages(
            page, Death.on_record, charge=always(Charge.LOSS), patience_s=_ONE_TRY
        )

    async def _recover_pages(
        self,
        page: Statement[list[Lease]],
        death_of: DeathOf,
        *,
        charge: Callable[[Lease], Charge],
        found: list[Lease] | None = None,
        patience_s: float | None = _UNTIL_IT_LANDS,
        waits_for_locks: bool = False,
    ) -> int:
        """Reads and recovers until a page shows nothing new: what then is left is locked by somebody else, or to be left.

        `waits_for_locks`: what is locked, or was started this very moment, is tried again until it is free.
        """
        recovered, seen, pause_s = 0, set[UUID](), _FIRST_PAUSE_S
        if found is None:
            found = await self._statements.run(page, patience_s=patience_s)
        while not seen.issuperset(lease.claim_id for lease in found):
            landed, missed = await self._carry_out(found, death_of, charge=charge, patience_s=patience_s)
            recovered += len(landed)
            seen.update(lease.claim_id for lease in found)
            if missed and waits_for_locks:
                seen -= missed
                await self._clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            found = await self._statements.run(page, patience_s=patience_s)
        return recovered

    async def carry_out(
        self,
        found: Sequence[Lease],
        death_of: DeathOf,
        *,
        charge: Callable[[Lease], Charge],
        rules: RecoveryRules | None = None,
        watched: tuple[str, int] | None = None,
        patience_s: float | None = _UNTIL_IT_LANDS,
    ) -> list[Recovered]:
        """Decides on these leases and does it, a batch at a time; answers what landed, with an event for each.

        `watched`: the supervisor and the beat that the decision rests on; a beat since then undoes it.
        """
        landed, _ = await self._carry_out(
            found, death_of, charge=charge, rules=rules, watched=watched, patience_s=patience_s
        )
        return landed

    async def _carry_out(
        self,
        found: Sequence[Lease],
        death_of: DeathOf,
        *,
        charge: Callable[[Lease], Charge],
        rules: RecoveryRules | None = None,
        watched: tuple[str, int] | None = None,
        patience_s: float | None,
    ) -> tuple[list[Recovered], set[UUID]]:
        """What landed, and the claim_ids of what was ordered and did not."""
        landed: list[Recovered] = []
        missed: set[UUID] = set()
        size = self._config.sweep_batch_size
        for first in range(0, len(found), size):
            decided = defaultdict[str, list[RecoveryOrder]](list)
            for lease in found[first : first + size]:
                death = death_of(lease)
                order = order_for(
                    lease,
                    death,
                    rules=rules or self.rules,
                    charge=charge(lease),
                    random=self._random,
                    by_swap=watched is not None,
                )
                if order is not None:
                    decided[death.noticed_by].append(order)
            for noticed_by, orders in decided.items():
                statement = leases.recover(
                    orders,
                    noticed_by=noticed_by,
                    recovered_by=self._observer_id(),
                    channel=self._channel,
                    holder=watched,
                )
                done = await self._statements.run(statement, patience_s=patience_s)
                landed += done
                ids = {one.id for one in done}
                missed.update(order.claim_id for order in orders if order.id not in ids)
                self._tell(done, noticed_by)
        return landed, missed

    def _tell(self, landed: Sequence[Recovered], noticed_by: str) -> None:
        for one in landed:
            self._events.emit(
                TaskRecovered(
                    task_id=one.id,
                    from_state=one.was.value,
                    action=one.action,
                    cause=one.cause,
                    noticed_by=noticed_by,
                    noticed_after_s=(one.noticed_after_ms or 0) / 1_000,
                )
            )


def always(value: V) -> Callable[[Lease], V]:
    """The same answer for every lease."""
    return lambda _: value
