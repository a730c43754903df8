"""How a task ended, and why it was taken up more than once.

What lives here: the reading of a task's history. What may not: what it waits for now, and who holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from everbeat.domain.explanation import Reason, ReasonCode, fate
from everbeat.domain.inspection import AttemptInfo, RecoveryInfo, TaskSummary
from everbeat.domain.outcome import TASK_STALLED, WORKER_CRASHED, WORKER_STOPPED, shown_code
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.states import TaskState


def why_ended(
    task: TaskSummary, *, policy: StoredPolicy, attempts: Sequence[AttemptInfo]
) -> tuple[Reason, ...]:
    """How a terminal task ended, and why it was not run again."""
    last = attempts[-1] if attempts else None
    by = "" if last is None else f"attempt {last.attempt} on worker {last.worker_id}"
    again = f"everbeat tasks retry {task.id}"
    match task.state:
        case TaskState.COMPLETED:
            return (_end(ReasonCode.COMPLETED, f"{by} returned", task.completed_at),)
        case TaskState.FAILED:
            failure = str(task.error).removesuffix(".")
            text = f"{by} failed: {failure}; {_why_not_again(task, policy=policy, last=last)}"
            return (_end(ReasonCode.FAILED, text, task.failed_at, command=again),)
        case TaskState.CANCELLED:
            text = f"it was cancelled {_when_it_ended(task, last, by=by)}"
            return (_end(ReasonCode.CANCELLED, text, task.cancelled_at, command=again),)
        case TaskState.EXPIRED:
            text = f"its good_until passed {_when_it_ended(task, last, by=by)}"
            return (_end(ReasonCode.EXPIRED, text, task.expired_at, command=again),)
        case _:
            return ()


def _when_it_ended(task: TaskSummary, last: AttemptInfo | None, *, by: str) -> str:
    if last is None:
        return "before its code started"
    if task.started_at is not None:
        return f"in {by}"
    return f"before its code started again; {by} was its last, and ended {last.outcome}"


def _end(code: ReasonCode, text: str, at: datetime | None, *, command: str | None = None) -> Reason:
    return Reason(code=code, text=text, since=at, command=command)


def _why_not_again(task: TaskSummary, *, policy: StoredPolicy, last: AttemptInfo | None) -> str:
    code = "" if task.error is None else task.error.code
    data: Any = None if task.error is None else task.error.data
    if isinstance(data, dict) and data.get("poison"):
        is_lost = last is not None and last.outcome == "LOST"
        return f"it has used up its {f'losses ({task.loss_count})' if is_lost else f'crashes ({task.crash_count})'}"
    by_death = last is not None and last.outcome in ("CRASHED", "LOST")
    if by_death and policy.on_crash != "retry" and not policy.lists((WORKER_CRASHED, TASK_STALLED)):
        return "its policy does not run it again after the death of a worker (on_crash='fail')"
    if code == WORKER_STOPPED:
        return "its policy does not run it again after a stop (on_stop, on_crash='fail')"
    if policy.max_retries == 0 and not by_death:
        return "it has no retry policy"
    if policy.max_retries and task.retry_count >= policy.max_retries:
        return f"its {policy.max_retries} retries are used up"
    if policy.lists((code,)) and task.good_until is not None:
        return "its good_until passes before a retry could start"
    return "its policy does not list this error for a retry"


def why_again(
    *, attempts: Sequence[AttemptInfo], recoveries: Sequence[RecoveryInfo], task: TaskSummary
) -> tuple[Reason, ...]:
    """One reason for each time the task was taken up again, oldest first; `recoveries` come newest first."""
    by_fence = {each.fence: each for each in recoveries}
    found = [reason for each in reversed(recoveries) for reason in _unstarted(each)]
    for place, attempt in enumerate(attempts):
        is_last = place == len(attempts) - 1
        if is_last and task.state.is_terminal:
            continue
        found.append(_again(attempt, by_fence.get(attempt.fence)))
    return tuple(sorted(found, key=_moment))


def _moment(reason: Reason) -> datetime:
    assert reason.since is not None  # every second run has its moment
    return reason.since


def _unstarted(recovery: RecoveryInfo) -> Iterator[Reason]:
    if recovery.was is TaskState.CLAIMED and recovery.action == "requeue":
        yield _recovered(recovery, what="it")


def _again(attempt: AttemptInfo, recovery: RecoveryInfo | None) -> Reason:
    number = f"attempt {attempt.attempt}"
    if not attempt.will_retry:
        why = attempt.outcome if attempt.error is None else f"{attempt.outcome} ({shown_code(attempt.error)})"
        return Reason(
            code=ReasonCode.RETRIED_BY_OPERATOR,
            text=f"{number} ended {why}, and an operator ran the task again",
            since=attempt.ended_at,
        )
    if recovery is not None:
        return _recovered(recovery, what=number)
    if attempt.outcome == "RELEASED":
        return Reason(
            code=ReasonCode.HANDED_BACK,
            text=f"{number} was handed back, at no cost, by worker {attempt.worker_id}",
            since=attempt.ended_at,
            blocked_by=attempt.worker_id,
        )
    if attempt.outcome == "SUSPENDED":
        return Reason(
            code=ReasonCode.SUSPENDED,
            text=f"{number} gave its slot back, at no cost, to sleep or to wait for an event",
            since=attempt.ended_at,
        )
    return Reason(
        code=ReasonCode.RETRIED,
        text=f"{number} failed on worker {attempt.worker_id}: {attempt.error}",
        since=attempt.ended_at,
    )


def _recovered(recovery: RecoveryInfo, *, what: str) -> Reason:
    charge = f"; charged as a {recovery.charge}" if recovery.charge else ""
    suspect = "; it is a suspect since" if recovery.suspect else ""
    return Reason(
        code=ReasonCode.RECOVERED,
        text=f"{fate(recovery, what=what)} (noticed by {recovery.noticed_by}){charge}{suspect}",
        since=recovery.noticed_at,
        until=recovery.next_retry_at,
        blocked_by=recovery.worker_id,
        command=f"everbeat recoveries show {recovery.id}",
    )
