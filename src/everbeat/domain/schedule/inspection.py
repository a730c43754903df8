"""Snapshots of schedules, their ticks and their runs, as returned to users."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypedDict
from uuid import UUID

from msgspec import Struct

from everbeat.domain.schedule.model import Rule, TickOutcome, TickReason
from everbeat.domain.task.states import TaskState

ScheduleState: TypeAlias = Literal["ACTIVE", "PAUSED", "RETIRED", "ENDED"]
"""ENDED: there are no further ticks. RETIRED: the schedule is declared in code, and live workers no longer declare it."""
PAUSED_BY_FAILURES: str = "everbeat"
"""The `paused_by` of a schedule that a scheduler paused because its latest runs failed."""


class TickInfo(Struct, frozen=True, kw_only=True):
    """A decided tick. `task_id` is the task that was sent for it, and `state` that task's current state (None: pruned, or not sent).

    A row with `last_at` stands for all ticks from `at` to `last_at`. Their number is `missed` (None: not counted).
    """

    schedule: str
    at: datetime
    outcome: TickOutcome
    task_id: UUID | None
    reason: TickReason | None
    detail: str | None
    last_at: datetime | None
    missed: int | None
    decided_at: datetime
    decided_by: str | None
    state: TaskState | None


class RunInfo(Struct, frozen=True, kw_only=True):
    """A run of a schedule that has not ended. `tick` is None if the run was requested by hand. `worker_id` is its holder."""

    task_id: UUID
    state: TaskState
    tick: datetime | None
    sent_at: datetime
    started_at: datetime | None
    attempt: int
    worker_id: str | None


class ScheduleInfo(Struct, frozen=True, kw_only=True):
    """A schedule. `arguments` are plain JSON values. `rule` is None if the stored rule is unreadable.

    All ticks up to `decided_to` are decided. A scheduler reads the schedule again at `next_at` (None: not before it changes). `runs` is
    the number of ticks that were sent. `owner` is the app whose code declares the schedule, or None if it was made at run time. Ticks up to
    `held_until` were not sent because the schedule was paused or retired. `last_tick` is the latest decided tick that is still stored.
    `at` is the database's time when the row was read.
    """

    name: str
    state: ScheduleState
    task: str
    arguments: Mapping[str, Any]
    queue: str
    priority: int
    key: str | None
    serial: str | None
    rule: Rule | None
    note: str | None
    owner: str | None
    created_at: datetime
    changed_at: datetime
    decided_to: datetime
    next_at: datetime | None
    runs: int
    paused_at: datetime | None
    paused_by: str | None
    pause_reason: str | None
    resume_at: datetime | None
    retired_at: datetime | None
    retired_because: Literal["UNDECLARED", "NO_WORKER"] | None
    ended_at: datetime | None
    held_until: datetime | None
    held_because: Literal["PAUSED", "RETIRED"] | None
    at: datetime
    last_tick: TickInfo | None


class ScheduleFilters(TypedDict, total=False):
    """Filters for schedules. A schedule must match all given filters."""

    state: ScheduleState | None
    task: str | None
    owner: str | None
    """Select the schedules that this app's code declares."""
    prefix: str | None
    """Select schedules whose names start with this text."""
