"""Settles what ran in a worker process that was told to stop, once the process has ended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final
from uuid import UUID

from everbeat.domain.states import TaskState
from everbeat.runtime.events import EventBus
from everbeat.runtime.failure_log import task_failure
from everbeat.services.observer import Statements
from everbeat.services.orders import facts_of
from everbeat.store import leases
from everbeat.store.division import divided
from everbeat.store.leases import Lease, Settlement
from everbeat.store.stopped import left_by_hooks, stop_settlement

_MOST_AT_ONCE: Final = 500
_LONGEST_PROBLEM: Final = 500
_log = logging.getLogger("everbeat.services")


async def settle_stopped(
    statements: Statements, worker_id: str, *, channel: str, events: EventBus, code_runs: bool = False
) -> None:
    """Settle each started attempt by what its policy says of a stop; retried until the database answers.

    `code_runs`: the code of some goes on. Only those that never run again and are in no serial line are settled: a second run, or
    the next run of the line, could overlap the others.

    A lease that a recovery hook left stays as it is. What the database refuses stays held: the recovery of the worker
    comes next and decides on it.
    """
    verdicts: Counter[str] = Counter()
    last = None
    while found := await statements.run(leases.leases_of_worker(worker_id, limit=_MOST_AT_ONCE, after=last)):
        last = found[-1]
        left = await statements.run(left_by_hooks([lease.id for lease in found]))
        ran = [
            stop_settlement(lease.id, lease.claim_id, policy=facts_of(lease).policy)
            for lease in found
            if lease.state is TaskState.RUNNING
            and lease.id not in left
            and not (code_runs and (lease.serial is not None or facts_of(lease).policy.retries_stop))
        ]

        async def settle(part: Sequence[Settlement]) -> list[tuple[UUID, str]]:
            return list((await statements.run(leases.settle(part, channel=channel))).items())

        if ran:
            landed = dict(await divided(ran, settle, _refused))
            verdicts.update(landed.values())
            _tell(found, ran, landed, events)
    _log.info(
        "stopped_code_settled worker_id=%s handed_back=%d failed=%d",
        worker_id,
        verdicts["PENDING"],
        verdicts["FAILED"],
    )


def _tell(
    found: Sequence[Lease], ran: Sequence[Settlement], landed: Mapping[UUID, str], events: EventBus
) -> None:
    errors = {one.claim_id: one.error or b"{}" for one in ran}
    for lease in found:
        if landed.get(lease.claim_id) == "FAILED":
            events.emit(
                task_failure(lease.id, lease.name, attempt=lease.attempt, error=errors[lease.claim_id])
            )


async def _refused(settlement: Settlement, problem: Exception) -> list[tuple[UUID, str]]:
    _log.error("settlement_refused task_id=%s problem=%s", settlement.id, str(problem)[:_LONGEST_PROBLEM])
    return []
