"""Writing what became of attempts: in batches, until it lands, each row fenced by its claim_id.

What lives here: the queue of outcomes and the statement. What may not: deciding an outcome (`settlement`).

Nothing waits for a timer: what has ended goes with the next statement, and what ends meanwhile makes the next batch.
An outcome stays in memory, and its lease held, until the database has answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.errors import EverbeatError
from everbeat.store.leases import Settlement, settle
from everbeat.store.session import Session, is_refused_data, is_timeout
from everbeat.worker.attempt import Attempt
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.settlement import refused_result

MOST_ROWS: Final = 200
MOST_BYTES: Final = 8 * 1024 * 1024
MOST_TIMEOUTS: Final = 2
"""So often a larger outcome may take the server longer than a statement may; then it is refused like one that cannot be stored."""


class Unsettled(Struct):
    """An outcome on its way; `is_replaced` once the database refused the original, or was too slow for it."""

    attempt: Attempt
    settlement: Settlement
    is_replaced: bool = False
    timeouts: int = 0

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        return len(self.settlement.result or b"") + len(self.settlement.error or b"")


class Settler:
    """A service. `on_settled(attempt, outcome, verdict)` is told the new state, "already" or "lost"."""

    name = "settler"
    interval_s = 3_600.0

    def __init__(
        self,
        session: Session,
        *,
        progress: ProgressRecorder,
        on_settled: Callable[[Attempt, Settlement, str], None],
    ) -> None:
        self.wake = asyncio.Event()
        self._session = session
        self._progress = progress
        self._on_settled = on_settled
        self._queue: dict[UUID, Unsettled] = {}

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, attempt: Attempt, settlement: Settlement) -> None:
        """Write this outcome as soon as possible; the first one of an attempt stands."""
        self._queue.setdefault(attempt.claim_id, Unsettled(attempt, settlement))
        self.wake.set()

    async def tick(self) -> float | None:
        """Write one batch."""
        batch = self._next_batch()
        for one in batch:
            if one.attempt.progress is not None:
                await self._progress.write(one.attempt)
        if batch:
            await self._settle(batch)
        return 0.0 if self._queue else None

    def _next_batch(self) -> list[Unsettled]:
        batch: list[Unsettled] = []
        room = MOST_BYTES
        for one in self._queue.values():
            room -= one.size
            if batch and (room < 0 or len(batch) >= MOST_ROWS):
                break
            batch.append(one)
        return batch

    async def _settle(self, batch: list[Unsettled]) -> None:
        try:
            statement = settle([one.settlement for one in batch], channel=self._session.target.channel)
            # A large one is tried once in each tick, so that it cannot be repeated for ever in spite of what it costs.
            patience_s = 0.0 if self._is_large(batch) else None
            verdicts = await self._session.run(statement, patience_s=patience_s)
        except Exception as problem:
            # One row that PostgreSQL cannot store must not take its neighbours with it.
            is_refused = is_refused_data(problem) or self._is_too_slow(batch, problem)
            if not is_refused or all(one.is_replaced for one in batch):
                raise
            await self._divide(batch, problem)
            return
        for one in batch:
            self._queue.pop(one.attempt.claim_id, None)
            self._on_settled(one.attempt, one.settlement, verdicts.get(one.attempt.claim_id, "lost"))

    @staticmethod
    def _is_large(batch: list[Unsettled]) -> bool:
        return len(batch) == 1 and batch[0].size > MOST_BYTES

    def _is_too_slow(self, batch: list[Unsettled], problem: Exception) -> bool:
        if not (self._is_large(batch) and is_timeout(problem)):
            return False
        batch[0].timeouts += 1
        return batch[0].timeouts >= MOST_TIMEOUTS

    async def _divide(self, batch: list[Unsettled], problem: Exception) -> None:
        if len(batch) > 1:
            middle = len(batch) // 2
            await self._settle(batch[:middle])
            await self._settle(batch[middle:])
            return
        reason = problem.message if isinstance(problem, EverbeatError) else str(problem).strip()
        batch[0].settlement = refused_result(batch[0].settlement, reason)
        batch[0].is_replaced = True
        await self._settle(batch)
