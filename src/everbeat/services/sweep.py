"""An operator's sweep: recovers what has been silent for longer than the operator allows.

What lives here: the manual sweep, with its dry run. What may not: the reaper's proofs; a sweep is the operator's own word,
so it judges by the database's clock and works with automatic recovery switched off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import suppress
from itertools import groupby
from random import Random
from typing import Final

from msgspec.structs import replace

from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import UNKNOWN_FATE, SweepResult, SweptTask
from everbeat.domain.recovery import Charge, RecoveryRules
from everbeat.errors import DatabaseError
from everbeat.services.carrying import Carried
from everbeat.services.death import SWEEP, Death
from everbeat.services.observer import Statements
from everbeat.services.orders import order_for
from everbeat.services.recovery import ORPHANED, Recoverer, always
from everbeat.services.thresholds import Thresholds
from everbeat.store import diagnosis, leases, sweeping, workers
from everbeat.store.leases import Lease

TURN: Final = "sweep"
TURN_S: Final = 10.0
"""How long a sweeper that died keeps the others from sweeping; its hooks' time comes on top."""
AFTERWARDS_S: Final = 5.0
"""How long a sweep waits for each statement that follows the recovery."""
_CAUSE: Final = "its holder was silent for longer than the sweep allowed"


async def sweep(
    statements: Statements,
    config: RecoveryConfig,
    *,
    recoverer: Recoverer,
    threshold_ms: int | None = None,
    recovery_delay_ms: int | None = None,
    resilient_flags: Collection[str] | None = None,
    multiplier: int | None = None,
    dry_run: bool = False,
    random: Random | None = None,
    sweeper_id: str = "sweep",
) -> SweepResult:
    """Recovers stale leases now; None takes the configuration's value. A dry run changes no byte, and asks no hook."""
    each = _Sweep(
        statements,
        config,
        recoverer=recoverer,
        thresholds=Thresholds.manual(
            config, threshold_ms=threshold_ms, resilient_flags=resilient_flags, multiplier=multiplier
        ),
        rules=replace(
            recoverer.rules,
            requeue_claimed=True,
            settle_running=True,
            delay_ms=config.recovery_delay_ms if recovery_delay_ms is None else recovery_delay_ms,
        ),
        sweeper_id=sweeper_id,
    )
    return await each.look(random or Random(0)) if dry_run else await each.run()


class _Sweep:
    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        recoverer: Recoverer,
        thresholds: Thresholds,
        rules: RecoveryRules,
        sweeper_id: str,
    ) -> None:
        self._statements = statements
        self._batch_size = config.sweep_batch_size
        self._recoverer = recoverer
        self._thresholds = thresholds
        self._rules = rules
        self._turn = workers.take_turn(
            TURN, interval_ms=round((TURN_S + recoverer.hook_time_s) * 1_000), taken_by=sweeper_id
        )
        self._end_turn = sweeping.end_turn(TURN, taken_by=sweeper_id)

    async def look(self, random: Random) -> SweepResult:
        """What a sweep would do now."""
        tasks: list[SweptTask] = []
        stale = Counter[str]()
        is_standby = (await self._statements.run(diagnosis.standing())).is_standby
        async for page in self._stale():
            for lease in page:
                if is_standby and lease.ended_at is None:
                    tasks.append(_swept(lease, UNKNOWN_FATE))
                    continue
                order = order_for(lease, _death(lease), rules=self._rules, charge=Charge.LOSS, random=random)
                tasks.append(_swept(lease, "leave" if order is None else order.action))
                stale[lease.worker_id] += 1
        dead = set(stale)
        for each in [] if is_standby else await self._silent():
            if all(stale[worker_id] == held for worker_id, held in each.held.items()):
                dead.update(each.worker_ids)
        return SweepResult(
            worker_ids=tuple(sorted(dead)),
            recovered_count=0,
            tasks=tuple(tasks),
            missed=0,
            skipped=False,
            dry_run=True,
        )

    async def run(self) -> SweepResult:
        """One sweep, unless somebody else sweeps at this moment."""
        if not await self._statements.run(self._turn):
            return SweepResult(
                worker_ids=(), recovered_count=0, tasks=(), missed=0, skipped=True, dry_run=False
            )
        try:
            result, carried = await self._swept()
        except Exception:
            await self._give_turn_back()
            raise
        await self._give_turn_back()
        await self._recoverer.announce(carried)
        return result

    async def _give_turn_back(self) -> None:
        with suppress(DatabaseError):  # a turn ends by itself, too
            await self._statements.run(self._end_turn, patience_s=AFTERWARDS_S)

    async def _swept(self) -> tuple[SweepResult, Carried]:
        carried, tasks, dead = Carried(), list[SweptTask](), set[str]()
        async for page in self._stale():
            await self._statements.run(self._turn)  # prolonged
            for watched, group in groupby(sorted(page, key=_holder_key), key=_holder):
                held = list(group)
                done = await self._recoverer.carry(
                    held, _death, charge=always(Charge.LOSS), rules=self._rules, watched=watched
                )
                actions = {one.id: one.action for one in done.landed}
                left = {lease.id for lease in done.left.values()}
                tasks += [
                    _swept(lease, actions.get(lease.id, "leave"))
                    for lease in held
                    if lease.id in actions or lease.id in left
                ]
                carried.add(done)
        dead.update(task.worker_id for task in tasks)
        for ended in await self._end_the_silent():
            dead.add(ended)
        result = SweepResult(
            worker_ids=tuple(sorted(dead)),
            recovered_count=len(carried.landed),
            tasks=tuple(tasks),
            missed=len(carried.missed),
            skipped=False,
            dry_run=False,
            sessions_problem=await self._end_sessions(),
        )
        return result, carried

    async def _end_sessions(self) -> str | None:
        """End what the dead have left on the server. What is recovered stays recovered if that fails; returns why it did."""
        try:
            found = await self._statements.run(sweeping.remaining_sessions(), patience_s=AFTERWARDS_S)
            if doomed := [each for each in found if each.is_left and each.may_end]:
                await self._statements.run(sweeping.end_sessions(doomed), patience_s=AFTERWARDS_S)
        except DatabaseError as problem:
            return problem.message
        return None

    async def _end_the_silent(self) -> list[str]:
        """Ends the supervisors, with their workers, of which nothing was heard and that hold nothing more."""
        ended: list[str] = []
        for each in await self._silent():
            if each.held or not await self._statements.run(
                workers.end_supervisor(each.id, how=SWEEP, beat_seq=each.beat_seq)
            ):
                continue
            bury = workers.bury_workers(supervisor_id=each.id, how=SWEEP, cause=_CAUSE)
            buried = await self._statements.run(bury)
            ended += buried
        return ended

    async def _silent(self) -> list[sweeping.SilentSupervisor]:
        return await self._statements.run(
            sweeping.silent_supervisors(
                silent_ms=self._thresholds.longest_plain_ms, exact=self._thresholds.exact
            )
        )

    async def _stale(self) -> AsyncIterator[list[Lease]]:
        """The stale leases, oldest first, a batch at a time."""
        last: Lease | None = None
        least_ms = self._thresholds.all_ms()[0]
        while True:
            page = await self._statements.run(
                leases.leases_silent(silent_ms=least_ms, limit=self._batch_size, after=last)
            )
            # An ended holder needs no threshold: it is dead.
            yield [lease for lease in page if lease.ended_at is not None or self._thresholds.is_stale(lease)]
            if len(page) < self._batch_size:
                return
            last = page[-1]


def _holder(lease: Lease) -> tuple[str, int] | None:
    """Whose beats undo the decision; None where the worker was ended, or is not known."""
    if lease.supervisor_id is None or lease.supervisor_seq is None or lease.ended_at is not None:
        return None
    return lease.supervisor_id, lease.supervisor_seq


def _holder_key(lease: Lease) -> tuple[str, int]:
    return _holder(lease) or ("", 0)


def _death(lease: Lease) -> Death:
    if lease.is_orphan:
        return ORPHANED
    if lease.ended_at is not None:
        return replace(Death.on_record(lease), noticed_by=SWEEP, noticed_after_ms=None)
    return Death(noticed_by=SWEEP, cause=_CAUSE)


def _swept(lease: Lease, action: str) -> SweptTask:
    return SweptTask(
        id=lease.id,
        name=lease.name,
        worker_id=lease.worker_id,
        was=lease.state.value,
        action=action,
        silent_ms=lease.silent_ms,
    )
