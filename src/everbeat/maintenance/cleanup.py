"""Periodic cleanup: expire late tasks, delete old rows, and terminate sessions that hold locks without using them."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, Protocol
from uuid import UUID

from msgspec import Struct

from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import PruneResult
from everbeat.domain.series import SUMS_KEPT_S
from everbeat.errors import DatabaseError
from everbeat.maintenance.counting import LOWEST_ID, MOST_COUNTED, pruned, unsure
from everbeat.recovering.observer import ONE_TRY, RecoveryEnvironment, Statements
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event
from everbeat.store import expiry, history, retention, workers
from everbeat.store.expiry import ExpiredTask
from everbeat.store.retention import PruneStep, RemainingSession, TaskIdBounds
from everbeat.store.statement import Statement

_BATCH: Final = 200
_LONGEST_EXPIRY_INTERVAL_S: Final = 15.0


class Expirer:
    """A service in every supervisor that expires late tasks. Only one supervisor at a time does the work."""

    name = "expirer"

    def __init__(self, environment: RecoveryEnvironment) -> None:
        # Half of the interval, because a supervisor might die right after it takes the turn, and all others wait for their own next tick.
        self.interval_s = min(environment.config.check_interval_ms / 2_000, _LONGEST_EXPIRY_INTERVAL_S)
        self._environment = environment

    async def tick(self) -> float | None:
        """Expire all late tasks, unless it is another supervisor's turn."""
        if await self._environment.take_turn(self.name, interval_s=self.interval_s):
            late = expiry.expire(channel=self._environment.channel, limit=_BATCH)
            while len(await self._expire(late)) == _BATCH:
                pass
        return None

    async def _expire(self, late: Statement[list[ExpiredTask]]) -> list[ExpiredTask]:
        expired = await self._environment.run_once(late)
        for each in expired:
            self._environment.rates.expired(each.queue, each.name)
        return expired


STEP_ROWS: Final = 1_000
TURN: Final = "retention"
LEAST_REST_S: Final = 0.02
_REST_PER_STEP: Final = 2.0
_LONG_AGO: Final = datetime(1, 1, 1, tzinfo=UTC)
DEPTHS_KEPT: Final = (10, 60, 3_600)
"""The kinds of samples in `depths`, by the seconds that a sample stands for."""
HIGHEST_ID: Final = UUID(int=(1 << 128) - 1)

Rest = Callable[[float], Awaitable[bool]]
"""A function that waits for the given number of seconds after a step. It returns False to stop the pass."""


class Pruned(Event, frozen=True, kw_only=True):
    """A retention pass has finished. The fields are the number of rows deleted from each table, and the number of statements run."""

    component = "maintenance"
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
    ticks: int
    schedule_versions: int
    results: int
    history_parts: int
    statements: int
    duration_s: float

    @property
    def loudness(self) -> int:
        """Return the log level of the event: DEBUG if the pass deleted nothing, else the usual level."""
        found = (
            self.tasks
            or self.attempts
            or self.recoveries
            or self.beats
            or self.ticks
            or self.results
            or self.history_parts
        )
        return (
            self.level if found or self.worker_states or self.workers or self.supervisors else logging.DEBUG
        )


class PrunePass:
    """One retention pass. `result` is available at any time. If a pass is interrupted, the next one continues its work."""

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
        self._at_least: frozenset[str] = frozenset()

    @property
    def result(self) -> PruneResult:
        """Return the number of rows deleted so far from each table."""
        return pruned(self._deleted, at_least=self._at_least)

    async def run(self) -> None:
        """Process all tables, one at a time. If a table fails, the others are still processed, and the first error is raised at the end."""
        failure: DatabaseError | None = None
        bounds = await self._bounds(self._config.terminal_record_retention_hours)
        of_logs = await self._bounds(log_hours(self._config))
        for walk in _walks(self._config, bounds, of_logs, rows=self._step_rows):
            try:
                if not await self._finish(walk):
                    break
            except DatabaseError as problem:
                failure = failure or problem
        else:
            try:
                await self._drop_parts(bounds)
            except DatabaseError as problem:
                failure = failure or problem
        if failure is not None:
            raise failure

    async def _bounds(self, hours: int | None) -> TaskIdBounds | None:
        if hours is None:
            return None
        return await self._statements.run(retention.task_id_bounds(hours=hours), patience_s=ONE_TRY)

    async def _drop_parts(self, bounds: TaskIdBounds | None) -> None:
        """Drop the partitions of `history` whose tasks are all old enough. Tasks of existing workflows are kept."""
        hours = self._config.terminal_record_retention_hours
        if hours is None or bounds is None:
            return
        for part in await self._statements.run(history.old_parts(hours=hours), patience_s=ONE_TRY):
            sample = history.count_part(part, hours=hours, bounds=bounds, limit=MOST_COUNTED, after=LOWEST_ID)
            counted = await self._statements.run(sample, patience_s=ONE_TRY)
            end = await self._statements.run(history.drop_part(part.name, hours=hours), patience_s=ONE_TRY)
            self.statements += 2
            if end == "dropped":
                self._deleted.update({"history_parts": 1, **counted.deleted})
                self._at_least |= unsure(counted)
            elif end == "needed":
                walk = _Walk(LOWEST_ID, partial(history.prune_part, part, limit=self._step_rows))
                if not await self._finish(walk):
                    return

    async def _finish(self, walk: _Walk) -> bool:
        """Run every step of one table. Return False if the pass must stop."""
        key = walk.start
        while key is not None:
            began = self._clock.monotonic()
            step = await self._statements.run(walk.step(after=key), patience_s=ONE_TRY)
            self.statements += 1
            self._deleted.update(step.deleted)
            key = step.next_after
            # A step takes longer on a busy database, which therefore gets a longer rest.
            rest_s = max(LEAST_REST_S, _REST_PER_STEP * (self._clock.monotonic() - began))
            if key is not None and not await self._rest(rest_s):
                return False
        return True


class _Walk(Struct, frozen=True):
    start: Any
    step: Callable[..., Statement[PruneStep[Any]]]


def log_hours(config: RecoveryConfig) -> int | None:
    """Return the age at which captured logs are deleted: no later than the record of their task."""
    kept = (config.captured_log_retention_hours, config.terminal_record_retention_hours)
    return min((hours for hours in kept if hours is not None), default=None)


def _walks(
    config: RecoveryConfig, bounds: TaskIdBounds | None, of_logs: TaskIdBounds | None, *, rows: int
) -> Iterator[_Walk]:
    if (hours := config.heartbeat_retention_hours) is not None:
        yield _Walk(_LONG_AGO, partial(retention.prune_beats, hours=hours, limit=rows))
    if (hours := config.worker_state_retention_hours) is not None:
        yield _Walk(_LONG_AGO, partial(retention.prune_worker_states, hours=hours, limit=rows))
        yield _Walk("", partial(retention.prune_workers, hours=hours, limit=rows))
        yield _Walk("", partial(retention.prune_supervisors, hours=hours, limit=rows))
        yield _Walk("", partial(retention.prune_schedule_versions, hours=hours, limit=rows))
    yield _Walk(True, partial(retention.prune_results, limit=rows))
    if (hours := config.terminal_record_retention_hours) is not None and bounds is not None:
        # A task that finished before the cutoff was also sent before it, so tasks that were sent later are not read. An id from the future
        # does not show when its task was sent: the sender's clock was wrong, or the id is not a UUIDv7.
        for first, until in ((LOWEST_ID, bounds.old), (bounds.now, HIGHEST_ID)):
            # Workflows first: as long as a workflow exists, its tasks are kept.
            yield _Walk(first, partial(retention.prune_workflows, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_tasks, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_batches, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_attempts, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_steps, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_signals, hours=hours, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_labels, limit=rows, until=until))
            yield _Walk(first, partial(retention.prune_stray_items, limit=rows, until=until))
        yield _Walk(0, partial(retention.prune_stray_recoveries, hours=hours, limit=rows))
        yield _Walk(_LONG_AGO, partial(retention.prune_ticks, hours=hours, limit=rows))
    if (hours := log_hours(config)) is not None and of_logs is not None:
        for first, until in ((LOWEST_ID, of_logs.old), (of_logs.now, HIGHEST_ID)):
            yield _Walk(first, partial(retention.prune_logs, hours=hours, limit=rows, until=until))
    yield _Walk("", partial(retention.prune_lines, limit=rows))
    yield _Walk("", partial(retention.prune_gates, limit=rows))
    yield _Walk(_LONG_AGO, partial(retention.prune_rates, limit=rows))
    for seconds, is_total in itertools.product(SUMS_KEPT_S, (False, True)):
        yield _Walk(_LONG_AGO, partial(retention.prune_rate_sums, seconds, is_total=is_total, limit=rows))
        yield _Walk(_LONG_AGO, partial(retention.prune_depth_peaks, seconds, is_total=is_total, limit=rows))
    for seconds in DEPTHS_KEPT:
        yield _Walk(_LONG_AGO, partial(retention.prune_depths, seconds, limit=rows))


class SpareStatements(Statements, Protocol):
    """Runs statements on a separate connection, so that a long step does not delay a heartbeat."""

    async def drop(self) -> None:
        """Close the connection."""
        ...


class Pruner:
    """A service in every supervisor that deletes old rows. Only one supervisor at a time does the work."""

    name = "pruner"

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        open_spare: Callable[[], SpareStatements],
        step_rows: int = STEP_ROWS,
    ) -> None:
        self.interval_s = environment.config.retention_interval_ms / 1_000
        self._environment = environment
        self._config = environment.config
        self._clock = environment.clock
        self._open_spare = open_spare
        self._step_rows = step_rows

    async def tick(self) -> float | None:
        """Run one pass, unless another supervisor has already run one within the interval."""
        holder = self._environment.observer.supervisor_id
        if self._keeps_records and not await self._has_more_to_remove():
            return None
        if await self._take_turn(self._environment.statements, holder):
            spare = self._open_spare()

            async def rest(seconds: float) -> bool:
                await self._clock.sleep(seconds)
                return await self._take_turn(spare, holder)

            try:
                await self._run_pass(spare, rest)
            finally:
                await spare.drop()
        return None

    @property
    def _keeps_records(self) -> bool:
        config = self._config
        kept = (
            config.heartbeat_retention_hours,
            config.worker_state_retention_hours,
            config.terminal_record_retention_hours,
        )
        return all(hours is None for hours in kept)

    async def _has_more_to_remove(self) -> bool:
        return await self._environment.statements.run(retention.has_more_to_remove(), patience_s=ONE_TRY)

    async def _take_turn(self, statements: Statements, holder: str) -> bool:
        """Acquire or renew the right to run a pass. The next pass of any supervisor is due one interval after the last step of this pass."""
        turn = workers.take_turn(TURN, interval_ms=self._config.retention_interval_ms, taken_by=holder)
        return await statements.run(turn, patience_s=ONE_TRY)

    async def _run_pass(self, spare: Statements, rest: Rest) -> None:
        began = self._clock.monotonic()
        one = PrunePass(spare, self._config, rest=rest, clock=self._clock, step_rows=self._step_rows)
        try:
            await one.run()
        finally:
            counts = one.result.by_table()
            self._environment.events.emit(
                Pruned(**counts, statements=one.statements, duration_s=self._clock.monotonic() - began)
            )


async def prune(statements: Statements, config: RecoveryConfig, *, clock: Clock) -> PruneResult:
    """Run a retention pass for an operator, even while a supervisor is running one. Two passes at the same time do no harm."""

    async def rest(seconds: float) -> bool:
        await statements.run(retention.rest(seconds))
        return True

    one = PrunePass(statements, config, rest=rest, clock=clock)
    await one.run()
    return one.result


_LONGEST_SESSION_INTERVAL_S: Final = 5.0
RECHECK_S: Final = 1.0
CHECKS: Final = 6
"""A session is terminated if this many checks, one second apart, find the same reply unread.

Including the interval before the first check, this takes at most 11 s.
"""
CHECKS_OF_REQUEST: Final = 60
"""The same for a request that has arrived only in part. A large request over a slow network has a minute to arrive."""


class SessionsEnded(Event, frozen=True, kw_only=True):
    """Sessions of dead trees were terminated. `sessions` contains their application names."""

    component = "maintenance"
    level = logging.WARNING
    sessions: tuple[str, ...]


class AnswersUnread(Event, frozen=True, kw_only=True):
    """Sessions were terminated because their processes did not read a reply. These processes reconnect and repeat the statement."""

    component = "maintenance"
    level = logging.WARNING
    sessions: tuple[str, ...]
    fix: str


class RequestsPartial(Event, frozen=True, kw_only=True):
    """Sessions were terminated because their processes sent only a part of a request. These processes reconnect and repeat the statement."""

    component = "maintenance"
    level = logging.WARNING
    sessions: tuple[str, ...]
    fix: str


class SessionsLeft(Event, frozen=True, kw_only=True):
    """Some sessions belong to dead trees or wait for frozen processes, but this role cannot terminate them.

    The sessions keep their connections and locks.
    """

    component = "maintenance"
    level = logging.WARNING
    sessions: tuple[str, ...]
    roles: tuple[str, ...]
    fix: str


class HaltedSessions:
    """Counts the consecutive checks that found the same unread reply, or the same partial request, in each session."""

    def __init__(self) -> None:
        self._checks: dict[tuple[int, datetime | None], int] = {}
        self.has_suspects = False
        """Whether more checks are needed to determine whether a session's process continues."""

    def see(self, found: Iterable[RemainingSession]) -> list[RemainingSession]:
        """Record the sessions found by one check. Return the sessions that have been found in enough consecutive checks."""
        halted = [each for each in found if not each.is_left]
        self._checks = {
            (each.pid, each.since): self._checks.get((each.pid, each.since), 0) + 1 for each in halted
        }
        doomed = [
            each
            for each in halted
            if self._checks[each.pid, each.since] >= (CHECKS_OF_REQUEST if each.is_partial else CHECKS)
        ]
        self.has_suspects = len(doomed) < len(halted)
        return doomed


class UselessSessionWatch:
    """A service in every supervisor that terminates useless sessions.

    Behind a transaction pooler, a session does not belong to a single tree, so the service does nothing.
    """

    name = "leftovers"

    def __init__(self, environment: RecoveryEnvironment) -> None:
        self.interval_s = min(environment.config.check_interval_ms / 1_000, _LONGEST_SESSION_INTERVAL_S)
        self._environment = environment
        self._emit = environment.events.emit
        self._halted = HaltedSessions()
        self._reported: set[tuple[int, str]] = set()
        self._ended: set[tuple[int, str]] = set()

    async def tick(self) -> float | None:
        """Terminate sessions that hold locks without using them. Report a session that cannot be terminated only once.

        If any sessions are suspected of waiting for a frozen process, return the number of seconds until the next check.
        """
        found = await self._environment.run_once(retention.remaining_sessions())
        useless = [each for each in found if each.is_left] + self._halted.see(found)
        await self._end([each for each in useless if each.may_end])
        left = {(each.pid, each.session): each.role for each in useless if not each.may_end}
        if new := sorted(left.keys() - self._reported):
            roles = tuple(sorted({left[key] for key in new}))
            fix = (
                "let all workers connect as one role that can execute pg_terminate_backend,"
                " or grant pg_signal_backend and pg_read_all_stats to this one"
            )
            self._emit(SessionsLeft(sessions=tuple(name for _, name in new), roles=roles, fix=fix))
        self._reported = set(left)
        return RECHECK_S if self._halted.has_suspects else None

    async def _end(self, doomed: list[RemainingSession]) -> None:
        pids: frozenset[int] = frozenset()
        if doomed:
            pids = await self._environment.run_once(retention.end_sessions(doomed))
        ended = {(each.pid, each.session): each for each in doomed if each.pid in pids}
        new = [
            ended[key] for key in sorted(ended.keys() - self._ended)
        ]  # a backend takes a short time to exit
        if dead := tuple(each.session for each in new if each.is_left):
            self._emit(SessionsEnded(sessions=dead))
        fix = "see whether these processes are frozen, or whether async code blocks their loops"
        if unread := tuple(each.session for each in new if not each.is_left and not each.is_partial):
            self._emit(AnswersUnread(sessions=unread, fix=fix))
        if partial := tuple(each.session for each in new if not each.is_left and each.is_partial):
            self._emit(RequestsPartial(sessions=partial, fix=fix))
        self._ended = set(ended)
