"""Why a PENDING task is not claimed.

What lives here: the reasons, hardest first. What may not: tasks in other states.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from everbeat.domain.explanation import Reason, ReasonCode, Waiting, counted, fate, unknown_liveness
from everbeat.domain.inspection import RecoveryInfo, TaskSummary
from everbeat.domain.pauses import Pause
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.starts import why_not_started
from everbeat.domain.states import TaskState
from everbeat.domain.unfit import others_unfit, why_unfit
from everbeat.errors import nearest

_NEAR: Final = timedelta(minutes=1)
_ENDLESS_YEARS: Final = 90
"""A wait without a timeout is due in a hundred years."""
_LARGEST: Final = {"fence": 2**63 - 1, "attempt": 2**31 - 1}
"""A counter with this value has no next one, so claims pass over its row."""
_ITS_TURN: Final = {ReasonCode.IN_LINE, ReasonCode.SLOTS_BUSY, ReasonCode.DEADLINE_NEAR}


def why_waiting(
    task: TaskSummary,
    waiting: Waiting,
    *,
    policy: StoredPolicy,
    recoveries: Sequence[RecoveryInfo],
    at: datetime,
) -> tuple[Reason, ...]:
    """Every reason why a PENDING task is not claimed at this moment; `recoveries` come newest first."""
    if task.state is not TaskState.PENDING:
        return ()
    found = [
        *_unusable(task),
        *_crew(task, waiting),
        *why_not_started(waiting.failing_starts),
        *_pauses(task, waiting),
        *_not_due(task, policy=policy, recoveries=recoveries, at=at),
        *_line(task, waiting, at=at),
        *_deadline(task, at=at),
    ]
    if not found:
        found += _turn(task, waiting, recoveries=recoveries, at=at)
    return tuple(found)


def waiting_because(reasons: Iterable[Reason]) -> str | None:
    """The reasons in one line; None when the task only waits for its turn."""
    texts = (reason.text.removesuffix(".") for reason in reasons if reason.code not in _ITS_TURN)
    return "; ".join(texts) or None


def _unusable(task: TaskSummary) -> Iterator[Reason]:
    for column, largest in _LARGEST.items():
        if getattr(task, column) >= largest:
            text = f"claims pass over the row of this task: its column {column!r} is {largest}, which has no next value"
            yield Reason(
                code=ReasonCode.BAD_ROW,
                text=f"{text}; set the column to the number of attempts so far with SQL, or delete the row",
                blocked_by=column,
                command="everbeat doctor",
            )


def _crew(task: TaskSummary, waiting: Waiting) -> Iterator[Reason]:
    if waiting.is_standby and not waiting.fitting:
        yield unknown_liveness("whether a live worker takes it", last_beat_at=waiting.last_beat_at)
    elif waiting.alive == 0:
        yield Reason(
            code=ReasonCode.NO_WORKER,
            text=f"no live worker{_lost(waiting)}",
            since=waiting.last_beat_at,
            command="everbeat worker MODULE:APP",
        )
    elif waiting.serving == 0:
        yield Reason(
            code=ReasonCode.QUEUE_NOT_SERVED,
            text=f"no live worker serves queue {task.queue!r}{_meant(task.queue, waiting.known_queues)}",
            blocked_by=task.queue,
            command=f"everbeat worker MODULE:APP --queues {shlex.quote(task.queue)}",
        )
    elif waiting.knowing == 0:
        text = f"no live worker that serves queue {task.queue!r} knows task {task.name!r}"
        yield Reason(
            code=ReasonCode.NAME_UNKNOWN,
            text=f"{text}{_meant(task.name, waiting.known_tasks)}",
            blocked_by=task.name,
            command="everbeat check MODULE:APP",
        )
    elif waiting.fitting == 0:
        yield from why_unfit(waiting)
    elif waiting.quiet >= waiting.fitting:
        workers = counted(waiting.quiet, "live worker")
        yield Reason(
            code=ReasonCode.WORKERS_QUIET,
            text=f"an operator made {workers} quiet, and no other could run it",
            since=waiting.quiet_since,
            command="everbeat workers quiet --resume --all",
        )


def _lost(waiting: Waiting) -> str:
    if not waiting.lost:
        return ""
    return f": PostgreSQL has no session any more of the {counted(waiting.lost, 'worker')} that beat last, so they are dead or cut off"


def _meant(name: str, known: Sequence[str]) -> str:
    if name in known:
        return ""  # known to workers of other queues
    guess = nearest(name, known)
    return "" if guess is None else f" (did you mean {guess!r}?)"


def _pauses(task: TaskSummary, waiting: Waiting) -> Iterator[Reason]:
    if waiting.task_pause is not None:
        yield _pause(
            waiting.task_pause,
            code=ReasonCode.TASK_PAUSED,
            what=f"task {task.name!r}",
            name=task.name,
            command=f"everbeat tasks resume {shlex.quote(task.name)}",
        )
    if waiting.queue_pause is not None:
        yield _pause(
            waiting.queue_pause,
            code=ReasonCode.QUEUE_PAUSED,
            what=f"queue {task.queue!r}",
            name=task.queue,
            command=f"everbeat queues resume {shlex.quote(task.queue)}",
        )


def _pause(pause: Pause, *, code: ReasonCode, what: str, name: str, command: str) -> Reason:
    crashes = "" if pause.crashes is None else f" after {counted(pause.crashes, 'crash', plural='crashes')}"
    why = f": {pause.reason}" if pause.reason else ""
    text = f"{what} was paused by {pause.paused_by}{crashes}{why}"
    return Reason(code=code, text=text, since=pause.paused_at, blocked_by=name, command=command)


def _not_due(
    task: TaskSummary, *, policy: StoredPolicy, recoveries: Sequence[RecoveryInfo], at: datetime
) -> Iterator[Reason]:
    if task.enqueued_at <= at:
        return
    moment = task.enqueued_at.isoformat(timespec="milliseconds")
    last = recoveries[0] if recoveries else None
    if last is not None and last.fence == task.fence and last.next_retry_at == task.enqueued_at:
        yield Reason(
            code=ReasonCode.RECOVERY_DELAYED,
            text=f"it is run again at {moment}, because {fate(last)}",
            since=last.noticed_at,
            until=task.enqueued_at,
            blocked_by=last.worker_id,
            command=f"everbeat recoveries show {last.id}",
        )
    elif task.wake_at is not None:
        yield _suspension(task)
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
    endless = task.enqueued_at.year - task.sent_at.year >= _ENDLESS_YEARS
    until = "" if endless else f" until {task.enqueued_at.isoformat(timespec='milliseconds')}"
    if task.waits_for is None:
        return Reason(code=ReasonCode.SLEEPING, text=f"it sleeps{until}", until=task.enqueued_at)
    return Reason(
        code=ReasonCode.WAITING_FOR_EVENT,
        text=f"it waits for event {task.waits_for!r}{until}",
        until=None if endless else task.enqueued_at,
        blocked_by=task.waits_for,
        command=f"everbeat tasks signal {task.id} {shlex.quote(task.waits_for)}",
    )


def _line(task: TaskSummary, waiting: Waiting, *, at: datetime) -> Iterator[Reason]:
    if task.serial is None or waiting.first_id is None:
        return
    due_at = waiting.first_due_at
    until = (
        due_at if waiting.first_state is TaskState.PENDING and due_at is not None and due_at > at else None
    )
    doing = "waits for its own time" if until else f"is {waiting.first_state}"
    others = (
        f", with {counted(waiting.before - 1, 'more', plural='more')} behind it" if waiting.before > 1 else ""
    )
    yield Reason(
        code=ReasonCode.SERIAL_LINE,
        text=f"serial line {task.serial!r} runs one task at a time: task {waiting.first_id} ({waiting.first_name}) is before it and {doing}{others}",
        until=until,
        blocked_by=str(waiting.first_id),
        command=f"everbeat explain {waiting.first_id}",
    )


def _deadline(task: TaskSummary, *, at: datetime) -> Iterator[Reason]:
    deadline = task.good_until
    if deadline is None:
        return
    if deadline <= at:
        code, text = ReasonCode.DEADLINE_PASSED, "its good_until has passed: it will be EXPIRED, not run"
    elif deadline <= task.enqueued_at:
        code = ReasonCode.DEADLINE_TOO_EARLY
        text = "its good_until passes before it is due: it will be EXPIRED, not run"
    else:
        return
    yield Reason(code=code, text=text, until=deadline, command=f"everbeat tasks cancel {task.id}")


def _turn(
    task: TaskSummary, waiting: Waiting, *, recoveries: Sequence[RecoveryInfo], at: datetime
) -> Iterator[Reason]:
    """Nothing holds it back: it is due, and somebody could take it."""
    ahead = f"{counted(waiting.ahead, 'due task')} of its queue before it"
    if task.suspect:
        yield _suspicion(waiting, last=next((each for each in recoveries if each.suspect), None))
    elif waiting.slots is not None and waiting.running is not None and waiting.running >= waiting.slots:
        workers = counted(waiting.fitting - waiting.quiet, "live worker")
        slots = f"{counted(waiting.slots, 'slot')}, all busy" if waiting.slots else "no slots for its kind"
        yield Reason(
            code=ReasonCode.SLOTS_BUSY,
            text=f"slots of the {workers} that could run it: {slots}; {ahead}{others_unfit(waiting)}",
            since=task.enqueued_at,
            command="everbeat workers",
        )
    else:
        workers = counted(waiting.fitting - waiting.quiet, "live worker")
        yield Reason(
            code=ReasonCode.IN_LINE,
            text=f"it is due and waits for its turn: {ahead}, {workers} that could run it{_late(waiting)}{others_unfit(waiting)}",
            since=task.enqueued_at,
            command="everbeat workers",
        )
    if task.good_until is not None and task.good_until - at <= _NEAR:
        yield Reason(
            code=ReasonCode.DEADLINE_NEAR,
            text="unless it starts before its good_until it will be EXPIRED",
            until=task.good_until,
        )


def _late(waiting: Waiting) -> str:
    """That their event loops hardly turn, or not at all."""
    if not waiting.lagging:
        return ""
    whose = (
        "whose event loop lags"
        if waiting.fitting == 1
        else f"of which {waiting.lagging} with a lagging event loop"
    )
    return f", {whose}"


def _suspicion(waiting: Waiting, *, last: RecoveryInfo | None) -> Reason:
    why = "it may have killed a worker" if last is None else fate(last)
    return Reason(
        code=ReasonCode.SUSPECT,
        text=f"it is a suspect ({why}): it runs next alone in a process, of which there are few;"
        f" {counted(waiting.alone, 'other suspect')} taken now",
        since=None if last is None else last.noticed_at,
        blocked_by=None,
        command="everbeat workers" if last is None else f"everbeat recoveries show {last.id}",
    )
