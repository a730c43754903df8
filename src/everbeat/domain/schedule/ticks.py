"""The decision of one pass about the ticks of a schedule."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from everbeat.domain.schedule.model import Decision, DueSchedule, Rule


def decide(due: DueSchedule, *, installation: str) -> Decision:
    """Return what happens to the ticks of a schedule that are due, and when a scheduler must look at the schedule again."""
    raise NotImplementedError


def tick_task_id(installation: str, name: str, tick: datetime) -> UUID:
    """Return the id of the task that stands for a tick. All processes compute the same id."""
    raise NotImplementedError


def jitter_ms_of(name: str, tick: datetime, jitter_ms: int) -> int:
    """Return the delay of a tick in milliseconds, less than `jitter_ms`. All processes compute the same delay."""
    raise NotImplementedError


def next_due(rule: Rule, name: str, after: datetime) -> tuple[datetime, datetime] | None:
    """Return the first tick after `after` and the moment when it is due, or None if there are no more ticks."""
    raise NotImplementedError
