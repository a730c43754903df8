"""Leases that the database holds in a worker's name and the worker does not know: the answer to a claim or a settle was lost.

What lives here: giving them back at no cost. What may not: finding out that they are phantoms.
"""

from __future__ import annotations

from collections.abc import Sequence

from everbeat.store import leases
from everbeat.store.session import Session
from everbeat.worker.protocol import Lease


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
