"""The spans of attempts: what a tracer sees when the code of an attempt begins, and when it has ended."""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.labels import decode_labels
from everbeat.domain.task.outcome import error_from_json
from everbeat.domain.task.retry import reasons_of
from everbeat.domain.tracing.carrier import CARRIER_BYTES, PREVIOUS, carrier_of, encode_carrier
from everbeat.domain.tracing.model import PreviousAttempt, TracedAttempt, TracedEnd
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
_PREVIOUS_TEXT: Final = re.compile(r"([0-9]{1,10})-([0-9a-f]{32})-([0-9a-f]{16})", re.ASCII)
_CODES: Final[dict[StopReason, str]] = {
    "cancelled": TASK_CANCELLED,
    "timed_out": TASK_TIMEOUT,
    "shutting_down": WORKER_STOPPED,
}
_SETTLED_BY_WORKER: Final[frozenset[StopReason | None]] = frozenset(
    {"cancelled", "timed_out", "shutting_down"}
)
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
    gates: list[str] | None = None


def traced_attempt(attempt: Attempt, *, worker_id: str) -> TracedAttempt:
    """Return what tracers see of an attempt whose code is about to run. Facts that cannot be read, as after a change by hand, are left out."""
    task, stored = attempt.task, _stored(attempt)
    carrier = dict(carrier_of(stored.carrier))
    previous = _previous(carrier.pop(PREVIOUS, ""), before=attempt.number)
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
        limits=tuple(dict.fromkeys(gate.partition("/")[0] for gate in stored.gates or ())),
        previous=previous,
        carrier=carrier,
        retried_for=_retried_for(attempt),
    )


def _stored(attempt: Attempt) -> _StoredFacts:
    context = attempt.task.context
    if context is not None:
        with suppress(*_BROKEN):
            return msgspec.json.decode(context, type=_StoredFacts)
    return _StoredFacts()


def _previous(text: str, *, before: int) -> PreviousAttempt | None:
    """Return the attempt that a carrier names. A failure handler has the carrier of another task, whose attempts are not its own."""
    found = _PREVIOUS_TEXT.fullmatch(text)
    if found is None or not 0 < int(found[1]) < before:
        return None
    return PreviousAttempt(int(found[1]), found[2], found[3])


def next_context(attempt: Attempt) -> str | None:
    """Return the carrier for the next attempt of this task, as JSON text, or None if this attempt has no span.

    Return None also if the carrier has no room, because the baggage would be left out otherwise.
    """
    if attempt.trace_ids is None:
        return None
    previous = "-".join((str(attempt.number), *attempt.trace_ids))
    carrier = {**carrier_of(_stored(attempt).carrier), PREVIOUS: previous}
    return encode_carrier(carrier) if len(msgspec.json.encode(carrier)) <= CARRIER_BYTES else None


def _retried_for(attempt: Attempt) -> tuple[str, ...]:
    """Return the reasons for which the task runs again. A stop of the worker costs no retry."""
    policy = attempt.policy
    found = (
        (policy.retry_for if attempt.retries_left else ()),
        ((WORKER_STOPPED,) if policy.retries_stop else ()),
    )
    return (*found[0], *found[1])


class AttemptSpan:
    """The tracers around the code of one attempt. Create and close it in the same thread and with the same context variables.

    `ids` are those of the attempt's span, for the worker's log lines about the attempt.
    """

    __slots__ = ("_around", "_end", "_retried_for", "ids")

    def __init__(self, tracing: Tracing, attempt: TracedAttempt) -> None:
        self._end = TracedEnd()
        self._retried_for = attempt.retried_for
        self._around = tracing.running(attempt, self._end)
        self._around.__enter__()
        self.ids = tracing.ids()

    def close(self, ended: AttemptEnd, *, stopped: StopReason | None = None) -> None:
        """Report how the code has ended. `stopped` is why it was asked to stop."""
        _fill_in(self._end, ended, stopped=stopped, retried_for=self._retried_for)
        self._around.__exit__(None, None, None)


def trace_killed(attempt: Attempt, *, worker_id: str, cause: str, ran_s: float) -> None:
    """Report to the tracers an attempt that was stopped and whose task process did not end its span. `cause` is how the process exited.

    If the process died by itself or stalled, or if the lease was lost, the process that recovers the attempt reports it.
    """
    tracing, started_at = attempt.tracing, attempt.started_at
    if tracing is None or started_at is None or attempt.stopped not in _SETTLED_BY_WORKER:
        return
    traced, end = traced_attempt(attempt, worker_id=worker_id), TracedEnd()
    _fill_in(end, CodeFailed(b"{}", ()), stopped=attempt.stopped, retried_for=traced.retried_for)
    end.message = f"{end.code}: the task process was stopped: {cause}"
    tracing.killed(traced, end, started_at + timedelta(seconds=ran_s))


def _fill_in(
    end: TracedEnd, ended: AttemptEnd, *, stopped: StopReason | None, retried_for: tuple[str, ...]
) -> None:
    """Fill in how the code has ended, by the rules of `settlement_of`: a result does not count after a timeout or a lost lease."""
    match stopped, ended:
        case _, Declined(CodeFailed(error)):
            end.how = "declined"
            _explain(end, error)
        case ((None | "cancelled" | "shutting_down"), Succeeded()):
            end.how = "completed"
        case None, CodeFailed(error, reasons, exception):
            end.how, end.exception = "failed", exception
            end.will_retry = not set(retried_for).isdisjoint(reasons)
            _explain(end, error)
        case ((None | "shutting_down"), CodeCancelled(error) | CodePostponed(error)):
            end.how = "cancelled" if isinstance(ended, CodeCancelled) else "postponed"
            _explain(end, error)
        case ((None | "shutting_down"), CodeSuspended()):
            end.how = "suspended"
        case None, _:
            end.how = None
        case _:
            end.how = "cancelled" if stopped == "cancelled" else "failed"
            end.code = _CODES.get(stopped, stopped.upper())
            end.will_retry = not set(retried_for).isdisjoint(_REASONS.get(stopped, ()))


def _explain(end: TracedEnd, error: bytes) -> None:
    known = error_from_json(error)
    end.code, end.type, end.message = known.code, known.type, known.message
