"""The caretaker of `history`: it moves tasks that ended long ago out of `tasks`, and creates the partitions that they need."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar
from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.maintenance.cleanup import HIGHEST_ID, LEAST_REST_S, STEP_ROWS, Rest, SpareStatements
from everbeat.maintenance.counting import LOWEST_ID
from everbeat.recovering.observer import ONE_TRY, RecoveryEnvironment, Statements
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event
from everbeat.store import history, retention
from everbeat.store.history import SHORTEST_AGE_S, PartUnit
from everbeat.store.statement import Statement

T = TypeVar("T")

LONGEST_INTERVAL_S: Final = 600.0
SHORTEST_RETENTION_HOURS: Final = 48
"""With a shorter retention, tasks are deleted from `tasks`.

A partition is dropped when the last of its tasks is old enough. That would keep the first ones for a whole day longer.
"""
LONGEST_BY_DAYS_HOURS: Final = 62 * 24
"""With a longer retention, a partition is a month. A search by id looks into every partition, so there must not be too many."""
PASSES_PER_SCAN: Final = 6
"""Every this many passes, a supervisor scans all tasks again. The other passes begin where the last one ended."""
_REST_PER_STEP: Final = 1.0


class TasksMoved(Event, frozen=True, kw_only=True):
    """A pass has moved ended tasks to `history`. The fields are the number of tasks, and the number of statements run."""

    component = "maintenance"
    tasks: int
    statements: int
    duration_s: float

    @property
    def loudness(self) -> int:
        """Return the log level of the event: DEBUG if the pass moved nothing, else the usual level."""
        return self.level if self.tasks else logging.DEBUG


class TasksNotMoved(Event, frozen=True, kw_only=True):
    """A pass failed and has ended. The next pass is due after `retry_in_s` seconds.

    `statement` is the latest statement of the pass, which read the tasks with ids after `after`. `tasks` is how many tasks had moved.
    """

    component = "maintenance"
    level = logging.WARNING
    statement: str
    after: UUID
    tasks: int
    error: BaseException
    retry_in_s: float


def unit_of(hours: int | None) -> PartUnit:
    """Return the length of a partition for a retention of `hours`."""
    return "month" if hours is None or hours > LONGEST_BY_DAYS_HOURS else "day"


class MovePass:
    """One pass over `tasks`. `moved` is available at any time. If a pass is interrupted, the next one continues its work.

    Tasks with ids up to `start` are not read. `reached` is the id up to which a finished pass has read all tasks. `statement` and `after`
    name the latest statement, and the position at which it began.
    """

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        rest: Rest,
        clock: Clock,
        age_s: float = SHORTEST_AGE_S,
        step_rows: int = STEP_ROWS,
        start: UUID = LOWEST_ID,
    ) -> None:
        self.moved = 0
        self.reached: UUID | None = None
        self.statements = 0
        self.statement = ""
        self.after = start
        self._statements = statements
        self._hours = config.terminal_record_retention_hours
        self._rest = rest
        self._clock = clock
        self._age_s = age_s
        self._step_rows = step_rows
        self._start = start

    async def run(self) -> None:
        """Move all tasks that ended long enough ago.

        A task was sent before it ended, so tasks that were sent later are not read. An id from the future does not show when its task was
        sent.
        """
        bounds = retention.task_id_bounds(hours=self._age_s / 3_600)
        found = await self._run(bounds)
        for first, until in ((self._start, found.old), (found.now, HIGHEST_ID)):
            self.after = first
            while True:
                began = self._clock.monotonic()
                step = history.move_tasks(
                    age_ms=round(self._age_s * 1_000), hours=self._hours, limit=self._step_rows, after=self.after, until=until
                )  # fmt: skip
                done = await self._run(step)
                self.statements += 1
                self.moved += done.moved
                if done.lacks is not None:
                    part = history.add_part(done.lacks, unit=unit_of(self._hours))
                    if not await self._run(part):
                        return  # another session has locked `history`; the next pass tries again
                elif done.next_after is None:
                    break
                else:
                    self.after = done.next_after
                # A step takes longer on a busy database, which therefore gets a longer rest.
                rest_s = max(LEAST_REST_S, _REST_PER_STEP * (self._clock.monotonic() - began))
                if not await self._rest(rest_s):
                    return
        self.reached = found.old

    async def _run(self, statement: Statement[T]) -> T:
        self.statement = statement.name
        return await self._statements.run(statement, patience_s=ONE_TRY)


class HistoryKeeper:
    """A service in every supervisor that moves ended tasks to `history`. Only one supervisor at a time does the work."""

    name = "history"

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        open_spare: Callable[[], SpareStatements],
        age_s: float = SHORTEST_AGE_S,
        step_rows: int = STEP_ROWS,
    ) -> None:
        # A shorter interval of retention also applies here: tasks that are still in `tasks` do not leave with their partition.
        self.interval_s = min(LONGEST_INTERVAL_S, environment.config.retention_interval_ms / 1_000)
        self._environment = environment
        self._open_spare = open_spare
        self._age_s = age_s
        self._step_rows = step_rows
        self._reached = LOWEST_ID
        self._passes = 0

    async def tick(self) -> float | None:
        """Run one pass, unless another supervisor has already run one within the interval, or the retention is too short.

        A pass that fails is not repeated before the next interval, because each try of a step can take until the statement timeout.
        """
        hours = self._environment.config.terminal_record_retention_hours
        if hours is not None and hours < SHORTEST_RETENTION_HOURS:
            return None
        if await self._environment.take_turn(self.name, interval_s=self.interval_s):
            spare = self._open_spare()

            async def rest(seconds: float) -> bool:
                await self._environment.clock.sleep(seconds)
                return await self._environment.take_turn(self.name, interval_s=self.interval_s)

            try:
                await self._run_pass(spare, rest)
            finally:
                await spare.drop()
        return None

    async def _run_pass(self, spare: Statements, rest: Rest) -> None:
        environment = self._environment
        began = environment.clock.monotonic()
        # Tasks that cannot move yet, such as those of live workflows, are not read again in each pass.
        start = LOWEST_ID if self._passes % PASSES_PER_SCAN == 0 else self._reached
        one = MovePass(
            spare, environment.config, rest=rest, clock=environment.clock, age_s=self._age_s, step_rows=self._step_rows, start=start
        )  # fmt: skip
        try:
            await one.run()
            if one.reached is not None:
                self._reached = one.reached
                self._passes += 1
        except Exception as problem:  # noqa: BLE001 - the runner would repeat the pass at once, and a long statement could fail in the same way
            environment.events.emit(
                TasksNotMoved(
                    statement=one.statement, after=one.after, tasks=one.moved, error=problem, retry_in_s=self.interval_s
                )
            )  # fmt: skip
        finally:
            duration_s = environment.clock.monotonic() - began
            environment.events.emit(
                TasksMoved(tasks=one.moved, statements=one.statements, duration_s=duration_s)
            )
