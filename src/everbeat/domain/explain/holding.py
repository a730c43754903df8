"""The reasons for the state of a CLAIMED, RUNNING or finished task, and for how its earlier attempts ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from everbeat.domain.explain.reasons import (
    Holding,
    Reason,
    ReasonCode,
    SilenceRules,
    advice_on,
    counted,
    fate,
    retry_of_step,
    unknown_liveness,
)
from everbeat.domain.inspection import AttemptInfo, RecoveryInfo, TaskSummary
from everbeat.domain.recovery.decision import UNRESPONSIVE_S
from everbeat.domain.settings.units import spelled_duration
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TaskState
from everbeat.errors import (
    RETRY_LATER_EXHAUSTED,
    TASK_CANCELLED,
    TASK_STALLED,
    UNKNOWN_LIMIT,
    WORKER_CRASHED,
    WORKER_STOPPED,
)
from everbeat.errors.tasks import shown_code
from everbeat.errors.wording import amount, brief_duration, spoken_way

_UNCERTAIN: Final = {
    ReasonCode.HOLDER_ENDED,
    ReasonCode.HOLDER_UNKNOWN,
    ReasonCode.HOLDER_WITHOUT_SESSION,
    ReasonCode.HOLDER_SILENT,
    ReasonCode.LIVENESS_UNKNOWN,
}
"""If one of these reasons applies, the holder's latest snapshot is out of date, because its supervisor is sending no heartbeats for it."""


def why_held(
    task: TaskSummary,
    holding: Holding,
    *,
    policy: StoredPolicy,
    rules: SilenceRules,
    at: datetime,
) -> tuple[Reason, ...]:
    """Return the reasons that say what a CLAIMED or RUNNING task's holder is doing, or why the task was not recovered from a dead holder."""
    death = tuple(_death(task, holding, policy=policy, rules=rules, at=at))
    if not any(reason.code in _UNCERTAIN for reason in death):
        death += tuple(_unresponsive(holding, at=at))
    hold = _hold(task, holding, policy=policy) if not death else _last_known(task, holding)
    return (*death, *hold, *_cancel(task, holding))


def _unresponsive(holding: Holding, *, at: datetime) -> Iterator[Reason]:
    """Yield a reason if the holder has recent heartbeats, but its process was not responding to its supervisor at the latest snapshot."""
    if holding.lag_ms is None or holding.lag_at is None or holding.lag_ms < UNRESPONSIVE_S * 1_000:
        return
    ago_ms = max(0.0, (at - holding.lag_at).total_seconds() * 1_000)
    yield Reason(
        code=ReasonCode.HOLDER_UNRESPONSIVE,
        text=f"the process of worker {_shown(holding)}, which holds it, had not responded for {_spelled(holding.lag_ms)} at its last"
        f" snapshot, {_spelled(ago_ms)} ago: it is stopped, or code blocks it. Its supervisor is still sending heartbeats, so the task is recovered"
        " only if hang_timeout_ms is set",
        since=holding.lag_at - timedelta(milliseconds=holding.lag_ms),
        blocked_by=holding.worker_id,
        command=f"everbeat workers release {holding.worker_id}",
    )


def _hold(task: TaskSummary, holding: Holding, *, policy: StoredPolicy) -> Iterator[Reason]:
    """Yield a reason that says what a healthy holder is doing."""
    if holding.started_at is None:
        doing = f"it runs {counted(len(holding.neighbours), 'other task')} now"
        yield Reason(
            code=ReasonCode.CLAIMED,
            text=f"worker {_shown(holding)} has claimed it and will start it when a slot is free: {doing}",
            since=holding.claimed_at,
            blocked_by=holding.worker_id,
            command=f"everbeat workers --history {holding.worker_id}",
        )
        return
    limit_ms = policy.timeout_ms
    yield Reason(
        code=ReasonCode.RUNNING,
        text=f"worker {_shown(holding)} runs attempt {task.attempt}{_alone(holding)}; its last heartbeat came"
        f" {_spelled(holding.silent_ms)} ago{_progress(task)}{_step(task)}{_unlimited(policy)}",
        since=holding.started_at,
        until=None if limit_ms is None else holding.started_at + timedelta(milliseconds=limit_ms),
        blocked_by=holding.worker_id,
        command=f"everbeat tasks cancel {task.id}",
    )
    if policy.stall_timeout_ms is not None:
        last = max(filter(None, (holding.started_at, task.progress_at)))
        allowed = spelled_duration(policy.stall_timeout_ms / 1_000)
        yield Reason(
            code=ReasonCode.PROGRESS_STANDS,
            text=f"it is stopped and recovered if its code reports no progress for {allowed}, its stall_timeout",
            since=last,
            until=last + timedelta(milliseconds=policy.stall_timeout_ms),
        )


def _last_known(task: TaskSummary, holding: Holding) -> Iterator[Reason]:
    """Yield a reason with the last known state of the task. Whether the task is still running is unknown."""
    if holding.started_at is None:
        yield Reason(
            code=ReasonCode.CLAIMED,
            text=f"worker {_shown(holding)} had claimed it, and its code had not started",
            since=holding.claimed_at,
            blocked_by=holding.worker_id,
            command=f"everbeat workers --history {holding.worker_id}",
        )
        return
    yield Reason(
        code=ReasonCode.RUNNING,
        text=f"worker {_shown(holding)} had started attempt {task.attempt}{_alone(holding)}, whose end was not reported;"
        f" its last heartbeat came {_spelled(holding.silent_ms)} ago{_progress(task)}",
        since=holding.started_at,
        blocked_by=holding.worker_id,
        command=f"everbeat tasks cancel {task.id}",
    )


def _alone(holding: Holding) -> str:
    return ", alone in a process" if holding.alone else ""


def _progress(task: TaskSummary) -> str:
    progress = task.progress
    if progress is None:
        return ""
    done = "" if progress.fraction is None else f" {progress.fraction:.0%}"
    return f"; progress: {progress.stage}{done} {progress.message}".rstrip()


def _step(task: TaskSummary) -> str:
    """Return a note if the code is waiting between two tries of a step, else an empty string."""
    failed = task.failed_try
    return (
        ""
        if failed is None
        else f"; it waits for {retry_of_step(failed)}, because the last try failed: {failed.error}"
    )


def _cancel(task: TaskSummary, holding: Holding) -> Iterator[Reason]:
    if task.cancel_requested_at is not None:
        yield Reason(
            code=ReasonCode.CANCEL_REQUESTED,
            text="a cancel was requested: it ends CANCELLED when its code stops",
            since=task.cancel_requested_at,
            blocked_by=holding.worker_id,
        )


def _death(
    task: TaskSummary,
    holding: Holding,
    *,
    policy: StoredPolicy,
    rules: SilenceRules,
    at: datetime,
) -> Iterator[Reason]:
    """Yield the reasons that say why the holder or its code is in trouble, and what blocks recovery. Yield nothing for a healthy holder."""
    started = holding.started_at is not None
    threshold_ms = rules.threshold_ms(holding)
    found = _trouble(holding, threshold_ms=threshold_ms, rules=rules, at=at)
    if found is None:
        # A live holder keeps a skipped task only if the process that ran the code died, or the code was stopped because it stalled.
        if holding.left_at is not None and (holding.alone or policy.stall_timeout_ms is not None):
            yield _skipped(holding, rules=rules, at=at, caller="its worker")
        return
    yield found
    if found.code is ReasonCode.LIVENESS_UNKNOWN:
        return
    if threshold_ms is None:
        name = "auto_fail_stale_running" if started else "auto_requeue_stale_claimed"
        yield Reason(
            code=ReasonCode.RECOVERY_OFF,
            text=f"{name} is off, so {task.state} tasks of dead workers are not recovered automatically",
            blocked_by=name,
            command="everbeat sweep --dry-run",
        )
    if holding.left_at is not None:
        yield _skipped(holding, rules=rules, at=at, caller="the next sweep" if holding.observers else None)
    if holding.observers == 0 and not holding.is_standby:
        yield Reason(
            code=ReasonCode.NOBODY_SWEEPS,
            text="no live supervisor can recover it",
            since=holding.last_beat_at,
            command="everbeat sweep --dry-run",
        )


def _skipped(holding: Holding, *, rules: SilenceRules, at: datetime, caller: str | None) -> Reason:
    """Return the reason to report after a hook has returned Skip. `caller` is the process that will call the hook again."""
    assert holding.left_at is not None  # checked by the caller
    again_at = holding.left_at + timedelta(milliseconds=rules.check_interval_ms)
    if caller is None:
        then = "nothing calls the hook again until a supervisor runs"
    elif at < again_at:
        then = f"after that, {caller} calls the hook again"
    else:
        then = f"it is due for a sweep: {caller} calls the hook again"
    return Reason(
        code=ReasonCode.HOOK_SKIPPED,
        text=f"a recovery hook answered Skip, so {holding.worker_id} keeps it; {then}",
        since=holding.left_at,
        until=again_at if caller is not None and at < again_at else None,
        blocked_by=holding.worker_id,
        command="everbeat sweep --dry-run",
    )


def _trouble(
    holding: Holding, *, threshold_ms: int | None, rules: SilenceRules, at: datetime
) -> Reason | None:
    silent = timedelta(milliseconds=(threshold_ms or 0) + rules.check_interval_ms)
    if holding.session_lost and holding.ended_at is None:
        return _without_session(holding)
    if holding.supervisor_id is None:
        code, since, due_at = ReasonCode.HOLDER_UNKNOWN, holding.last_beat_at, holding.last_beat_at + silent
        text, coming = (
            f"worker {holding.worker_id}, which holds it, is not registered",
            "it is recovered when it has been silent for too long",
        )
    elif holding.ended_at is not None:
        cause = holding.ended_cause or spoken_way(holding.ended_how or "how is not recorded")
        code, since = ReasonCode.HOLDER_ENDED, holding.ended_at
        due_at = holding.ended_at + timedelta(milliseconds=rules.check_interval_ms)
        text, coming = (
            f"worker {_shown(holding)}, which held it, has ended ({cause})",
            "the next sweep of a supervisor recovers it",
        )
    elif rules.is_silent(holding) and holding.is_standby:
        question = f"whether worker {_shown(holding)}, which holds it, is alive"
        return unknown_liveness(question, last_beat_at=holding.last_beat_at, blocked_by=holding.worker_id)
    elif rules.is_silent(holding):
        code, since, due_at = ReasonCode.HOLDER_SILENT, holding.last_beat_at, holding.last_beat_at + silent
        text = f"worker {_shown(holding)}, which holds it, has been silent for {_spelled(holding.silent_ms)}"
        coming = "unless the worker sends another heartbeat, the task is recovered then"
    else:
        return None
    until = None
    if threshold_ms is not None and holding.left_at is None and holding.observers:
        # Otherwise the following reasons explain why the task is not recovered.
        until = due_at if due_at > at else None
        text = f"{text}: {coming if until else 'it is due, and the next sweep of a supervisor recovers it'}"
    return Reason(
        code=code,
        text=text,
        since=since,
        until=until,
        blocked_by=holding.worker_id,
        command="everbeat sweep --dry-run",
    )


def _without_session(holding: Holding) -> Reason:
    coming = (
        "; unless the tree reconnects, a live supervisor recovers the task, usually within seconds"
        if holding.observers
        else ""
    )
    return Reason(
        code=ReasonCode.HOLDER_WITHOUT_SESSION,
        text=f"the tree of worker {_shown(holding)}, which holds it, has no session in PostgreSQL, so it is dead or cut off; its last"
        f" heartbeat came {_spelled(holding.silent_ms)} ago{coming}",
        since=holding.last_beat_at,
        blocked_by=holding.worker_id,
        command="everbeat workers" if holding.observers else "everbeat worker MODULE:APP",
    )


def _shown(holding: Holding) -> str:
    return f"{holding.worker_id} (pid {holding.pid} on {holding.hostname})"


def _unlimited(policy: StoredPolicy) -> str:
    """Return a note if the task has neither a timeout nor a stall timeout, else an empty string."""
    limited = policy.timeout_ms is not None or policy.stall_timeout_ms is not None
    return "" if limited else "; neither a timeout nor a stall_timeout limits it"


def _spelled(milliseconds: float) -> str:
    return brief_duration(milliseconds / 1_000)


NOT_BEFORE_GOOD_UNTIL: Final = "not run again: its next run would be due at"
"""`task/recover_leases` writes this text into the error of a task whose next run would be due after its `good_until`."""


def why_ended(
    task: TaskSummary, *, policy: StoredPolicy, attempts: Sequence[AttemptInfo]
) -> tuple[Reason, ...]:
    """Return the reasons that say how a task reached its terminal state, and why it did not run again."""
    last = attempts[-1] if attempts else None
    by = "" if last is None else f"attempt {last.attempt} on worker {last.worker_id}"
    again = _again_command(task)
    command = again if task.workflow_id is None else f"everbeat explain {task.workflow_id}"
    match task.state:
        case TaskState.COMPLETED:
            return (_end(ReasonCode.COMPLETED, f"{by} returned", task.completed_at),)
        case TaskState.FAILED:
            failure = str(task.error).removesuffix(".")
            why = _why_not_again(task, policy=policy, last=last)
            code = None if task.error is None else task.error.code
            advice = advice_on(code, is_poison=_is_poison(task))
            hint = f". {advice.text.format(again=again)}" if advice.text else ""
            text = f"{by} failed: {failure}. It did not run again: {why}{hint}"
            return (
                _end(ReasonCode.FAILED, text, task.failed_at, command=None if advice.same_again else command),
            )
        case TaskState.CANCELLED:
            text = f"it was cancelled {_when_it_ended(task, last, by=by)}{_own_reason(task, last)}"
            return (_end(ReasonCode.CANCELLED, text, task.cancelled_at, command=command),)
        case TaskState.EXPIRED:
            text = f"its good_until passed {_when_it_ended(task, last, by=by)}"
            return (_end(ReasonCode.EXPIRED, text, task.expired_at, command=command),)
        case _:
            return ()


def _own_reason(task: TaskSummary, last: AttemptInfo | None) -> str:
    """Return the reason that the code gave if it raised Cancel itself."""
    if task.error is None or last is None or last.error is None or last.error.code != TASK_CANCELLED:
        return ""
    return f": {task.error.message}"


def _again_command(task: TaskSummary) -> str:
    """Return the command that runs the task again. A workflow node's task can be retried only together with its workflow."""
    if task.workflow_id is None:
        return f"everbeat tasks retry {task.id}"
    return f"everbeat workflows retry {task.workflow_id}"


def _is_poison(task: TaskSummary) -> bool:
    data: Any = None if task.error is None else task.error.data
    return isinstance(data, dict) and bool(data.get("poison"))


def _when_it_ended(task: TaskSummary, last: AttemptInfo | None, *, by: str) -> str:
    if last is None:
        return "before its code started"
    if task.started_at is not None:
        return f"in {by}"
    return f"before its code started again; its last run, {by}, ended with outcome {last.outcome}"


def _end(code: ReasonCode, text: str, at: datetime | None, *, command: str | None = None) -> Reason:
    return Reason(code=code, text=text, since=at, command=command)


def _why_not_again(task: TaskSummary, *, policy: StoredPolicy, last: AttemptInfo | None) -> str:
    code = "" if task.error is None else task.error.code
    if _is_poison(task):
        is_lost = last is not None and last.outcome == "LOST"
        return f"it has used up its {f'losses ({task.loss_count})' if is_lost else f'crashes ({task.crash_count})'}"
    by_death = last is not None and last.outcome in ("CRASHED", "LOST")
    if by_death and task.error is not None and NOT_BEFORE_GOOD_UNTIL in task.error.message:
        return "its good_until passes before it could run again"
    if by_death and policy.on_crash != "retry" and not policy.lists((WORKER_CRASHED, TASK_STALLED)):
        return "its policy forbids another run after the death of a worker (on_crash='fail')"
    if code == RETRY_LATER_EXHAUSTED:
        return "the limit that the error names prevents it"
    if code == UNKNOWN_LIMIT:
        return "its code named a limit that the task does not have"
    if code == WORKER_STOPPED:
        return "its policy forbids another run after a stop (on_stop, on_crash='fail')"
    if policy.max_retries == 0 and not by_death:
        return "it has no retry policy"
    if policy.max_retries and task.retry_count >= policy.max_retries:
        return f"its {amount(policy.max_retries, 'retry is', plural='retries are')} used up"
    if policy.lists((code,)) and task.good_until is not None:
        return "its good_until passes before a retry could start"
    return "its policy does not list this error for a retry"


def why_again(
    *, attempts: Sequence[AttemptInfo], recoveries: Sequence[RecoveryInfo], task: TaskSummary
) -> tuple[Reason, ...]:
    """Return a reason for the end of each earlier attempt or claim, oldest first. `recoveries` must be sorted newest first.

    A PENDING task has not run since the last of these attempts.
    """
    by_fence = {each.fence: each for each in recoveries}
    found = [reason for each in reversed(recoveries) for reason in _unstarted(each)]
    for place, attempt in enumerate(attempts):
        is_last = place == len(attempts) - 1
        if is_last and task.state.is_terminal:
            continue
        if not attempt.will_retry:
            following = None if is_last else attempts[place + 1]
            found.append(_by_operator(attempt, since=_retried_at(attempt, following, task)))
            continue
        found.append(_again(attempt, by_fence.get(attempt.fence)))
    return tuple(sorted(found, key=_moment))


def _moment(reason: Reason) -> datetime:
    assert reason.since is not None  # every reason for a second run has a time
    return reason.since


def _unstarted(recovery: RecoveryInfo) -> Iterator[Reason]:
    if recovery.was is TaskState.CLAIMED and recovery.action == "requeue":
        yield _recovered(recovery, held="it")


def _by_operator(attempt: AttemptInfo, *, since: datetime) -> Reason:
    why = attempt.outcome if attempt.error is None else f"{attempt.outcome} ({shown_code(attempt.error)})"
    return Reason(
        code=ReasonCode.RETRIED_BY_OPERATOR,
        text=f"attempt {attempt.attempt} ended {why}, and an operator retried the task",
        since=since,
    )


def _retried_at(attempt: AttemptInfo, following: AttemptInfo | None, task: TaskSummary) -> datetime:
    """Return when the operator retried the task, or the time of the next claim if the row no longer contains the retry time."""
    if following is not None and not attempt.ended_at < task.enqueued_at <= following.claimed_at:
        return following.claimed_at
    is_kept = attempt.ended_at < task.enqueued_at and (following is not None or task.next_retry_at is None)
    return task.enqueued_at if is_kept else attempt.ended_at


def _again(attempt: AttemptInfo, recovery: RecoveryInfo | None) -> Reason:
    number = f"attempt {attempt.attempt}"
    if recovery is not None:
        return _recovered(recovery, held=number)
    if attempt.outcome == "RELEASED":
        return Reason(
            code=ReasonCode.HANDED_BACK,
            text=f"worker {attempt.worker_id} released {number}, which is not charged",
            since=attempt.ended_at,
            blocked_by=attempt.worker_id,
        )
    if attempt.outcome == "SUSPENDED" and attempt.error is not None:
        return Reason(
            code=ReasonCode.POSTPONED,
            text=f"the code of {number} postponed the task, which costs no retry: {attempt.error.message}",
            since=attempt.ended_at,
        )
    if attempt.outcome == "SUSPENDED":
        return Reason(
            code=ReasonCode.SUSPENDED,
            text=f"{number} released its slot to sleep or to wait for an event, which is not charged",
            since=attempt.ended_at,
        )
    return Reason(
        code=ReasonCode.RETRIED,
        text=f"{number} failed on worker {attempt.worker_id}: {attempt.error}",
        since=attempt.ended_at,
    )


def _recovered(recovery: RecoveryInfo, *, held: str) -> Reason:
    charge = f"; charged as a {recovery.charge}" if recovery.charge else ""
    suspect = "; since then it is a suspect" if recovery.suspect else ""
    due_at = recovery.next_retry_at
    return Reason(
        code=ReasonCode.RECOVERED,
        text=f"{fate(recovery, held=held)} (noticed by {spoken_way(recovery.noticed_by)}){charge}{suspect}",
        since=recovery.noticed_at,
        until=due_at if due_at is not None and due_at > recovery.noticed_at else None,
        blocked_by=recovery.worker_id,
        command=f"everbeat recoveries show {recovery.id}",
    )
