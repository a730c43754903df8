"""The spans of attempts: what a tracer sees when the code of an attempt begins, and when it has ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.labels import decode_labels
from everbeat.domain.task.outcome import error_from_json
from everbeat.domain.task.retry import reasons_of
from everbeat.domain.tracing.carrier import carrier_of
from everbeat.domain.tracing.model import CodeEnd, TracedAttempt, TracedEnd
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import TASK_CANCELLED, TASK_TIMEOUT, WORKER_STOPPED, StopReason
from everbeat.worker.attempt import (
    Attempt,
    AttemptEnd,
    CodeCancelled,
    CodeFailed,
    CodePostponed,
    CodeSuspended,
    Declined,
    Succeeded,
)

_BROKEN: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_CODES: Final[dict[StopReason, str]] = {
    "cancelled": TASK_CANCELLED,
    "timed_out": TASK_TIMEOUT,
    "shutting_down": WORKER_STOPPED,
}
_REASONS: Final[dict[StopReason | None, tuple[str, ...]]] = {
    "timed_out": reasons_of(TASK_TIMEOUT, TimeoutError()),
    "shutting_down": (WORKER_STOPPED,),
}


class _StoredFacts(Struct):
    """The part "context" of a claimed row."""

    carrier: Any = None
    sent_at: datetime | None = None
    key: str | None = None
    schedule: str | None = None
    workflow_id: UUID | None = None
    node: int | None = None
    parent_id: UUID | None = None


def traced_attempt(attempt: Attempt, *, worker_id: str) -> TracedAttempt:
    """Return what tracers see of an attempt whose code is about to run. Facts that cannot be read, as after a change by hand, are left out."""
    task = attempt.task
    stored = _StoredFacts()
    if task.context is not None:
        try:
            stored = msgspec.json.decode(task.context, type=_StoredFacts)
        except _BROKEN:
            stored = _StoredFacts()
    return TracedAttempt(
        task_id=task.id,
        name=task.name,
        queue=task.queue,
        attempt=attempt.number,
        fence=task.fence,
        worker_id=worker_id,
        retry_count=task.retry_count,
        crash_count=task.crash_count,
        size=len(task.args),
        due_at=task.enqueued_at,
        started_at=attempt.started_at,
        sent_at=stored.sent_at,
        key=stored.key,
        labels=decode_labels(task.labels),
        workflow_id=stored.workflow_id,
        node=stored.node,
        parent_id=stored.parent_id,
        schedule=stored.schedule,
        tick=task.tick,
        carrier=carrier_of(stored.carrier),
        retried_for=_retried_for(attempt),
    )


def _retried_for(attempt: Attempt) -> tuple[str, ...]:
    """Return the reasons for which the task runs again. A stop of the worker costs no retry."""
    policy = attempt.policy
    found = (
        (policy.retry_for if attempt.retries_left else ()),
        ((WORKER_STOPPED,) if policy.retries_stop else ()),
    )
    return (*found[0], *found[1])


class AttemptSpan:
    """The tracers around the code of one attempt. Create and close it in the same thread and with the same context variables."""

    __slots__ = ("_around", "_end", "_retried_for")

    def __init__(self, tracing: Tracing, attempt: TracedAttempt) -> None:
        self._end = TracedEnd()
        self._retried_for = frozenset(attempt.retried_for)
        self._around = tracing.running(attempt, self._end)
        self._around.__enter__()

    def close(self, ended: AttemptEnd, *, stopped: StopReason | None = None) -> None:
        """Report how the code has ended. `stopped` is why it was asked to stop."""
        end = self._end
        match ended:
            case CodeFailed(error, reasons, exception) if stopped is None:
                end.how, end.exception = "failed", exception
                end.will_retry = not self._retried_for.isdisjoint(reasons)
                _explain(end, error)
            case CodeFailed():
                end.how = "cancelled" if stopped == "cancelled" else "failed"
                end.code = _CODES.get(stopped, stopped.upper()) if stopped is not None else None
                end.will_retry = not self._retried_for.isdisjoint(_REASONS.get(stopped, ()))
            case Declined(CodeFailed(error)):
                end.how = "declined"
                _explain(end, error)
            case CodeCancelled(error) | CodePostponed(error):
                end.how = "cancelled" if isinstance(ended, CodeCancelled) else "postponed"
                _explain(end, error)
            case _:
                end.how = _end_of(ended)
        self._around.__exit__(None, None, None)


def _end_of(ended: AttemptEnd) -> CodeEnd | None:
    if isinstance(ended, Succeeded):
        return "completed"
    return "suspended" if isinstance(ended, CodeSuspended) else None


def _explain(end: TracedEnd, error: bytes) -> None:
    known = error_from_json(error)
    end.code, end.type, end.message = known.code, known.type, known.message
