"""The heart of a supervisor: one beat per interval for whatever its workers hold, and the answers handed out to them.

What lives here: beating. What may not: what a supervisor does when it learns that it was declared dead.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final
from uuid import UUID

from everbeat import errors
from everbeat.runtime.clock import Clock
from everbeat.store import workers
from everbeat.store.session import Session
from everbeat.store.workers import BeatAnswer
from everbeat.worker.protocol import Beaten, Cancel, Lease, Phantoms
from everbeat.worker.seat import Seat

_AGAIN_S: Final = 0.05
_log = logging.getLogger("everbeat.worker")


class Heart:
    """A service. `on_ended` is awaited when a beat was refused because the supervisor had been declared dead, `on_worker_ended`
    when one of its workers was."""

    name = "heart"

    def __init__(
        self,
        session: Session,
        *,
        interval_s: float,
        supervisor_id: Callable[[], str],
        seats: Callable[[], Iterable[Seat]],
        on_ended: Callable[[str], Awaitable[None]],
        on_worker_ended: Callable[[str], Awaitable[None]],
        clock: Clock,
    ) -> None:
        self.interval_s = interval_s
        self.draining = False
        self.is_quiet = False
        self.failures = 0
        self._session = session
        self._supervisor_id = supervisor_id
        self._seats = seats
        self._on_ended = on_ended
        self._on_worker_ended = on_worker_ended
        self._clock = clock

    async def tick(self) -> float | None:
        """One beat, tried again for one interval. It speaks for what is held in memory now, so it is made anew after that."""
        supervisor_id = self._supervisor_id()
        seats = list(self._seats())
        holder = {claim_id: seat for seat in seats for claim_id in seat.held}
        held = [(task_id, claim_id) for seat in seats for claim_id, task_id in seat.held.items()]
        asked_at = self._clock.monotonic()
        try:
            answer = await self._session.run(
                workers.beat(
                    supervisor_id,
                    held,
                    draining=self.draining,
                    worker_ids=[seat.worker_id for seat in seats],
                ),
                patience_s=self.interval_s,
            )
        except Exception as problem:
            # Counted for any reason: an observer whose own beat was not acknowledged must not judge the silence of others.
            self.failures += 1
            if not isinstance(problem, errors.DatabaseUnreachable | errors.DatabaseReadOnly):
                raise
            return _AGAIN_S
        if answer.seq is None:
            await self._on_ended(supervisor_id)
            return 0.0
        self._hand_out(answer, seats, holder, sent_at=asked_at)
        if self.is_quiet is not answer.quiet:
            self.is_quiet = answer.quiet
            _log.info("claims=%s by=operator", "none" if answer.quiet else "resumed")
        for seat in self._seats():  # also those that were registered while the beat was on its way
            seat.quieten(answer.quiet)
        for worker_id in answer.ended:
            await self._on_worker_ended(worker_id)
        return None

    def _hand_out(
        self, answer: BeatAnswer, seats: list[Seat], holder: dict[UUID, Seat], *, sent_at: float
    ) -> None:
        lost, cancelled, phantoms = (defaultdict[Seat, list[Lease]](list) for _ in range(3))
        by_worker = {seat.worker_id: seat for seat in seats}
        for lease in answer.lost:
            lost[holder[lease[1]]].append(lease)
        for lease in answer.cancel:
            cancelled[holder[lease[1]]].append(lease)
        for task_id, claim_id, worker_id in answer.phantoms:
            if worker_id in by_worker:
                phantoms[by_worker[worker_id]].append((task_id, claim_id))
        for seat in seats:
            if seat in lost:
                seat.lose(lost[seat])
            if seat in cancelled:
                seat.tell(Cancel(cancelled[seat]))
            if seat in phantoms:
                seat.tell(Phantoms(phantoms[seat]))
            seat.tell(Beaten(answer.seq or 0, sent_at))
