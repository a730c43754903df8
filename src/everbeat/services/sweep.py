"""An operator's sweep: recovers what has been silent for longer than the operator allows.

What lives here: the manual sweep, with its dry run. What may not: the reaper's proofs; a sweep is the operator's own word,
so it judges by the database's clock and works with automatic recovery switched off.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Final
from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import SweepResult, SweptTask
from everbeat.domain.recovery import Charge
from everbeat.services.death import SWEEP, Death
from everbeat.services.observer import Statements
from everbeat.services.orders import order_for
from everbeat.services.recovery import Recoverer, always
from everbeat.services.thresholds import Thresholds
from everbeat.store import leases
from everbeat.store.leases import Lease

_PAGE: Final = 1_000


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
) -> SweepResult:
    """Recovers stale leases now; None takes the configuration's value. A dry run changes no byte."""
    thresholds = Thresholds.manual(
        config, threshold_ms=threshold_ms, resilient_flags=resilient_flags, multiplier=multiplier
    )
    rules = replace(
        recoverer.rules,
        requeue_claimed=True,
        settle_running=True,
        delay_ms=config.recovery_delay_ms if recovery_delay_ms is None else recovery_delay_ms,
    )
    found: list[SweptTask] = []
    done: set[UUID] = set()
    async for page in _stale(statements, thresholds):
        for lease in page:
            order = order_for(
                lease, _death(lease), rules=rules, charge=Charge.LOSS, random=random or Random(0)
            )
            found.append(_swept(lease, "leave" if order is None else order.action))
        if not dry_run:
            for (supervisor_id, seq), group in groupby(
                page, key=lambda lease: (lease.supervisor_id, lease.supervisor_seq)
            ):
                landed = await recoverer.carry_out(
                    list(group),
                    _death,
                    charge=always(Charge.LOSS),
                    rules=rules,
                    watched=(supervisor_id, seq),
                )
                done |= {one.id for one in landed}
    told = found if dry_run else [task for task in found if task.id in done]
    return SweepResult(
        worker_ids=tuple(sorted({task.worker_id for task in told})),
        recovered_count=len(done),
        tasks=tuple(told),
        skipped=0 if dry_run else len(found) - len(done),
        dry_run=dry_run,
    )


async def _stale(statements: Statements, thresholds: Thresholds) -> AsyncIterator[list[Lease]]:
    """The stale leases, a page at a time, those of one supervisor side by side."""
    last: Lease | None = None
    least_ms = thresholds.all_ms()[0]
    while True:
        page = await statements.run(leases.leases_silent(silent_ms=least_ms, limit=_PAGE, after=last))
        stale = [lease for lease in page if lease.silent_ms >= (thresholds.of(lease) or 0)]
        yield sorted(stale, key=lambda lease: lease.supervisor_id)
        if len(page) < _PAGE:
            return
        last = page[-1]


def _death(lease: Lease) -> Death:
    if lease.ended_at is not None:
        return replace(Death.on_record(lease), noticed_by=SWEEP)
    return Death(noticed_by=SWEEP, cause="its holder was silent for longer than the sweep allowed")


def _swept(lease: Lease, action: str) -> SweptTask:
    return SweptTask(
        id=lease.id,
        name=lease.name,
        worker_id=lease.worker_id,
        was=lease.state.value,
        action=action,
        silent_ms=lease.silent_ms,
    )
