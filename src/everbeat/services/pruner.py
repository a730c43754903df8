"""The pruner: deletes what is older than the configuration keeps, a bounded step at a time, with a rest after each.

What lives here: one pass over all tables, and the service that makes one in each interval. What may not: which rows are old,
which each statement decides by itself (`sql/retention/`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol
from uuid import UUID

from msgspec import Struct

from everbeat.config import RecoveryConfig
from everbeat.domain.retention import PruneResult
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Observer, Statements
from everbeat.store import retention, workers
from everbeat.store.retention import Step, TaskIdBounds
from everbeat.store.statement import Statement

STEP_ROWS: Final = 1_000
TURN: Final = "retention"
_LEAST_REST_S: Final = 0.02
_REST_PER_STEP: Final = 2.0
_ONE_TRY: Final = 0.0
_LONG_AGO: Final = datetime(1, 1, 1, tzinfo=UTC)
_LOWEST_ID: Final = UUID(int=0)
_HIGHEST_ID: Final = UUID(int=(1 << 128) - 1)

Rest = Callable[[float], Awaitable[bool]]
"""Waits so many seconds after a step; False ends the pass."""


class Pruned(Event, frozen=True, kw_only=True):
    """One pass of retention: rows deleted by table, in so many `statements`; one that found nothing is told quietly."""

    room = "services"
    tasks: int
    attempts: int
    recoveries: int
    beats: int
    worker_states: int
    workers: int
    workflows: int
    nodes: int
    edges: int
    steps: int
    signals: int
    supervisors: int
    statements: int
    duration_s: float

    @property
    def loudness(self) -> int:
        """Nothing found, nothing to be told."""
        found = self.tasks or self.attempts or self.recoveries or self.beats
        return (
            self.level if found or self.worker_states or self.workers or self.supervisors else logging.DEBUG
        )


class PrunePass:
    """One pass. What it has deleted so far is known at any time; one that breaks off is continued by the next."""

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        rest: Rest,
        clock: Clock,
        step_rows: int = STEP_ROWS,
    ) -> None:
        self.statements = 0
        self._statements = statements
        self._config = config
        self._rest = rest
        self._clock = clock
        self._step_rows = step_rows
        self._deleted: Counter[str] = Counter()

    @property
    def result(self) -> PruneResult:
        """What was deleted so far."""
        return PruneResult(**self._deleted)

    async def run(self) -> None:
        """Walks through all tables, each by itself: the first error is raised when the others were walked through."""
        failure: DatabaseError | None = None
        for walk in _walks(self._config, await self._bounds(), rows=self._step_rows):
            try:
                if not await self._finish(walk):
                    break
            except DatabaseError as problem:
                failure = failure or problem
        if failure is not None:
            raise failure

    async def _bounds(self) -> TaskIdBounds | None:
        hours = self._config.terminal_record_retention_hours
        if hours is None:
            return None
        return await self._statements.run(retention.task_id_bounds(hours=hours), patience_s=_ONE_TRY)

    async def _finish(self, walk: _Walk) -> bool:
        """Takes every step of a walk; False when the rest said that the pass is over."""
        key = walk.start
        while key is not None:
            began = self._clock.monotonic()
            step = await self._statements.run(walk.step(after=key), patience_s=_ONE_TRY)
            self.statements += 1
            self._deleted.update(step.deleted)
            key = step.next_after
            # A database that suffers takes longer, and so gets more rest.
            rest_s = max(_LEAST_REST_S, _REST_PER_STEP * (self._clock.monotonic() - began))
            if key is not None and not await self._rest(rest_s):
                return False
        return True


class _Walk(Struct, frozen=True):
    start: Any
    step: Callable[..., Statement[Step[Any]]]


def _walks(config: RecoveryConfig, bounds: TaskIdBounds | None, *, rows: int) -> Iterator[_Walk]:
    if (hours := config.heartbeat_retention_hours) is not None:
        yield _Walk(_LONG_AGO, partial(retention.prune_beats, hours=hours, limit=rows))
    if (hours := config.worker_state_retention_hours) is not None:
        yield _Walk(_LONG_AGO, partial(retention.prune_worker_states, hours=hours, limit=rows))
        yield _Walk("", partial(retention.prune_workers, hours=hours, limit=rows))
        yield _Walk("", partial(retention.prune_supervisors, hours=hours, limit=rows))
    if (hours := config.terminal_record_retention_hours) is not None and bounds is not None:
        # What ended long ago was sent before that, so what was sent since then is not looked at. An id from beyond now does
        # not tell when its task was sent: the sender's clock was wrong, or the id is no UUIDv7.
        for first, until in ((_LOWEST_ID, bounds.old), (bounds.now, _HIGHEST_ID)):
            # Workflows first: while one is there, its tasks are kept.
            yield _Walk(first, partial(retention.prune_workflows, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_tasks, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_attempts, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_steps, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_signals, hours=hours, limit=rows, until=until))
        yield _Walk(0, partial(retention.prune_stray_recoveries, hours=hours, limit=rows))


class SpareStatements(Statements, Protocol):
    """Statements on a connection of their own: a step that takes long must not hold up a beat."""

    async def drop(self) -> None:
        """Closes the connection."""
        ...


class Pruner:
    """A service of every supervisor, of which one at a time has the turn."""

    name = "pruner"

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        observer: Observer,
        open_spare: Callable[[], SpareStatements],
        events: EventBus,
        clock: Clock,
        step_rows: int = STEP_ROWS,
    ) -> None:
        self.interval_s = config.retention_interval_ms / 1_000
        self._statements = statements
        self._config = config
        self._observer = observer
        self._open_spare = open_spare
        self._events = events
        self._clock = clock
        self._step_rows = step_rows

    async def tick(self) -> float | None:
        """One pass, unless somebody had one within the interval."""
        holder = self._observer.supervisor_id
        if self._keeps_everything:
            return None
        if await self._take_turn(self._statements, holder):
            spare = self._open_spare()

            async def rest(seconds: float) -> bool:
                await self._clock.sleep(seconds)
                return await self._take_turn(spare, holder)

            try:
                await self._pass(spare, rest)
            finally:
                await spare.drop()
        return None

    @property
    def _keeps_everything(self) -> bool:
        config = self._config
        kept = (
            config.heartbeat_retention_hours,
            config.worker_state_retention_hours,
            config.terminal_record_retention_hours,
        )
        return all(hours is None for hours in kept)

    async def _take_turn(self, statements: Statements, holder: str) -> bool:
        """Takes or keeps the turn: the next pass of anybody is due an interval after the last step of this one."""
        turn = workers.take_turn(TURN, interval_ms=self._config.retention_interval_ms, taken_by=holder)
        return await statements.run(turn, patience_s=_ONE_TRY)

    async def _pass(self, spare: Statements, rest: Rest) -> None:
        began = self._clock.monotonic()
        one = PrunePass(spare, self._config, rest=rest, clock=self._clock, step_rows=self._step_rows)
        try:
            await one.run()
        finally:
            counts = one.result.by_table()
            self._events.emit(
                Pruned(**counts, statements=one.statements, duration_s=self._clock.monotonic() - began)
            )


async def prune(statements: Statements, config: RecoveryConfig, *, clock: Clock) -> PruneResult:
    """A pass on an operator's word, whoever has the turn; a second one at the same time does no harm."""

    async def rest(seconds: float) -> bool:
        await statements.run(retention.rest(seconds))
        return True

    one = PrunePass(statements, config, rest=rest, clock=clock)
    await one.run()
    return one.result


async def count_old(statements: Statements, config: RecoveryConfig) -> PruneResult:
    """What a pass would delete now; changes nothing."""
    hours = config.terminal_record_retention_hours
    bounds = await statements.run(retention.task_id_bounds(hours=hours or 0))
    return await statements.run(
        retention.count(
            terminal_hours=hours,
            worker_hours=config.worker_state_retention_hours,
            beat_hours=config.heartbeat_retention_hours,
            bounds=bounds,
        )
    )
