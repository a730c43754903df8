"""Recovery: reads the leases of the dead and has them carried out, in bounded batches.

What lives here: the ways from a death to settled tasks, one for each who notices. What may not: the noticing, and carrying out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final, Protocol
from uuid import UUID

from msgspec.structs import replace

from everbeat.config import RecoveryConfig
from everbeat.domain.hooks import HookRunner, NoHooks
from everbeat.domain.recovery import Charge, RecoveryRules, charge_of
from everbeat.domain.stall import Stall
from everbeat.domain.states import TaskState
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus
from everbeat.runtime.exit_report import ExitReport
from everbeat.services.carrying import Carried, Carrier, always
from everbeat.services.death import SWEEP, Death, DeathOf
from everbeat.services.observer import Statements
from everbeat.services.orders import facts_of
from everbeat.services.thresholds import Thresholds
from everbeat.store import leases, workers
from everbeat.store.leases import Lease, Recovered
from everbeat.store.statement import Statement

__all__ = ["Recoverer", "always"]

_MOST_OF_ONE_WORKER: Final = 10_000
_UNTIL_IT_LANDS: Final = None
_ONE_TRY: Final = 0.0
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class Page(Protocol):
    """A question for leases, oldest first, a page at a time."""

    def __call__(self, *, limit: int, after: Lease | None) -> Statement[list[Lease]]:
        """At most `limit` of those after the last one of the page before."""
        ...


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
        hooks: HookRunner | None = None,
    ) -> None:
        self._statements = statements
        self._config = config
        self._clock = clock
        self._sharers: dict[str, int] = {}
        self._carrier = Carrier(
            statements,
            config,
            channel=channel,
            observer_id=observer_id,
            events=events,
            clock=clock,
            random=random,
            hooks=hooks or NoHooks(),
        )
        self.rules = RecoveryRules(
            requeue_claimed=config.auto_requeue_stale_claimed,
            settle_running=config.auto_fail_stale_running,
            delay_ms=config.recovery_delay_ms,
            max_crashes=config.max_crashes,
            max_losses=config.max_losses,
        )

    async def recover_worker(
        self, worker_id: str, report: ExitReport, *, died_at: float, astray: int = 0
    ) -> int:
        """Settles what a buried worker process held, until it lands; `died_at` by the monotonic clock.

        Asked again after an error, it goes on where it was. `astray`: how much code still ran in it whose attempts were over. It may
        as well be what broke the process.
        """
        # What is locked, or was started this very moment, is asked for again until it is free. Who ran in that process is judged
        # before anything is changed: what is left after a first batch looks as if it had been alone.
        death = Death.by_exit(report, after_s=self._clock.monotonic() - died_at)
        carried, pause_s = Carried(), _FIRST_PAUSE_S
        while True:
            found = await self._statements.run(leases.leases_of_worker(worker_id, limit=_MOST_OF_ONE_WORKER))
            ran = astray + sum(lease.state is TaskState.RUNNING and not lease.alone for lease in found)
            self._sharers[worker_id] = sharers = max(self._sharers.get(worker_id, 0), ran)
            charge = always(Charge.LOSS) if death.is_ours else _charge(sharers)
            carried.add(await self.carry(found, always(death), charge=charge))
            if not carried.missed:
                break
            carried.missed.clear()
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        del self._sharers[worker_id]
        await self.announce(carried)
        return len(carried.landed)

    async def recover_lease(
        self,
        task_id: UUID,
        claim_id: UUID,
        report: ExitReport,
        on_left: Callable[[], None] | None = None,
        *,
        died_at: float | None = None,
    ) -> Recovered | None:
        """Settles one attempt whose task process died under it, until it lands; None when the lease was lost before.

        `on_left` is called whenever a hook answers Skip; the hook is asked again later. Not subject to the switches of automatic
        recovery: the holder lives and knows how its attempt ended.
        """
        since = self._clock.monotonic() if died_at is None else died_at

        def death(_: Lease) -> Death:
            return Death.by_exit(report, after_s=self._clock.monotonic() - since, pid=report.pid)

        return await self._recover_one(task_id, claim_id, death, alone=True, on_left=on_left)

    async def recover_stalled(
        self, task_id: UUID, claim_id: UUID, stall: Stall, on_left: Callable[[], None] | None = None
    ) -> Recovered | None:
        """The same for one attempt whose code lives but said nothing for its stall_timeout."""
        return await self._recover_one(task_id, claim_id, always(Death.by_stall(stall)), on_left=on_left)

    async def _recover_one(
        self,
        task_id: UUID,
        claim_id: UUID,
        death_of: DeathOf,
        *,
        alone: bool = False,
        on_left: Callable[[], None] | None,
    ) -> Recovered | None:
        rules = replace(self.rules, requeue_claimed=True, settle_running=True)
        pause_s = _FIRST_PAUSE_S
        while True:
            found = await self._statements.run(leases.leases_by_id([task_id]))
            held = [
                replace(lease, alone=lease.alone or alone) for lease in found if lease.claim_id == claim_id
            ]
            if not held:
                return None
            carried = await self.carry(held, death_of, charge=always(Charge.CRASH), rules=rules)
            if carried.landed:
                await self.announce(carried)
                return carried.landed[0]
            if carried.left:  # its holder lives and goes on holding it, until the hook says otherwise
                pause_s = self._config.check_interval_ms / 1_000
                if on_left is not None:
                    on_left()
            await self._clock.sleep(pause_s)  # otherwise somebody has the row locked
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def recover_supervisor(self, supervisor_id: str, death: Death) -> int:
        """Settles what the workers of an ended supervisor held, until it lands."""

        def page(*, limit: int, after: Lease | None) -> Statement[list[Lease]]:
            return leases.leases_of_supervisor(supervisor_id, limit=limit, after=after)

        return await self.recover_pages(page, always(death), patience_s=_UNTIL_IT_LANDS)

    async def recover_ended(self) -> int:
        """Buries workers of ended supervisors and settles what ended workers still hold; for every sweep.

        What a living supervisor saw end is its own to settle, for as long as the threshold of running tasks.
        """
        refused: DatabaseError | None = None
        try:
            await self._statements.run(workers.bury_orphans(), patience_s=_ONE_TRY)
        except DatabaseError as problem:
            refused = problem  # what is buried already is recovered all the same
        claimed = (TaskState.CLAIMED,) if self.rules.requeue_claimed else ()
        running = (TaskState.RUNNING,) if self.rules.settle_running else ()

        def page(*, limit: int, after: Lease | None) -> Statement[list[Lease]]:
            return leases.leases_of_ended(
                limit=limit,
                states=(*claimed, *running),
                owner_ms=self._config.running_stale_threshold_ms,
                after=after,
            )

        recovered = await self.recover_pages(page, Death.on_record)
        if refused is not None:
            raise refused
        return recovered

    async def recover_orphans(self, thresholds: Thresholds) -> int:
        """Settles what unknown workers have held for longer than its threshold, by the database's clock; for every sweep."""

        def page(*, limit: int, after: Lease | None) -> Statement[list[Lease]]:
            return leases.leases_orphaned(silent_ms=thresholds.all_ms()[0], limit=limit, after=after)

        return await self.recover_pages(page, always(ORPHANED), chosen=thresholds.is_stale)

    async def recover_pages(
        self,
        page: Page,
        death_of: DeathOf,
        *,
        rules: RecoveryRules | None = None,
        chosen: Callable[[Lease], bool] | None = None,
        patience_s: float | None = _ONE_TRY,
    ) -> int:
        """Goes through the pages once. What then is left is locked by somebody else, or to be left."""
        carried, last, size = Carried(), None, self._config.sweep_batch_size
        found: list[Lease] = []
        while last is None or len(found) == size:
            found = await self._statements.run(page(limit=size, after=last), patience_s=patience_s)
            if not found:
                break
            last = found[-1]
            wanted = found if chosen is None else [lease for lease in found if chosen(lease)]
            carried.add(
                await self.carry(
                    wanted, death_of, charge=always(Charge.LOSS), rules=rules, patience_s=patience_s
                )
            )
        await self.announce(carried)
        return len(carried.landed)

    async def carry_out(
        self,
        found: Sequence[Lease],
        death_of: DeathOf,
        *,
        charge: Callable[[Lease], Charge],
        rules: RecoveryRules | None = None,
        watched: tuple[str, int] | None = None,
        patience_s: float | None = _UNTIL_IT_LANDS,
    ) -> Carried:
        """Decides on these leases and does it, a batch at a time; an event and a hook for what landed.

        `watched`: the supervisor and the beat that the decision rests on; a beat since then undoes it.
        """
        carried = await self.carry(
            found, death_of, charge=charge, rules=rules, watched=watched, patience_s=patience_s
        )
        await self.announce(carried)
        return carried

    async def announce(self, carried: Carried) -> None:
        """Tells the hooks of a pass that is over."""
        await self._carrier.announce(carried)

    @property
    def hook_time_s(self) -> float:
        """How long the hooks of one batch may take."""
        return self._carrier.hook_time_s

    async def carry(
        self,
        found: Sequence[Lease],
        death_of: DeathOf,
        *,
        charge: Callable[[Lease], Charge],
        rules: RecoveryRules | None = None,
        watched: tuple[str, int] | None = None,
        patience_s: float | None = _UNTIL_IT_LANDS,
    ) -> Carried:
        """As `carry_out`, for one part of a pass: the hooks are told at its end, by `announce`."""
        return await self._carrier.carry_out(
            found, death_of, charge=charge, rules=rules or self.rules, watched=watched, patience_s=patience_s
        )


ORPHANED: Final = Death(noticed_by=SWEEP, cause="its worker is not registered")


def _charge(sharers: int) -> Callable[[Lease], Charge]:
    return lambda lease: charge_of(facts_of(lease), sharers=sharers)
