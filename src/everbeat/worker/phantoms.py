"""Giving leases back at no cost: those that a worker does not want to start, and those that the database holds in its name and the
worker does not know, because the answer to a claim or a settle was lost.

What lives here: giving them back. What may not: finding out which they are.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Sequence
from typing import Final
from uuid import UUID

from everbeat.store import leases
from everbeat.store.division import divided
from everbeat.store.session import Session
from everbeat.worker.leases import LeaseTable
from everbeat.worker.protocol import Lease

_PAGE: Final = 1_000
_LONGEST_PROBLEM: Final = 500
_log = logging.getLogger("everbeat.worker")


async def release(session: Session, held: Sequence[Lease]) -> list[UUID]:
    """Give claimed tasks back; return those that were still held.

    A row that PostgreSQL refuses as PENDING, for a name too long for the index for example, keeps its lease until its worker
    ends. Recovery then ends it FAILED.
    """

    def write(some: Sequence[Lease]) -> Awaitable[list[UUID]]:
        return session.run(leases.release(some, channel=session.target.channel))

    return await divided(held, write, _refused)


async def _refused(lease: Lease, problem: Exception) -> list[UUID]:
    _log.error("release_refused task_id=%s problem=%s", lease[0], str(problem)[:_LONGEST_PROBLEM])
    return []


async def give_back(session: Session, phantoms: Sequence[Lease]) -> None:
    """Whether they had begun or not: no code of theirs ever ran here."""
    released = await release(session, phantoms)
    if running := [lease for lease in phantoms if lease[0] not in released]:
        await divided(running, lambda some: _hand_back(session, some), _refused)


async def _hand_back(session: Session, running: Sequence[Lease]) -> list[UUID]:
    outcomes = [
        leases.Settlement(id=task_id, claim_id=claim_id, outcome="RELEASED") for task_id, claim_id in running
    ]
    settled = await session.run(leases.settle(outcomes, channel=session.target.channel))
    return list(settled)


async def give_back_unknown(session: Session, table: LeaseTable, worker_id: str) -> None:
    """Whatever the database holds in this name and the table does not. Not while a claim is under way."""
    last = None
    while page := await session.run(leases.leases_of_worker(worker_id, limit=_PAGE, after=last)):
        last = page[-1]
        if phantoms := table.unknown((lease.id, lease.claim_id) for lease in page):
            await give_back(session, phantoms)
