"""Releasing workers on an operator's word: they are ended, and what they hold is recovered at once.

What lives here: that. What may not: judging whether they are dead; the operator has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from everbeat.domain.inspection import SweepResult, SweptTask
from everbeat.domain.recovery import Charge
from everbeat.errors import UnknownName
from everbeat.services.carrying import Carried
from everbeat.services.death import OPERATOR, Death
from everbeat.services.observer import Statements
from everbeat.services.recovery import Recoverer, always
from everbeat.store import leases, sweeping
from everbeat.store.leases import Lease

_PAGE: Final = 1_000
_DEATH: Final = Death(noticed_by=OPERATOR, cause="it was released by an operator")


async def release(statements: Statements, worker_ids: Sequence[str], *, recoverer: Recoverer) -> SweepResult:
    """Ends these workers for good and settles their tasks by the ordinary policy. Raises UnknownName before anything is done.

    `worker_ids` of the result are those that it ended: a worker that had ended before is not among them.

    One that lives after all loses what it held, and goes on under another id.
    """
    known = await statements.run(sweeping.known_workers())
    unknown = [name for name in worker_ids if name not in {each.id for each in known}]
    if unknown:
        raise UnknownName(
            "worker",
            unknown,
            known=[each.id for each in known if not each.is_ended],
            former=[each.id for each in known if each.is_ended],
        )
    await statements.run(sweeping.release_workers(worker_ids, cause=_DEATH.cause))
    # Not what the statement has just ended: repeated after a lost reply, it finds them ended.
    ended = {each.id for each in known if not each.is_ended}
    carried, tasks = Carried(), list[SweptTask]()
    for worker_id in dict.fromkeys(worker_ids):
        last: Lease | None = None
        while found := await statements.run(leases.leases_of_worker(worker_id, limit=_PAGE, after=last)):
            last = found[-1]
            done = await recoverer.carry(
                found,
                always(_DEATH),
                charge=always(Charge.LOSS),
                rules=replace(recoverer.rules, requeue_claimed=True, settle_running=True),
            )
            actions = {one.id: one.action for one in done.landed}
            left = {lease.id for lease in done.left.values()}
            tasks += [
                _released(lease, actions.get(lease.id, "leave"))
                for lease in found
                if lease.id in actions or lease.id in left
            ]
            carried.add(done)
    await recoverer.announce(carried)
    return SweepResult(
        worker_ids=tuple(name for name in dict.fromkeys(worker_ids) if name in ended),
        recovered_count=len(carried.landed),
        tasks=tuple(tasks),
        skipped=False,
        missed=len(carried.missed),
        dry_run=False,
    )


def _released(lease: Lease, action: str) -> SweptTask:
    return SweptTask(
        id=lease.id,
        name=lease.name,
        worker_id=lease.worker_id,
        was=lease.state.value,
        action=action,
        silent_ms=lease.silent_ms,
    )
