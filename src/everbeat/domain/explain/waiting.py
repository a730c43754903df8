"""The reasons why a PENDING task is not being claimed, and why no live worker can run it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from everbeat.domain.doctor.findings import Check, CheckCode
from everbeat.domain.doctor.work import coming, no_worker, why_not_started
from everbeat.domain.explain.reasons import (
    Reason,
    ReasonCode,
    Waiting,
    counted,
    fate,
    retry_of_step,
    unknown_liveness,
)
from everbeat.domain.inspection import RecoveryInfo, TaskSummary
from everbeat.domain.settings.units import shown_moment
from everbeat.domain.task.gathering import EVENT_PREFIX, awaited
from everbeat.domain.task.needs import KnowingWorkers, MarkedTasks, Needs, UnfitWorkers, unfit_workers
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.questions import OpenQuestion
from everbeat.domain.task.states import TaskState
from everbeat.errors import RATE_LIMITED, RETRY_LATER
from everbeat.errors.wording import nearest, some

_MOST_NAMES: Final = 10
_MOST_WORKERS: Final = 3
_LONGEST_NAME: Final = 100


def why_unfit(waiting: Waiting) -> Iterator[Reason]:
    """Yield a reason if live workers know the task's name, but none of them can run it with its arguments."""
    if waiting.needs is None or not waiting.unfit_workers:
        return
    lack = _lack(waiting.needs, waiting.unfit_workers, names_workers=True)
    fix = _remedy(waiting.needs, waiting.unfit_workers)
    yield Reason(
        code=ReasonCode.NEEDS_OTHER_CODE,
        text=f"no live worker can run it with its arguments: {lack}; {fix}, or cancel the task",
        blocked_by=_quoted(
            waiting.needs.other or (*_unknown(waiting.unfit_workers), *_missing(waiting.unfit_workers))
        ),
        command=None,  # more workers with the same code would not help
    )


def others_unfit(waiting: Waiting) -> str:
    """Return the final clause of a sentence, which says which live workers can run the task and what the others lack, or an empty string."""
    if waiting.needs is None or not waiting.unfit_workers:
        return ""
    unfit = {worker for each in waiting.unfit_workers for worker in each.workers}
    fit = sorted(worker for each in waiting.registered for worker in each.workers if worker not in unfit)
    lack = _lack(waiting.needs, waiting.unfit_workers, names_workers=True)
    return f"; its arguments fit only {some(fit, limit=_MOST_WORKERS)}: {lack}"


def judge_needs(marked: Sequence[MarkedTasks], crew: Sequence[KnowingWorkers]) -> Check:
    """Judge whether each marked task has a suitable live worker. Tasks are ignored if no live worker of their queue knows their name."""
    found: list[tuple[MarkedTasks, tuple[UnfitWorkers, ...]]] = []
    for each in sorted(marked, key=lambda one: -one.waiting):
        known = [
            one.registered
            for one in crew
            if one.name == each.name and (one.queues is None or each.queue in one.queues)
        ]
        unfit = unfit_workers(each.needs, known)
        if unfit and _workers(unfit) == sum(len(one.workers) for one in known):
            found.append((each, unfit))
    if not found:
        return CheckCode.NEEDS.ok("no task waits for workers with other code")
    names = [
        f"{each.name} ({each.waiting:,} in queue {each.queue}): {_lack(each.needs, unfit)}"
        for each, unfit in found
    ]
    text = (
        f"no live worker can run these waiting tasks with their arguments: {some(names, limit=_MOST_NAMES)}"
    )
    first, unfit = found[0]
    waiting = f"everbeat tasks list --state pending --name {shlex.quote(first.name)}"
    fix = f"{_remedy(first.needs, unfit)}, or cancel the tasks: {waiting}."
    return CheckCode.NEEDS.warn(text, fix)


def _lack(needs: Needs, found: Sequence[UnfitWorkers], *, names_workers: bool = False) -> str:
    """Return a clause that says what the workers lack."""
    if needs.other:
        return f"it needs {_quoted(needs.other)}, which this version of everbeat does not know"
    return ", and ".join(_lack_of(each, names_workers=names_workers) for each in found)


def _lack_of(each: UnfitWorkers, *, names_workers: bool) -> str:
    workers = counted(len(each.workers), "live worker")
    if names_workers:
        workers += f" ({some(each.workers, limit=_MOST_WORKERS)})"
    is_one = len(each.workers) == 1
    parts: list[str] = []
    if each.unknown:
        guesses = [
            f"{one!r}: did you mean {guess!r}?" for one in each.unknown if (guess := nearest(one, each.takes))
        ]
        guess = f" ({some(guesses, limit=_MOST_WORKERS)})" if guesses else ""
        parts.append(f"{'does' if is_one else 'do'} not take {_quoted(each.unknown)}{guess}")
    if each.missing:
        parts.append(
            f"{'requires' if is_one else 'require'} {_quoted(each.missing)}, which is not among its arguments"
        )
    return f"{workers} {' and '.join(parts)}"


def _remedy(needs: Needs, found: Sequence[UnfitWorkers]) -> str:
    if needs.other:
        return "start workers with a newer version of everbeat"
    unknown, missing = _unknown(found), _missing(found)
    parts: list[str] = []
    if unknown:
        parts.append(f"takes {_quoted(unknown)}")
    if missing:
        parts.append(f"does not require {_quoted(missing)}")
    return f"deploy the version that {' and '.join(parts)}"


def _unknown(found: Sequence[UnfitWorkers]) -> list[str]:
    return sorted({name for each in found for name in each.unknown})


def _missing(found: Sequence[UnfitWorkers]) -> list[str]:
    return sorted({name for each in found for name in each.missing})


def _workers(found: Sequence[UnfitWorkers]) -> int:
    return sum(len(each.workers) for each in found)


def _quoted(names: Sequence[str]) -> str:
    return some([repr(name[:_LONGEST_NAME]) for name in names], limit=_MOST_NAMES)


_NEAR: Final = timedelta(minutes=1)
_ENDLESS_YEARS: Final = 90
"""A wait without a timeout is stored as due in a hundred years, so a wait of more years than this has no timeout."""
_LARGEST: Final = {"fence": 2**63 - 1, "attempt": 2**31 - 1}
"""The largest values that the counters can hold. Claims skip rows in which a counter has reached its largest value."""
_NORMAL: Final = {
    ReasonCode.IN_LINE,
    ReasonCode.SLOTS_BUSY,
    ReasonCode.DEADLINE_NEAR,
    ReasonCode.FAIRNESS_TURN,
}


def why_waiting(
    task: TaskSummary,
    waiting: Waiting,
    *,
    policy: StoredPolicy,
    recoveries: Sequence[RecoveryInfo],
    at: datetime,
    limited: Sequence[Reason] = (),
) -> tuple[Reason, ...]:
    """Return every reason why a PENDING task is not being claimed. `recoveries` must be sorted newest first.

    `limited` are the reasons of its limits. They do not count before the task is due.
    """
    if task.state is not TaskState.PENDING:
        return ()
    found = [
        *_unusable(task),
        *_crew(task, waiting, at=at),
        *why_not_started(waiting.failing_starts),
        *_pauses(task, waiting),
        *_not_due(task, policy=policy, recoveries=recoveries, at=at, question=waiting.question),
        *_line(task, waiting, at=at),
        *(limited if task.enqueued_at <= at else ()),
        *_deadline(task, at=at),
    ]
    if not found:
        found += _turn(task, waiting, recoveries=recoveries, at=at)
    return tuple(found)


def waiting_because(reasons: Iterable[Reason]) -> str | None:
    """Return the reasons on one line, or None if the task is only waiting its turn."""
    texts = (reason.text.removesuffix(".") for reason in reasons if reason.code not in _NORMAL)
    return "; ".join(texts) or None


def _unusable(task: TaskSummary) -> Iterator[Reason]:
    for column, largest in _LARGEST.items():
        if getattr(task, column) >= largest:
            text = f"claims skip the row of this task: its column {column!r} is {largest}, which is the largest value"
            yield Reason(
                code=ReasonCode.BAD_ROW,
                text=f"{text}; set the column to the number of attempts so far with SQL, or delete the row",
                blocked_by=column,
                command="everbeat doctor",
            )


def _crew(task: TaskSummary, waiting: Waiting, *, at: datetime) -> Iterator[Reason]:
    if waiting.is_standby and not waiting.fitting:
        since = _since(task, waiting.last_beat_at, at=at)
        yield unknown_liveness("whether a live worker can run it", last_beat_at=since)
    elif waiting.alive == 0:
        yield no_worker(
            f"no live worker{_lost(waiting)}",
            since=_since(task, waiting.last_able_at, at=at),
            restarting=waiting.restarting,
            failing=waiting.failing_starts,
        )
    elif waiting.serving == 0:
        start = f"everbeat worker MODULE:APP --queues {shlex.quote(task.queue)}"
        guess = _did_you_mean(task.queue, waiting.known_queues)
        yield Reason(
            code=ReasonCode.QUEUE_NOT_SERVED,
            text=f"no live worker serves queue {task.queue!r}{guess}{coming(waiting.restarting)}",
            since=_since(task, waiting.last_able_at, at=at),
            blocked_by=task.queue,
            command="everbeat workers" if waiting.restarting else start,
        )
    elif waiting.knowing == 0:
        text = f"no live worker that serves queue {task.queue!r} knows task {task.name!r}"
        guess = _did_you_mean(task.name, waiting.known_tasks)
        yield Reason(
            code=ReasonCode.NAME_UNKNOWN,
            text=f"{text}{guess}{coming(waiting.restarting)}",
            since=_since(task, waiting.last_able_at, at=at),
            blocked_by=task.name,
            command="everbeat workers" if waiting.restarting else "everbeat check MODULE:APP",
        )
    elif waiting.fitting == 0:
        yield from why_unfit(waiting)
    elif waiting.quiet >= waiting.fitting:
        workers = counted(waiting.quiet, "live worker")
        yield Reason(
            code=ReasonCode.WORKERS_QUIET,
            text=f"an operator made {workers} quiet, and no other can run it",
            since=waiting.quiet_since,
            command="everbeat workers quiet --resume --all",
        )


def _since(task: TaskSummary, last_seen_at: datetime | None, *, at: datetime) -> datetime:
    """Return the time since which no worker has been able to claim the task. This is never before the task became due or was sent."""
    claimable_at = task.enqueued_at if task.enqueued_at <= at else task.sent_at
    return claimable_at if last_seen_at is None else max(claimable_at, last_seen_at)


def _lost(waiting: Waiting) -> str:
    if not waiting.lost:
        return ""
    return f": the trees of the {counted(waiting.lost, 'worker')} that beat last have no session in PostgreSQL, so they are dead or cut off"


def _did_you_mean(name: str, known: Sequence[str]) -> str:
    if name in known:
        return ""  # workers of other queues know the name
    guess = nearest(name, known)
    return "" if guess is None else f" (did you mean {guess!r}?)"


def _pauses(task: TaskSummary, waiting: Waiting) -> Iterator[Reason]:
    for pause, code, kind, name in (
        (waiting.all_pause, ReasonCode.ALL_PAUSED, "all", "*"),
        (waiting.task_pause, ReasonCode.TASK_PAUSED, "task", task.name),
        (waiting.queue_pause, ReasonCode.QUEUE_PAUSED, "queue", task.queue),
    ):
        if pause is None:
            continue
        crashes = (
            "" if pause.crashes is None else f" after {counted(pause.crashes, 'crash', plural='crashes')}"
        )
        why = f": {pause.reason}" if pause.reason else ""
        yield Reason(
            code=code,
            text=f"{'everything' if kind == 'all' else f'{kind} {name!r}'} was paused by {pause.paused_by}{crashes}{why}",
            since=pause.paused_at,
            blocked_by=name,
            command="everbeat resume --all"
            if kind == "all"
            else f"everbeat {kind}s resume {shlex.quote(name)}",
        )


def _not_due(
    task: TaskSummary,
    *,
    policy: StoredPolicy,
    recoveries: Sequence[RecoveryInfo],
    at: datetime,
    question: OpenQuestion | None,
) -> Iterator[Reason]:
    if task.enqueued_at <= at:
        return
    moment = shown_moment(task.enqueued_at)
    last = recoveries[0] if recoveries else None
    if last is not None and last.fence == task.fence and last.next_retry_at == task.enqueued_at:
        yield Reason(
            code=ReasonCode.RECOVERY_DELAYED,
            text=f"it is due again at {moment}, because {fate(last)}",
            since=last.noticed_at,
            until=task.enqueued_at,
            blocked_by=last.worker_id,
            command=f"everbeat recoveries show {last.id}",
        )
    elif task.wake_at is not None:
        yield _suspension(task) if question is None else _asking(task, question)
    elif (
        task.next_retry_at is not None
        and task.error is not None
        and task.error.code in (RETRY_LATER, RATE_LIMITED)
    ):
        yield Reason(
            code=ReasonCode.POSTPONED,
            text=f"the code of attempt {task.attempt} postponed it until {moment}: {task.error.message}",
            until=task.enqueued_at,
            command=f"everbeat tasks show {task.id}",
        )
    elif task.next_retry_at is not None:
        failure = "it failed" if task.error is None else f"attempt {task.attempt} failed: {task.error}"
        yield Reason(
            code=ReasonCode.RETRY_DUE_LATER,
            text=f"retry {task.retry_count} of {policy.max_retries} is due at {moment}, because {failure}",
            until=task.enqueued_at,
            command=f"everbeat tasks show {task.id}",
        )
    else:
        yield Reason(
            code=ReasonCode.SCHEDULED,
            text=f"it is due at {moment}",
            since=task.sent_at,
            until=task.enqueued_at,
        )


def _suspension(task: TaskSummary) -> Reason:
    if task.failed_try is not None:
        return Reason(
            code=ReasonCode.STEP_RETRY_DUE_LATER,
            text=f"{retry_of_step(task.failed_try)} is due at {shown_moment(task.enqueued_at)},"
            f" because its last try failed: {task.failed_try.error}",
            until=task.enqueued_at,
            blocked_by=task.failed_try.step,
            command=f"everbeat tasks show {task.id}",
        )
    endless = task.enqueued_at.year - task.sent_at.year >= _ENDLESS_YEARS
    until = "" if endless else f" until {shown_moment(task.enqueued_at)}"
    if task.waits_for is None:
        return Reason(code=ReasonCode.SLEEPING, text=f"it sleeps{until}", until=task.enqueued_at)
    if task.waits_for.startswith(EVENT_PREFIX):
        return Reason(
            code=ReasonCode.WAITING_FOR_CHILDREN,
            text=f"it is waiting for {awaited(task.waits_for)}",
            command=f"everbeat tasks list --parent {task.id}",
        )
    return Reason(
        code=ReasonCode.WAITING_FOR_EVENT,
        text=f"it is waiting for event {task.waits_for!r}{until}",
        until=None if endless else task.enqueued_at,
        blocked_by=task.waits_for,
        command=f"everbeat tasks signal {task.id} {shlex.quote(task.waits_for)}",
    )


def _asking(task: TaskSummary, asked: OpenQuestion) -> Reason:
    until = "" if asked.until is None else f", until {shown_moment(asked.until)}"
    return Reason(
        code=ReasonCode.WAITING_FOR_ANSWER,
        text=f"it is waiting for an answer to {asked.question!r} since {shown_moment(asked.since)}{until}",
        since=asked.since,
        until=asked.until,
        blocked_by=asked.step,
        command=f"everbeat inbox answer {task.id} VALUE",
    )


def _line(task: TaskSummary, waiting: Waiting, *, at: datetime) -> Iterator[Reason]:
    if task.serial is None or waiting.first_id is None:
        return
    due_at = waiting.first_due_at
    until = (
        due_at if waiting.first_state is TaskState.PENDING and due_at is not None and due_at > at else None
    )
    doing = "is not due yet" if until else f"is {waiting.first_state}"
    others = (
        f", with {counted(waiting.before - 1, 'more', plural='more')} behind it" if waiting.before > 1 else ""
    )
    yield Reason(
        code=ReasonCode.SERIAL_LINE,
        text=f"serial line {task.serial!r} runs one task at a time: task {waiting.first_id} ({waiting.first_name}) is first and {doing}{others}",
        until=until,
        blocked_by=str(waiting.first_id),
        command=f"everbeat explain {waiting.first_id}",
    )


def _deadline(task: TaskSummary, *, at: datetime) -> Iterator[Reason]:
    deadline = task.good_until
    if deadline is None:
        return
    if deadline <= at:
        code, text = (
            ReasonCode.DEADLINE_PASSED,
            "its good_until has passed: it will expire instead of running",
        )
    elif deadline <= task.enqueued_at:
        code = ReasonCode.DEADLINE_TOO_EARLY
        text = "its good_until passes before it is due: it will expire instead of running"
    else:
        return
    yield Reason(code=code, text=text, until=deadline, command=f"everbeat tasks cancel {task.id}")


def _turn(
    task: TaskSummary, waiting: Waiting, *, recoveries: Sequence[RecoveryInfo], at: datetime
) -> Iterator[Reason]:
    """Yield the reasons why a due task is waiting although workers can run it."""
    ahead = f"{counted(waiting.ahead, 'due task')} of its queue before it"
    if task.suspect:
        yield _suspicion(waiting, last=next((each for each in recoveries if each.suspect), None))
    elif waiting.slots is not None and waiting.running is not None and waiting.running >= waiting.slots:
        workers = counted(waiting.fitting - waiting.quiet, "live worker")
        slots = f"{counted(waiting.slots, 'slot')}, all busy" if waiting.slots else "no slots for its kind"
        yield Reason(
            code=ReasonCode.SLOTS_BUSY,
            text=f"slots of the {workers} that can run it: {slots}; {ahead}{others_unfit(waiting)}",
            since=task.enqueued_at,
            command="everbeat workers",
        )
    else:
        workers = counted(waiting.fitting - waiting.quiet, "live worker")
        yield Reason(
            code=ReasonCode.IN_LINE,
            text=f"it is due and waiting its turn: {ahead}, {workers} that can run it{_late(waiting)}{others_unfit(waiting)}",
            since=task.enqueued_at,
            command="everbeat workers",
        )
    if task.good_until is not None and task.good_until - at <= _NEAR:
        yield Reason(
            code=ReasonCode.DEADLINE_NEAR,
            text="it expires unless it starts before its good_until",
            until=task.good_until,
        )


def _late(waiting: Waiting) -> str:
    """Return the part of a sentence that says how many workers have a lagging event loop."""
    if not waiting.lagging:
        return ""
    whose = (
        "whose event loop lags"
        if waiting.fitting == 1
        else f"{waiting.lagging} of them with a lagging event loop"
    )
    return f", {whose}"


def _suspicion(waiting: Waiting, *, last: RecoveryInfo | None) -> Reason:
    why = "it might have killed a worker" if last is None else fate(last)
    return Reason(
        code=ReasonCode.SUSPECT,
        text=f"it is a suspect ({why}): its next attempt runs alone in a process, and few processes do that;"
        f" {counted(waiting.alone, 'other suspect')} in progress",
        since=None if last is None else last.noticed_at,
        blocked_by=None,
        command="everbeat workers" if last is None else f"everbeat recoveries show {last.id}",
    )
