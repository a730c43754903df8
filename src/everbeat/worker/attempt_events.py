"""The events of an attempt: it began, it failed, it is over."""

from __future__ import annotations

import logging

from everbeat.runtime.events import EventBus, TaskFinished, TaskStarted
from everbeat.runtime.failure_log import task_failure, task_retry
from everbeat.store.leases import Settlement
from everbeat.worker.attempt import Attempt

_log = logging.getLogger("everbeat.worker")


def tell_started(events: EventBus, attempt: Attempt) -> None:
    """Emit that its code begins, which costs nothing unless it is logged."""
    if _log.isEnabledFor(logging.DEBUG):
        events.emit(TaskStarted(task_id=attempt.id, name=attempt.task.name, attempt=attempt.number))


def tell_failed(events: EventBus, attempt: Attempt, settlement: Settlement, state: str) -> None:
    """Emit that it failed, if it did; `state` is that of its task afterwards. Releases its exception."""
    if settlement.outcome != "FAILED":
        return
    exception, attempt.exception = attempt.exception, None
    task_id, name, error = attempt.id, attempt.task.name, settlement.error or b"{}"
    if state == "FAILED":
        events.emit(task_failure(task_id, name, attempt=attempt.number, error=error, exception=exception))
    elif state == "PENDING":
        retry_in_s = (settlement.retry_in_ms or 0) / 1_000
        events.emit(task_retry(task_id, name, attempt=attempt.number, error=error, retry_in_s=retry_in_s))


def tell_finished(events: EventBus, attempt: Attempt, state: str, duration_s: float) -> None:
    """Emit that it is over; `state` is that of its task afterwards."""
    name = attempt.task.name
    events.emit(TaskFinished(task_id=attempt.id, name=name, state=state, duration_s=duration_s))
