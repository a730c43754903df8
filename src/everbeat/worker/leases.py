"""What this worker holds, in memory: the truth that beats vouch for, and the differences that a supervisor is told.

What lives here: the table. What may not: any statement, and any decision about a lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from uuid import UUID

from everbeat.worker.attempt import Attempt, Stage
from everbeat.worker.protocol import Lease


class LeaseTable:
    """The attempts held, from the claim's answer until a settle, release or loss is certain."""

    def __init__(self) -> None:
        self._held: dict[UUID, Attempt] = {}
        self._by_task: dict[UUID, Attempt] = {}
        self._untold: dict[Attempt, None] = {}
        self._removed: list[UUID] = []

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Attempt]:
        return iter(tuple(self._held.values()))

    def add(self, attempt: Attempt) -> None:
        """A claim's answer gave us this lease."""
        self._held[attempt.claim_id] = attempt
        self._by_task[attempt.id] = attempt
        self._untold[attempt] = None

    def remove(self, attempt: Attempt) -> bool:
        """The lease is over; False if it was before. Nothing is written or vouched for from here on."""
        attempt.stage = Stage.GONE
        if self._held.pop(attempt.claim_id, None) is None:
            return False
        latest = self._by_task.pop(attempt.id, attempt)
        if latest is not attempt:
            self._by_task[attempt.id] = latest
        if attempt in self._untold:
            del self._untold[attempt]
        else:
            self._removed.append(attempt.claim_id)
        return True

    def by_claim(self, claim_id: UUID) -> Attempt | None:
        """The attempt held under this claim_id."""
        return self._held.get(claim_id)

    def by_task(self, task_id: UUID) -> Attempt | None:
        """The attempt of this task."""
        return self._by_task.get(task_id)

    def of(self, leases: Iterable[Lease]) -> list[Attempt]:
        """The attempts held under these leases."""
        found = (self._held.get(claim_id) for _, claim_id in leases)
        return [attempt for attempt in found if attempt is not None]

    def at(self, *stages: Stage) -> list[Attempt]:
        """The attempts at these stages."""
        return [attempt for attempt in self._held.values() if attempt.stage in stages]

    def changes(self) -> tuple[list[Lease], list[UUID]]:
        """What was added and removed since the last call. A lease that came and went between is in neither."""
        added, removed = [attempt.lease for attempt in self._untold], self._removed
        self._untold, self._removed = {}, []
        return added, removed

    def clear(self) -> list[Attempt]:
        """Vouch for nothing any more; the next `changes` begins from nothing. Answers what was held."""
        held = list(self)
        self._held, self._by_task, self._untold, self._removed = {}, {}, {}, []
        return held

    def unknown(self, proposed: Iterable[Lease]) -> list[Lease]:
        """Which of these leases nobody here holds."""
        return [lease for lease in proposed if lease[1] not in self._held]
