"""The events that a worker emits about its attempts."""

from __future__ import annotations

import logging

from msgspec import structs

from everbeat.domain.task.context_backend import FailedTry
from everbeat.domain.task.outcome import error_from_json
from everbeat.runtime.events import EventBus, TaskFinished, TaskStarted
from everbeat.runtime.failure_log import StepRetry, TaskPostponed, task_failure, task_retry
from everbeat.store.leases import Settlement
from everbeat.worker.attempt import Attempt

_log = logging.getLogger("everbeat.worker")


def emit_started(events: EventBus, attempt: Attempt) -> None:
    """Emit an event that the attempt's code is starting, if the log level is DEBUG."""
    if _log.isEnabledFor(logging.DEBUG):
        events.emit(TaskStarted(task_id=attempt.id, name=attempt.task.name, attempt=attempt.number))


def emit_failed(events: EventBus, attempt: Attempt, settlement: Settlement, state: str) -> None:
    """Emit an event that the attempt failed, and drop its exception. `state` is the task's state after the settlement."""
    exception, attempt.exception = attempt.exception, None
    task_id, name, error = attempt.id, attempt.task.name, settlement.error or b"{}"
    if state == "FAILED":
        failure = task_failure(
            task_id,
            name,
            attempt=attempt.number,
            error=error,
            exception=exception,
            trace_ids=attempt.trace_ids,
        )
        events.emit(failure)
    elif state == "PENDING":
        events.emit(
            task_retry(
                task_id,
                name,
                attempt=attempt.number,
                error=error,
                retry_in_s=_delay_s(settlement),
                run_at=settlement.run_at,
                trace_ids=attempt.trace_ids,
            )
        )


def emit_postponed(events: EventBus, attempt: Attempt, settlement: Settlement, state: str) -> None:
    """Emit an event that the code raised RetryLater and its task waits. `state` is the task's state after the settlement."""
    if state == "PENDING":
        known = error_from_json(settlement.error or b"{}")
        events.emit(
            TaskPostponed(
                task_id=attempt.id,
                name=attempt.task.name,
                attempt=attempt.number,
                code=known.code,
                reason=known.message,
                run_in_s=_delay_s(settlement),
                run_at=settlement.run_at,
                trace_ids=attempt.trace_ids,
            )
        )


def _delay_s(settlement: Settlement) -> float | None:
    """Return the delay before the next run in seconds, or None if the settlement sets a moment instead."""
    return None if settlement.run_at is not None else (settlement.retry_in_ms or 0) / 1_000


def emit_failed_try(events: EventBus, attempt: Attempt, failed: FailedTry, *, retry_in_s: float) -> None:
    """Emit an event that a step failed and will be retried."""
    values = structs.asdict(failed)
    events.emit(
        StepRetry(
            task_id=attempt.id,
            name=attempt.task.name,
            attempt=attempt.number,
            retry_in_s=retry_in_s,
            trace_ids=attempt.trace_ids,
            **values,
        )
    )


def emit_finished(events: EventBus, attempt: Attempt, state: str, duration_s: float) -> None:
    """Emit an event that the attempt is over, if any listener is registered. `state` is the task's state after the settlement."""
    if events.has_listeners(TaskFinished):
        name = attempt.task.name
        events.emit(
            TaskFinished(
                task_id=attempt.id, name=name, state=state, duration_s=duration_s, trace_ids=attempt.trace_ids
            )
        )
