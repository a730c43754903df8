"""Leases that the database holds in a worker's name and the worker does not know: the answer to a claim or a settle was lost.

What lives here: giving them back at no cost. What may not: finding out that they are phantoms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from everbeat.store import leases
from everbeat.store.session import Session
from everbeat.worker.leases import LeaseTable
from everbeat.worker.protocol import Lease

_PAGE: Final = 1_000


async def give_back(session: Session, phantoms: Sequence[Lease]) -> None:
    """Whether they had begun or not: no code of theirs ever ran here."""
    channel = session.target.channel
    released = await session.run(leases.release(phantoms, channel=channel))
    running = [lease for lease in phantoms if lease[0] not in released]
    if running:
        outcomes = [
            leases.Settlement(id=task_id, claim_id=claim_id, outcome="RELEASED")
            for task_id, claim_id in running
        ]
        await session.run(leases.settle(outcomes, channel=channel))


async def give_back_unknown(session: Session, table: LeaseTable, worker_id: str) -> None:
    """Whatever the database holds in this name and the table does not. Not while a claim is under way."""
    last = None
    while page := await session.run(leases.leases_of_worker(worker_id, limit=_PAGE, after=last)):
        last = page[-1]
        if phantoms := table.unknown((lease.id, lease.claim_id) for lease in page):
            await give_back(session, phantoms)
