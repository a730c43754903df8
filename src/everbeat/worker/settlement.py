"""From how code ended to what is written: the outcome of an attempt, and whether there is a retry.

What lives here: that decision, without I/O. What may not: writing it (`settler`), and deaths of processes, which are
recovered, not settled.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Final
from uuid import UUID

from msgspec.structs import replace

from everbeat.domain.duration import milliseconds
from everbeat.domain.failure import error_from_json, error_to_json
from everbeat.domain.outcome import TASK_TIMEOUT, UNHANDLED_EXCEPTION, WORKER_CRASHED, TaskError
from everbeat.domain.recovery import LeaseFacts, RecoveryRules, Retry, decide
from everbeat.domain.retry import reasons_of
from everbeat.domain.stops import TaskSuspended
from everbeat.domain.stored_text import class_name, storable
from everbeat.runtime.events import Event
from everbeat.store.leases import Settlement
from everbeat.store.stopped import stop_settlement
from everbeat.worker.attempt import Attempt, Declined, Died, Ended, Failed, Succeeded, Suspended

_TOLD_BYTES: Final = 1_000
_TIMED_OUT: Final = reasons_of(TASK_TIMEOUT, TimeoutError())
"""A timeout of everbeat is listed like one that the code would have raised itself."""
_SUSPENDED_ITSELF: Final = reasons_of(UNHANDLED_EXCEPTION, TaskSuspended())


def settlement_of(attempt: Attempt, ended: Ended | None, *, random: Random) -> Settlement | None:
    """What is written for an attempt; None for a death under running code. `ended` None: the code has not ended yet.

    Code of a worker that stops, and that does not end, is settled after its process: a second run must not overlap it.
    Code that was asked to stop and returned all the same has succeeded, unless its time was up; whatever else it does
    after being asked is a consequence of that, not an error of its own. Arguments that this code does not understand are left to other
    code whatever was asked, because no code has run.
    """
    if attempt.stopped is None and isinstance(ended, Succeeded) and not attempt.self_fenced:  # nearly always
        return Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="COMPLETED", result=ended.result)
    if isinstance(ended, Declined):
        failed = _failed(attempt, ended.failed.error, reasons=ended.failed.reasons, random=random)
        return replace(failed, outcome="DECLINED")
    if attempt.self_fenced:
        return _fenced(attempt, random)
    match attempt.stopped, ended:
        case "timed_out", _:
            return _failed(attempt, _timed_out(attempt), reasons=_TIMED_OUT, random=random)
        case _, Succeeded(result):
            return Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="COMPLETED", result=result)
        case "cancelled", _:
            return Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="CANCELLED")
        case None | "shutting_down", Suspended() if attempt.may_suspend:
            return Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="SUSPENDED")
        case None, Suspended():
            return _failed(attempt, _suspended_itself(), reasons=_SUSPENDED_ITSELF, random=random)
        case "shutting_down", None:
            return None
        case "shutting_down", _:
            return stop_settlement(attempt.id, attempt.claim_id, policy=attempt.policy)
        case _, Failed(error, reasons):
            return _failed(attempt, error, reasons=reasons, random=random)
        case _:
            return None


class CodeFailedAfterItsCommit(Event, frozen=True, kw_only=True):
    """The code raised or died after its own commit had completed the task: nothing of the task changes by it."""

    room = "worker"
    level = logging.WARNING
    task_id: UUID
    name: str
    code: str
    type: str
    message: str


def failed_after_commit(attempt: Attempt, ended: Failed | Died) -> CodeFailedAfterItsCommit:
    """What is told of it: no more than what an ordinary failure stores."""
    error = (
        error_from_json(ended.error)
        if isinstance(ended, Failed)
        else TaskError(WORKER_CRASHED, ended.report.cause)
    )
    return CodeFailedAfterItsCommit(
        task_id=attempt.id,
        name=attempt.task.name,
        code=error.code,
        type=error.type,
        message=storable(error.message, limit=_TOLD_BYTES),
    )


def state_after(settlement: Settlement) -> str:
    """In which state a settlement that landed has left its task."""
    match settlement.outcome:
        case "COMPLETED" | "CANCELLED":
            return settlement.outcome
        case "RELEASED" | "HANDED_BACK" | "SUSPENDED" | "DECLINED":
            return "PENDING"
        case _:
            return "FAILED" if settlement.retry_in_ms is None else "PENDING"


def undeclined(attempt: Settlement) -> Settlement:
    """Return what is written instead if a task cannot be marked for other code: its arguments are invalid."""
    return replace(attempt, outcome="FAILED")


def refused_result(attempt: Settlement, reason: str) -> Settlement:
    """What is written instead of an outcome that the database cannot store."""
    error = TaskError(
        "RESULT_UNSERIALISABLE", f"PostgreSQL cannot store the outcome of this attempt: {reason}."
    )
    return Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="FAILED", error=error_to_json(error))


def _failed(attempt: Attempt, error: bytes, *, reasons: tuple[str, ...], random: Random) -> Settlement:
    return Settlement(
        id=attempt.id,
        claim_id=attempt.claim_id,
        outcome="FAILED",
        error=error,
        retry_in_ms=_retry_in_ms(attempt, random) if attempt.policy.lists(reasons) else None,
    )


def _fenced(attempt: Attempt, random: Random) -> Settlement:
    """Its own end is decided like any loss of its worker, and charged to nobody."""
    facts = LeaseFacts(started=True, policy=attempt.policy, retry_count=attempt.task.retry_count)
    decision = decide(facts, rules=RecoveryRules(), charge=None, random=random)
    return Settlement(
        id=attempt.id,
        claim_id=attempt.claim_id,
        outcome="FAILED",
        error=_self_fenced(),
        retry_in_ms=decision.delay_ms if isinstance(decision, Retry) else None,
    )


def _retry_in_ms(attempt: Attempt, random: Random) -> int | None:
    """The delay of the next try; None when none is left."""
    if attempt.task.retry_count >= attempt.policy.max_retries:
        return None
    return milliseconds(attempt.policy.delay(attempt.task.retry_count + 1, random))


def _timed_out(attempt: Attempt) -> bytes:
    limit_s = attempt.timeout_s or 0.0
    message = f"The attempt ran longer than its timeout of {limit_s:g} s."
    return error_to_json(TaskError(TASK_TIMEOUT, message, {"timeout_s": limit_s}))


def _suspended_itself() -> bytes:
    message = "The code raised TaskSuspended, and had not been told to give its slot back: only Context.sleep and Context.wait_event do."
    return error_to_json(TaskError(UNHANDLED_EXCEPTION, message, type=class_name(TaskSuspended)))


def _self_fenced() -> bytes:
    message = "The worker could not reach the database for most of the stale threshold and stopped its code."
    return error_to_json(TaskError(WORKER_CRASHED, message, {"cause": "self_fenced"}))
