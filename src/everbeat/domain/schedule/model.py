"""The types of schedules: what a schedule stores, what a pass decides about its ticks, and what a declaration contains."""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, TypeAlias
from uuid import UUID

from msgspec import UNSET, Struct, UnsetType

from everbeat.domain.limit.model import LimitDefinition

Missed: TypeAlias = Literal["latest", "all", "skip"]
"""How ticks that no supervisor decided in time are handled: send the latest one, send all of them in order, or send none."""
Overlap: TypeAlias = Literal["allow", "skip", "buffer_one", "buffer_all", "cancel_other"]
"""How a tick is handled while an earlier run of the schedule is live."""
TickOutcome: TypeAlias = Literal["SENT", "SKIPPED", "MISSED"]
TickReason: TypeAlias = Literal[
    "OVERLAP", "LATE", "NOT_LATEST", "TOO_MANY", "CATCHUP_WINDOW", "PAUSED", "RETIRED"
]
"""Why a tick was not sent.

OVERLAP: a run was live (`SKIPPED`). The others are of `MISSED` ticks. LATE: the tick was decided late, and `missed` is "skip". NOT_LATEST: a
later tick was sent instead. TOO_MANY: more than `most` ticks were missed. CATCHUP_WINDOW: the tick was older than the window. PAUSED, RETIRED:
the schedule was paused or retired at that moment.
"""
MOST_MISSED_ROWS: Final = 1_000
"""The number of latest missed ticks of one decision that have one row each. Earlier missed ticks share one row."""
ON_TIME_MS: Final = 60_000
"""With `missed="skip"`, the latest due tick is sent if it is decided at most this many milliseconds after it was due."""


class Timing(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When a schedule ticks: by cron expressions, at an interval, or at single moments. Exactly one kind is given.

    `cron` is evaluated in `timezone`. `every_ms` counts from the Unix epoch plus `offset_ms`, in UTC. `at` is sorted.
    """

    cron: tuple[str, ...] = ()
    every_ms: int | None = None
    offset_ms: int = 0
    at: tuple[datetime, ...] = ()
    timezone: str = "UTC"


class Rule(Struct, frozen=True, kw_only=True):
    """Everything about a schedule that decides its ticks. Durations are in milliseconds."""

    timing: Timing
    missed: Missed = "latest"
    most: int = 100
    catchup_ms: int = 86_400_000
    overlap: Overlap = "allow"
    jitter_ms: int = 0
    starts_at: datetime | None = None
    ends_at: datetime | None = None
    most_runs: int | None = None
    pause_after_failures: int | None = None
    expires_ms: int | None = None


class ScheduledCall(Struct, frozen=True, kw_only=True):
    """The task that each tick sends, as it is stored with a task. `args`, `policy` and `flags` are JSON text.

    `gates`, `costs` and `labels` are left out of a declaration without them, so that its hash is the same as in earlier versions.
    """

    task: str
    args: str
    queue: str
    priority: int
    key: str | None = None
    policy: str | None = None
    flags: str | None = None
    serial: str | None = None
    gates: tuple[str, ...] | UnsetType = UNSET
    costs: tuple[int, ...] | UnsetType = UNSET
    labels: dict[str, str] | UnsetType = UNSET


class Definition(Struct, frozen=True, kw_only=True):
    """A whole schedule, as code declares it or a program puts it. Workers send it to their supervisor."""

    name: str
    call: ScheduledCall
    rule: Rule
    note: str | None = None


class Declared(Struct, frozen=True, kw_only=True):
    """The schedules and limits that an app's code declares. `version` is the hash of all of them, `owner` the app's name."""

    owner: str
    version: str
    schedules: tuple[Definition, ...] = ()
    limits: tuple[LimitDefinition, ...] = ()


class DueSchedule(Struct, frozen=True, kw_only=True):
    """A schedule that a scheduler must check now.

    All ticks up to `decided_to` are decided. `now` is the database's time. `live` is the number of its runs that have not ended, and `waiting`
    the number of those that have not begun yet. `failures` counts the latest runs that failed, without an interruption by another outcome. Runs
    before `held_until` do not count, so that a resumed schedule is not paused again at its next tick.
    `changed_at` differs after each change of the schedule that was not a decision about ticks.
    """

    name: str
    rule: Rule
    decided_to: datetime
    now: datetime
    runs: int
    live: int
    waiting: int
    failures: int
    is_paused: bool
    resume_at: datetime | None
    held_until: datetime | None
    held_because: Literal["PAUSED", "RETIRED"] | None
    changed_at: datetime | None = None


class DecidedTick(Struct, frozen=True, kw_only=True):
    """The outcome of one tick. `task_id` is the task's id if it is sent.

    `good_until` is when the run expires. `is_serial`: the run waits in the schedule's serial line. `cancels`: the cancellation of the live runs
    is requested. A `last_at` makes this a series of `missed` ticks (None: not counted).
    """

    at: datetime
    outcome: TickOutcome
    reason: TickReason | None = None
    detail: str | None = None
    task_id: UUID | None = None
    due_at: datetime | None = None
    good_until: datetime | None = None
    is_serial: bool = False
    cancels: bool = False
    last_at: datetime | None = None
    missed: int | None = None


class TickDecision(Struct, frozen=True, kw_only=True):
    """The decision of one pass about a schedule.

    The decision only counts while the schedule has `seen_decided_to` and `seen_changed_at` (None: not compared).
    `decided_to` replaces the schedule's. `next_at` is when a scheduler must check again (None: never). `has_ended`: there are no further ticks.
    `pauses`: the schedule is paused, for this reason. `resumes`: its pause is over.
    """

    name: str
    seen_decided_to: datetime
    decided_to: datetime
    next_at: datetime | None
    ticks: tuple[DecidedTick, ...] = ()
    has_ended: bool = False
    pauses: str | None = None
    resumes: bool = False
    seen_changed_at: datetime | None = None
