"""Writing what became of attempts: in batches, until it lands, each row fenced by its claim_id.

What lives here: the queue of outcomes and the statement. What may not: deciding an outcome (`settlement`).

Nothing waits for a timer: what has ended goes with the next statement, and what ends meanwhile makes the next batch. Large
outcomes, which take long, go after all small ones, or last in a tick.
An outcome stays in memory, and its lease held, until the database has answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.errors import EverbeatError
from everbeat.runtime.nursery import Nursery
from everbeat.store.declining import decline
from everbeat.store.leases import Settlement, complete, settle
from everbeat.store.refusals import is_refused_data, is_timeout
from everbeat.store.session import Session
from everbeat.worker.attempt import Attempt
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.settlement import refused_result, undeclined

MOST_ROWS: Final = 1000
MOST_AHEAD: Final = 16
"""So many batches follow one another in a tick: a failure is not counted together with one long before it."""
MOST_BYTES: Final = 8 * 1024 * 1024
LARGE_BYTES: Final = 256 * 1024
"""An outcome larger than this does not stand before smaller ones."""
MOST_TIMEOUTS: Final = 2
"""So often a larger outcome may take the server longer than a statement may; then it is refused like one that cannot be stored."""

_log = logging.getLogger("everbeat.worker")


class Unsettled(Struct):
    """An outcome on its way; `is_replaced` once the database refused the original, or was too slow for it."""

    attempt: Attempt
    settlement: Settlement
    is_replaced: bool = False
    timeouts: int = 0

    @property
    def size(self) -> int:
        """Bytes of JSON."""
        size = len(self.settlement.result or b"") + len(self.settlement.error or b"")
        # The server reads the arguments for their names.
        return size + len(self.attempt.task.args) if self.settlement.outcome == "DECLINED" else size


Answer: TypeAlias = tuple[Unsettled, str]


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
        nursery: Nursery,
    ) -> None:
        self.wake = asyncio.Event()
        self._session = session
        self._progress = progress
        self._on_settled = on_settled
        self._nursery = nursery
        self._waiting: dict[Attempt, Unsettled] = {}
        self._large: dict[Attempt, Unsettled] = {}
        self._under_way: dict[Attempt, Unsettled] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._large) + len(self._under_way)

    def put(self, attempt: Attempt, settlement: Settlement) -> None:
        """Write this outcome as soon as possible; the first one of an attempt stands."""
        if attempt in self._under_way or attempt in self._waiting or attempt in self._large:
            return
        one = Unsettled(attempt, settlement)
        (self._large if one.size > LARGE_BYTES else self._waiting)[attempt] = one
        self.wake.set()

    async def tick(self) -> float | None:
        """Write what waits: the server writes the next batch while the answers to this one are told."""
        answers: list[Answer] = []
        for turn in range(MOST_AHEAD):
            # Small ones that keep coming must not hold up the large ones for ever.
            is_last = turn == MOST_AHEAD - 1
            waiting = self._large or self._waiting if is_last else self._waiting or self._large
            if not waiting:
                break
            # In this order: the statement is on its way before anything else.
            answers = await self._nursery.beside(
                self._answers(waiting), partial(self._tell, answers), name="outcomes"
            )
        self._tell(answers)
        return 0.0 if self._waiting or self._large else None

    async def _answers(self, waiting: dict[Attempt, Unsettled]) -> list[Answer]:
        """What became of the next batch of these. Should that stay unknown, it waits again, before all others of its size."""
        batch = self._next_batch(waiting)
        taken = {one.attempt: waiting.pop(one.attempt) for one in batch}
        self._under_way |= taken
        try:
            for one in batch:
                if one.attempt.progress is not None:
                    await self._progress.write(one.attempt)
            return await self._settle(batch)
        except BaseException:
            for attempt in taken:
                del self._under_way[attempt]
            others = dict(waiting)
            waiting.clear()
            waiting.update(taken | others)
            raise

    def _tell(self, answers: list[Answer]) -> None:
        for one, verdict in answers:
            del self._under_way[one.attempt]
            try:
                self._on_settled(one.attempt, one.settlement, verdict)
            except Exception:  # noqa: BLE001 - what follows from one must not keep the others from being told
                _log.exception("settled_badly task_id=%s verdict=%s", one.attempt.id, verdict)

    @staticmethod
    def _next_batch(waiting: dict[Attempt, Unsettled]) -> list[Unsettled]:
        batch: list[Unsettled] = []
        room = MOST_BYTES
        for one in waiting.values():
            room -= one.size
            if batch and (room < 0 or len(batch) >= MOST_ROWS):
                break
            batch.append(one)
        return batch

    async def _settle(self, batch: list[Unsettled]) -> list[Answer]:
        try:
            verdicts = await self._written(batch)
        except Exception as problem:
            # One row that PostgreSQL cannot store must not take its neighbours with it.
            is_refused = is_refused_data(problem) or self._is_too_slow(batch, problem)
            if not is_refused or all(one.is_replaced for one in batch):
                raise
            return await self._divided(batch, problem)
        if verdicts is None:
            return [(one, "COMPLETED") for one in batch]
        told = [(one, verdicts.get(one.attempt.claim_id, "lost")) for one in batch]
        unmarkable = [one for one, verdict in told if verdict == "unmarkable"]
        if not unmarkable:
            return told
        for one in unmarkable:
            one.settlement = undeclined(one.settlement)
        return [pair for pair in told if pair[1] != "unmarkable"] + await self._settle(unmarkable)

    async def _written(self, batch: list[Unsettled]) -> dict[UUID, str] | None:
        """The verdict on each, None where all have completed: most do, which is a cheaper statement."""
        # A large one is tried once in each tick, so that it cannot be repeated for ever in spite of what it costs.
        patience_s = 0.0 if self._is_large(batch) else None
        channel = self._session.target.channel
        settlements = [one.settlement for one in batch]
        verdicts: dict[UUID, str] = {}
        if completed := [one for one in settlements if one.outcome == "COMPLETED"]:
            landed = await self._session.run(complete(completed, channel=channel), patience_s=patience_s)
            if len(landed) == len(settlements):
                return None
            verdicts = dict.fromkeys(landed, "COMPLETED")
        if declined := [one for one in settlements if one.outcome == "DECLINED"]:
            leases = [(one.id, one.claim_id) for one in declined]
            marked = await self._session.run(decline(leases, channel=channel), patience_s=patience_s)
            # Without its lease a task is where this worker wanted it: with others.
            verdicts |= {one.claim_id: marked.get(one.claim_id, "already") for one in declined}
        if others := [one for one in settlements if one.claim_id not in verdicts]:
            told = await self._session.run(settle(others, channel=channel), patience_s=patience_s)
            verdicts |= told
        return verdicts

    @staticmethod
    def _is_large(batch: list[Unsettled]) -> bool:
        return len(batch) == 1 and batch[0].size > MOST_BYTES

    def _is_too_slow(self, batch: list[Unsettled], problem: Exception) -> bool:
        if not (self._is_large(batch) and is_timeout(problem)):
            return False
        batch[0].timeouts += 1
        return batch[0].timeouts >= MOST_TIMEOUTS

    async def _divided(self, batch: list[Unsettled], problem: Exception) -> list[Answer]:
        if len(batch) > 1:
            middle = len(batch) // 2
            return [*await self._settle(batch[:middle]), *await self._settle(batch[middle:])]
        if batch[0].settlement.outcome == "DECLINED":
            batch[0].settlement = undeclined(batch[0].settlement)
            return await self._settle(batch)
        reason = problem.message if isinstance(problem, EverbeatError) else str(problem).strip()
        batch[0].settlement = refused_result(batch[0].settlement, reason)
        batch[0].is_replaced = True
        return await self._settle(batch)
