"""Snapshots of limits, as returned to users, and the changes of `App.set_limit`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict
from uuid import UUID

from msgspec import Struct

from everbeat.domain.limit.model import WhenFull
from everbeat.domain.settings.units import Until
from everbeat.domain.task.states import TaskState


class LimitNumbers(Struct, frozen=True, kw_only=True):
    """The numbers of a limit: the permits, and the starts per period (`rate`) with the number that can start at once (`burst`)."""

    concurrency: int | None = None
    rate: str | None = None
    burst: int = 1


class Permit(Struct, frozen=True, kw_only=True):
    """A task that holds permits, and the worker that has its lease. `last_beat_at` is the worker's last heartbeat."""

    task_id: UUID
    name: str
    key: str | None
    cost: int
    state: TaskState
    claimed_at: datetime
    started_at: datetime | None
    worker_id: str | None
    hostname: str | None
    pid: int | None
    last_beat_at: datetime | None


class LimitKey(Struct, frozen=True, kw_only=True):
    """A key of a limit in use (None: the limit has no keys). `held` is the number of permits in use, and `waiting` the number of waiting tasks.

    `closed_until`: a task closed the gate until then. `opens_at`: the rate permits the next start then.
    """

    key: str | None
    held: int
    waiting: int
    closed_until: datetime | None = None
    opens_at: datetime | None = None


class LimitInfo(Struct, frozen=True, kw_only=True):
    """A limit. `numbers` are in force, and `declared` are those that the code declares (None: no code declares the limit).

    If an operator has set the numbers, `set_by` is that operator, for the `reason`, `until` a moment (None: until they are cleared).
    `held` is the number of permits in use, `waiting` the number of waiting tasks, and `keys` the number of keys in use. `at_least`: tasks of
    more keys than are counted wait for limits, so `waiting` and `keys` can be too low. The `holders` and the keys in use (`in_use`) are given
    only for one limit, and at most 1,000 of each.
    """

    name: str
    numbers: LimitNumbers
    declared: LimitNumbers | None
    declared_by: str | None
    declared_at: datetime | None
    key: str | None
    window: str
    fairness: str
    weights: Mapping[str, int]
    when_full: WhenFull
    set_by: str | None
    set_at: datetime | None
    reason: str | None
    until: datetime | None
    held: int
    waiting: int
    keys: int
    closed_until: datetime | None
    at_least: bool = False
    in_use: tuple[LimitKey, ...] = ()
    holders: tuple[Permit, ...] = ()


class LimitChanges(TypedDict, total=False):
    """The changes of `App.set_limit`. A value that is omitted stays as it is, and None removes it."""

    concurrency: int | None
    """The number of permits. With 0, no task starts."""
    rate: str | None
    """The number of starts per period, such as "100/10s"."""
    burst: int
    until: Until | None
    """When the numbers of the code return: a datetime, or a duration from now (None: with `clear_limit`)."""
    reason: str | None
