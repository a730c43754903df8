"""Statements that store, change and inspect schedules, and that decide their ticks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.schedule.inspection import RunInfo, ScheduleInfo, ScheduleState, TickInfo
from everbeat.domain.schedule.model import (
    DecidedTick,
    Decision,
    Definition,
    DueSchedule,
)
from everbeat.store.statement import Statement

MOST_LISTED: Final = 10_000


class BrokenSchedule(Struct, frozen=True):
    """A due schedule whose stored rule is unreadable, and the problem. It is read again in each pass, until it is skipped or repaired."""

    name: str
    problem: str


class DueSchedules(Struct, frozen=True):
    """A page of due schedules, the one that is due for the longest time first.

    `wait_s` is the number of seconds until the next schedule that is not due yet (None: there is none). `is_full`: more may be due.
    """

    due: tuple[DueSchedule, ...]
    wait_s: float | None
    broken: tuple[BrokenSchedule, ...] = ()
    is_full: bool = False


class DecidedTicks(Struct, frozen=True):
    """The schedules that a pass changed, and the number of tasks that it sent.

    A schedule that another process has changed since it was read is left out.
    """

    changed: tuple[str, ...]
    sent: int


class StoredSchedule(Struct, frozen=True):
    """The reply to `put_schedule`. "declared": nothing was changed, because the code of the app `owner` declares the schedule."""

    verdict: Literal["created", "changed", "unchanged", "declared"]
    owner: str | None = None


class ScheduleChange(Struct, frozen=True):
    """The reply to a change of a schedule. `owner` is the app whose code declares the schedule (None: it was made at run time).

    "unchanged": the schedule was already in this state. "declared": only the code of the app `owner` can change this.
    """

    verdict: Literal["changed", "unchanged", "declared"]
    owner: str | None = None


class SentRun(Struct, frozen=True):
    """The reply to `run_schedule`: the id of the task, or of the live task that has its key.

    It is None if that live task has just ended. In that case, run the schedule again.
    """

    task_id: UUID | None


DeclaredVerdict: TypeAlias = Literal["ADDED", "CHANGED", "RETURNED", "RETIRED", "TAKEN"]


class DeclaredChange(Struct, frozen=True):
    """What became of a declared schedule. TAKEN: it was not stored, because another app declares the name or it was made at run time."""

    owner: str
    name: str
    verdict: DeclaredVerdict
    because: str | None = None


class OverdueSchedule(Struct, frozen=True):
    """A schedule that no scheduler has looked at in time. `problem` is why its rule is unreadable (None: it is readable)."""

    name: str
    timezone: str
    next_at: datetime
    overdue_ms: int
    problem: str | None


class FailingSchedule(Struct, frozen=True):
    """A schedule that a scheduler paused because its latest runs failed."""

    name: str
    paused_at: datetime
    reason: str | None


class ScheduleProblems(Struct, frozen=True):
    """What the doctor checks about schedules. `zones` are the time zones of all schedules that have further ticks."""

    overdue: tuple[OverdueSchedule, ...]
    failing: tuple[FailingSchedule, ...]
    zones: tuple[str, ...]


def list_due(
    *, limit: int, unknown_zones: Sequence[str] = (), skipped: Sequence[str] = ()
) -> Statement[DueSchedules]:
    """Return a page of due schedules, except those in a zone that the caller does not know and those that it skips by name."""
    raise NotImplementedError


def decide_ticks(
    decisions: Sequence[Decision], *, channel: str, decided_by: str | None = None
) -> Statement[DecidedTicks]:
    """Store what happens to ticks and send their tasks, for each schedule that is still as it was read.

    If the statement is repeated after a lost reply, it changes and returns nothing.
    """
    raise NotImplementedError


def put_schedule(definition: Definition) -> Statement[StoredSchedule]:
    """Store a schedule that is made at run time, or replace one."""
    raise NotImplementedError


def list_schedules(
    *,
    state: ScheduleState | None = None,
    task: str | None = None,
    owner: str | None = None,
    prefix: str | None = None,
    after: str | None = None,
    limit: int = 1_000,
) -> Statement[list[ScheduleInfo]]:
    """List schedules in the order of their names. A filter of None matches all schedules. `after` is the last name of the previous page."""
    raise NotImplementedError


def read_schedule(name: str) -> Statement[ScheduleInfo | None]:
    """Return a schedule, or None if it does not exist."""
    raise NotImplementedError


def known_schedules(*, limit: int = MOST_LISTED) -> Statement[list[str]]:
    """Return the names of schedules, for the message about an unknown one."""
    raise NotImplementedError


def list_ticks(name: str, *, limit: int, before: datetime | None = None) -> Statement[list[TickInfo]]:
    """Return the decided ticks of a schedule, latest first. `before` is the last tick of the previous page."""
    raise NotImplementedError


def list_sent_ticks(name: str, *, since: datetime, until: datetime) -> Statement[frozenset[datetime]]:
    """Return the ticks in [since, until) for which a task was sent."""
    raise NotImplementedError


def list_live_runs(name: str, *, limit: int = 100) -> Statement[list[RunInfo]]:
    """Return the runs of a schedule that have not ended, oldest first."""
    raise NotImplementedError


def pause_schedule(
    name: str, *, paused_by: str, reason: str | None = None, resume_at: datetime | None = None
) -> Statement[ScheduleChange | None]:
    """Pause a schedule until `resume_at` (None: until it is resumed). Return None if it does not exist. An earlier pause stays as it is."""
    raise NotImplementedError


def resume_schedule(name: str) -> Statement[ScheduleChange | None]:
    """Resume a schedule. Its ticks until now are not sent. Return None if it does not exist."""
    raise NotImplementedError


def delete_schedule(name: str) -> Statement[ScheduleChange | None]:
    """Delete a schedule that was made at run time, or that is retired. Return None if it does not exist. Its ticks stay until retention."""
    raise NotImplementedError


def run_schedule(name: str, *, task_id: UUID, channel: str) -> Statement[SentRun | None]:
    """Send a task as a tick of the schedule does. Return None if the schedule does not exist. The task's id makes the call idempotent."""
    raise NotImplementedError


def backfill_ticks(
    name: str, ticks: Sequence[DecidedTick], *, channel: str, decided_by: str | None = None
) -> Statement[int | None]:
    """Send the given ticks, except those that were sent before. Return how many tasks were sent (None: the schedule does not exist)."""
    raise NotImplementedError


def apply_declared(*, after_ms: int) -> Statement[list[DeclaredChange]]:
    """Store the schedules that live workers declare, and retire those that they do not. Return the changes.

    Of each owner's versions, the one that became live last counts. If an owner has no live worker for `after_ms`, its schedules are retired.
    """
    raise NotImplementedError


def find_problems(*, overdue_ms: int, limit: int = 100) -> Statement[ScheduleProblems]:
    """Return what the doctor checks: schedules that are overdue by more than `overdue_ms`, failing schedules, and the zones in use."""
    raise NotImplementedError
