"""What a CLAIMED or RUNNING task is held by, and what will happen if its holder is dead.

What lives here: the reasons. What may not: the decision on a dead lease, which is `recovery`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Final

from everbeat.domain.duration import spelled
from everbeat.domain.explanation import Holding, Reason, ReasonCode, SilenceRules, counted, unknown_liveness
from everbeat.domain.inspection import TaskSummary
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.silence import UNRESPONSIVE_S

_UNCERTAIN: Final = {
    ReasonCode.HOLDER_ENDED,
    ReasonCode.HOLDER_UNKNOWN,
    ReasonCode.HOLDER_WITHOUT_SESSION,
    ReasonCode.HOLDER_SILENT,
    ReasonCode.LIVENESS_UNKNOWN,
}
"""The supervisor of the holder does not beat for it, so the latest snapshot says nothing of it."""


def why_held(
    task: TaskSummary,
    holding: Holding,
    *,
    policy: StoredPolicy,
    rules: SilenceRules,
    at: datetime,
) -> tuple[Reason, ...]:
    """What the holder of a CLAIMED or RUNNING task does, or why nobody has taken it from a dead one."""
    death = tuple(_death(task, holding, policy=policy, rules=rules, at=at))
    if not any(reason.code in _UNCERTAIN for reason in death):
        death += tuple(_unresponsive(holding, at=at))
    hold = _hold(task, holding, policy=policy) if not death else _held_so_far(task, holding)
    return (*death, *hold, *_cancel(task, holding))


def _unresponsive(holding: Holding, *, at: datetime) -> Iterator[Reason]:
    """That the process of a holder that lives for the database does not respond to its supervisor, by its latest snapshot."""
    if holding.lag_ms is None or holding.lag_at is None or holding.lag_ms < UNRESPONSIVE_S * 1_000:
        return
    ago_ms = max(0.0, (at - holding.lag_at).total_seconds() * 1_000)
    yield Reason(
        code=ReasonCode.HOLDER_UNRESPONSIVE,
        text=f"the process of worker {_shown(holding)}, which holds it, had not responded for {_spelled(holding.lag_ms)} at its last"
        f" snapshot, {_spelled(ago_ms)} ago: it is stopped, or code blocks it; its supervisor beats for it, so nothing recovers it"
        " unless hang_timeout_ms is set",
        since=holding.lag_at - timedelta(milliseconds=holding.lag_ms),
        blocked_by=holding.worker_id,
        command=f"everbeat workers release {holding.worker_id}",
    )


def _hold(task: TaskSummary, holding: Holding, *, policy: StoredPolicy) -> Iterator[Reason]:
    """What a holder does that nothing is wrong with."""
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


def _held_so_far(task: TaskSummary, holding: Holding) -> Iterator[Reason]:
    """What was known of the work before something went wrong: nobody knows whether it goes on."""
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
        text=f"worker {_shown(holding)} had begun attempt {task.attempt}{_alone(holding)}, whose end was not told;"
        f" its last heartbeat came {_spelled(holding.silent_ms)} ago{_progress(task)}",
        since=holding.started_at,
        blocked_by=holding.worker_id,
        command=f"everbeat tasks cancel {task.id}",
    )


def _alone(holding: Holding) -> str:
    return ", alone in a process" if holding.alone else ""


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
    policy: StoredPolicy,
    rules: SilenceRules,
    at: datetime,
) -> Iterator[Reason]:
    """What is wrong with the holder or its code, and what stands in the way of a recovery; nothing while all is well."""
    started = holding.started_at is not None
    threshold_ms = rules.threshold_ms(holding)
    found = _trouble(holding, threshold_ms=threshold_ms, rules=rules, at=at)
    if found is None:
        # A holder that lives keeps what a hook left only where it lost the process of the code, or stopped it for its silence.
        if holding.left_at is not None and (holding.alone or policy.stall_timeout_ms is not None):
            yield _skipped(holding, rules=rules, at=at, asked_by="its worker")
        return
    yield found
    if found.code is ReasonCode.LIVENESS_UNKNOWN:
        return
    if threshold_ms is None:
        name = "auto_fail_stale_running" if started else "auto_requeue_stale_claimed"
        yield Reason(
            code=ReasonCode.RECOVERY_OFF,
            text=f"{name} is off, so nothing recovers a dead worker's {task.state} tasks by itself",
            blocked_by=name,
            command="everbeat sweep --dry-run",
        )
    if holding.left_at is not None:
        yield _skipped(holding, rules=rules, at=at, asked_by="the next sweep" if holding.observers else None)
    if holding.observers == 0 and not holding.is_standby:
        yield Reason(
            code=ReasonCode.NOBODY_SWEEPS,
            text="no live supervisor is there to recover it",
            since=holding.last_beat_at,
            command="everbeat sweep --dry-run",
        )


def _skipped(holding: Holding, *, rules: SilenceRules, at: datetime, asked_by: str | None) -> Reason:
    """The word of a hook holds it; `asked_by`: who asks again."""
    assert holding.left_at is not None  # the caller looked
    again_at = holding.left_at + timedelta(milliseconds=rules.check_interval_ms)
    if asked_by is None:
        then = "nobody is there to ask it again"
    elif at < again_at:
        then = f"after that {asked_by} asks it again"
    else:
        then = f"it is due to be swept: {asked_by} asks the hook again"
    return Reason(
        code=ReasonCode.HOOK_SKIPPED,
        text=f"a recovery hook answered Skip, so it stays as it is, held by {holding.worker_id}; {then}",
        since=holding.left_at,
        until=again_at if asked_by is not None and at < again_at else None,
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
        cause = holding.ended_cause or holding.ended_how or "how is not recorded"
        code, since = ReasonCode.HOLDER_ENDED, holding.ended_at
        due_at = holding.ended_at + timedelta(milliseconds=rules.check_interval_ms)
        text, coming = (
            f"worker {_shown(holding)}, which held it, has ended ({cause})",
            "the next look of a supervisor recovers it",
        )
    elif rules.is_silent(holding) and holding.is_standby:
        what = f"whether worker {_shown(holding)}, which holds it, is alive"
        return unknown_liveness(what, last_beat_at=holding.last_beat_at, blocked_by=holding.worker_id)
    elif rules.is_silent(holding):
        code, since, due_at = ReasonCode.HOLDER_SILENT, holding.last_beat_at, holding.last_beat_at + silent
        text = f"worker {_shown(holding)}, which holds it, has been silent for {_spelled(holding.silent_ms)}"
        coming = "unless it beats again, it is recovered then"
    else:
        return None
    until = None
    if threshold_ms is not None and holding.left_at is None and holding.observers:
        # Otherwise the reasons after this one say why it is not recovered.
        until = due_at if due_at > at else None
        text = f"{text}: {coming if until else 'it is due, and the next look of a supervisor recovers it'}"
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
        " Unless it connects again, a live supervisor recovers it, mostly within seconds"
        if holding.observers
        else ""
    )
    return Reason(
        code=ReasonCode.HOLDER_WITHOUT_SESSION,
        text=f"PostgreSQL has no session any more of the tree of worker {_shown(holding)}, which holds it, so that tree is dead or cut"
        f" off; its last heartbeat came {_spelled(holding.silent_ms)} ago.{coming}",
        since=holding.last_beat_at,
        blocked_by=holding.worker_id,
        command="everbeat workers" if holding.observers else "everbeat worker MODULE:APP",
    )


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
