"""What a CLAIMED or RUNNING task is held by, and what will happen if its holder is dead.

What lives here: the reasons. What may not: the decision on a dead lease, which is `recovery`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

from everbeat.domain.duration import spelled
from everbeat.domain.explanation import Holding, Reason, ReasonCode, SilenceRules, counted
from everbeat.domain.inspection import TaskSummary
from everbeat.domain.policy import StoredPolicy


def why_held(
    task: TaskSummary,
    holding: Holding,
    *,
    policy: StoredPolicy,
    rules: SilenceRules,
) -> tuple[Reason, ...]:
    """What the holder of a CLAIMED or RUNNING task does, or why nobody has taken it from a dead one."""
    hold = [*_hold(task, holding, policy=policy), *_cancel(task, holding)]
    return (*_death(task, holding, rules=rules), *hold)


def _hold(task: TaskSummary, holding: Holding, *, policy: StoredPolicy) -> Iterator[Reason]:
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
    alone = ", alone in a process" if holding.alone else ""
    yield Reason(
        code=ReasonCode.RUNNING,
        text=f"worker {_shown(holding)} runs attempt {task.attempt}{alone}; its last heartbeat came"
        f" {_spelled(holding.silent_ms)} ago{_progress(task)}",
        since=holding.started_at,
        until=None if limit_ms is None else holding.started_at + timedelta(milliseconds=limit_ms),
        blocked_by=holding.worker_id,
        command=f"everbeat tasks cancel {task.id}",
    )
    if policy.stall_timeout_ms is not None:
        last = max(filter(None, (holding.started_at, task.progress_at)))
        yield Reason(
            code=ReasonCode.PROGRESS_STANDS,
            text=f"it is stopped and recovered when its code reports no progress for {_spelled(policy.stall_timeout_ms)}",
            since=last,
            until=last + timedelta(milliseconds=policy.stall_timeout_ms),
        )


def _progress(task: TaskSummary) -> str:
    said = task.progress
    if said is None:
        return ""
    done = "" if said.fraction is None else f" {said.fraction:.0%}"
    return f"; progress: {said.stage}{done} {said.message}".rstrip()


def _cancel(task: TaskSummary, holding: Holding) -> Iterator[Reason]:
    if task.cancel_requested_at is not None:
        yield Reason(
            code=ReasonCode.CANCEL_REQUESTED,
            text="a cancel was requested: it ends CANCELLED as soon as its code stops",
            since=task.cancel_requested_at,
            blocked_by=holding.worker_id,
        )


def _death(
    task: TaskSummary,
    holding: Holding,
    *,
    rules: SilenceRules,
) -> Iterator[Reason]:
    """What is wrong with the holder, and what stands in the way of a recovery; nothing while it beats."""
    started = holding.started_at is not None
    threshold_ms = rules.threshold_ms(started=started, flags=holding.flags)
    found = _trouble(holding, threshold_ms=threshold_ms, rules=rules)
    if found is None:
        return
    yield found
    if threshold_ms is None:
        name = "auto_fail_stale_running" if started else "auto_requeue_stale_claimed"
        yield Reason(
            code=ReasonCode.RECOVERY_OFF,
            text=f"{name} is off, so nothing recovers a dead worker's {task.state} tasks by itself",
            blocked_by=name,
            command="everbeat sweep --dry-run",
        )
    if holding.left_at is not None:
        yield Reason(
            code=ReasonCode.HOOK_SKIPPED,
            text="a recovery hook answered Skip, so it was left to its holder; the hook is asked again at every look",
            since=holding.left_at,
            command="everbeat sweep --dry-run",
        )
    if holding.observers == 0:
        yield Reason(
            code=ReasonCode.NOBODY_SWEEPS,
            text="no other live supervisor is there to recover it",
            since=holding.last_beat_at,
            command="everbeat sweep --dry-run",
        )


def _trouble(holding: Holding, *, threshold_ms: int | None, rules: SilenceRules) -> Reason | None:
    soon = timedelta(milliseconds=(threshold_ms or 0) + rules.check_interval_ms)
    until = None if threshold_ms is None else holding.last_beat_at + soon
    if holding.supervisor_id is None:
        return Reason(
            code=ReasonCode.HOLDER_UNKNOWN,
            text=f"worker {holding.worker_id}, which holds it, is not registered: it is recovered when it has been silent for too long",
            since=holding.last_beat_at,
            until=until,
            blocked_by=holding.worker_id,
            command="everbeat sweep --dry-run",
        )
    if holding.ended_at is not None:
        cause = holding.ended_cause or holding.ended_how or "how is not recorded"
        return Reason(
            code=ReasonCode.HOLDER_ENDED,
            text=f"worker {_shown(holding)}, which holds it, has ended ({cause}): the next look of a supervisor recovers it",
            since=holding.ended_at,
            until=None
            if threshold_ms is None
            else holding.ended_at + timedelta(milliseconds=rules.check_interval_ms),
            blocked_by=holding.worker_id,
            command="everbeat sweep --dry-run",
        )
    if holding.silent_ms > 2 * rules.beat_interval_ms:
        return Reason(
            code=ReasonCode.HOLDER_SILENT,
            text=f"worker {_shown(holding)}, which holds it, has been silent for {_spelled(holding.silent_ms)}",
            since=holding.last_beat_at,
            until=until,
            blocked_by=holding.worker_id,
            command="everbeat sweep --dry-run",
        )
    return None


def _shown(holding: Holding) -> str:
    return f"{holding.worker_id} (pid {holding.pid} on {holding.hostname})"


def _spelled(milliseconds: float) -> str:
    """A length of time, to the second where it is long."""
    seconds = milliseconds / 1_000
    if seconds < 120:
        return spelled(round(seconds, 1))
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
