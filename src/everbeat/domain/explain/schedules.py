"""The reasons why a schedule sends no tasks, why earlier ticks were not sent, and what its runs are waiting for."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Final

from msgspec import Struct

from everbeat.domain.doctor.work import no_worker
from everbeat.domain.explain.reasons import Explanation, Reason, ReasonCode, unknown_liveness
from everbeat.domain.schedule.inspection import (
    PAUSED_BY_FAILURES,
    RunInfo,
    ScheduleInfo,
    ScheduleState,
    TickInfo,
)
from everbeat.domain.settings.units import shown_moment
from everbeat.domain.task.states import TaskState
from everbeat.errors.wording import amount, nearest, some

TICKS_READ: Final = 100
"""The number of latest ticks that an explanation considers."""
_MOST_GROUPS: Final = 5
_MOST_RUNS: Final = 3
LATE_S: Final = 10.0
"""A tick that is still undecided this many seconds after it was due is late. Supervisors poll at least every 2 s."""


class Scheduling(Struct, frozen=True, kw_only=True):
    """The facts about a schedule. `ticks` are the latest decided ticks, latest first, and `runs` the live runs, oldest first.

    `first_run` is the explanation of the oldest live run. `supervisors` and `workers` count the live ones. `known_tasks` are the names that
    live workers have registered. `zone_is_known` says whether this machine knows the schedule's time zone.
    """

    info: ScheduleInfo
    ticks: tuple[TickInfo, ...] = ()
    runs: tuple[RunInfo, ...] = ()
    first_run: Explanation | None = None
    supervisors: int = 0
    workers: int = 0
    last_beat_at: datetime | None = None
    known_tasks: tuple[str, ...] = ()
    is_standby: bool = False
    zone_is_known: bool = True


class ScheduleExplanation(Struct, frozen=True, kw_only=True):
    """The reasons why a schedule sends no tasks, or when it sends the next one, and why earlier ticks were not sent.

    Reasons about the schedule come first, followed by a reason about its oldest live run. Reasons about earlier ticks come last, the latest
    tick first. Consecutive ticks with the same fate share one reason. `at` is the database's time.
    """

    schedule: str
    state: ScheduleState
    task: str
    at: datetime
    next_at: datetime | None
    reasons: tuple[Reason, ...]


def why_not_sent(facts: Scheduling) -> ScheduleExplanation:
    """Return the explanation of a schedule."""
    info = facts.info
    reasons = [*_halted(info), *_late(facts), *_unread(facts), *_crew(facts)]
    if info.state == "ACTIVE" and not any(each.code in _OBSTACLES for each in reasons):
        reasons.append(_next(info))
    reasons += [*_run(facts), *_ticks(facts)]
    return ScheduleExplanation(
        schedule=info.name,
        state=info.state,
        task=info.task,
        at=info.at,
        next_at=info.next_at,
        reasons=tuple(reasons),
    )


_OBSTACLES: Final = frozenset({ReasonCode.TICKS_LATE, ReasonCode.BAD_ROW})


def _halted(info: ScheduleInfo) -> Iterator[Reason]:
    """Yield the reason why a schedule that has ended, is retired or is paused sends nothing."""
    if info.ended_at is not None:
        most = None if info.rule is None else info.rule.most_runs
        why = (
            f"it has sent its {amount(most, 'run')}"
            if most is not None and info.runs >= most
            else "it has no further ticks"
        )
        yield Reason(code=ReasonCode.SCHEDULE_ENDED, text=f"{why}, so it has ended", since=info.ended_at)
        return
    if info.retired_at is not None:
        is_dropped = info.retired_because == "UNDECLARED"
        why = (
            f"the live workers of app {info.owner} do not declare it"
            if is_dropped
            else f"no live worker of app {info.owner} declares it"
        )
        yield Reason(
            code=ReasonCode.SCHEDULE_RETIRED,
            text=f"{why}, so it is retired until a worker declares it again",
            since=info.retired_at,
            blocked_by=info.owner,
            command=_command("delete", info) if is_dropped else "everbeat worker MODULE:APP",
        )
    if info.paused_at is not None:
        is_automatic = info.paused_by == PAUSED_BY_FAILURES
        by = "everbeat" if is_automatic else f"{info.paused_by}"
        because = "" if info.pause_reason is None else f": {info.pause_reason}"
        yield Reason(
            code=ReasonCode.SCHEDULE_PAUSED,
            text=f"it was paused by {by}{because}. Its ticks are not sent until it is resumed",
            since=info.paused_at,
            until=info.resume_at,
            blocked_by=info.paused_by,
            command=_command("resume", info),
        )


def _late(facts: Scheduling) -> Iterator[Reason]:
    info = facts.info
    if info.next_at is None or info.at - info.next_at < timedelta(seconds=LATE_S):
        return
    if facts.is_standby:
        yield unknown_liveness("whether a live supervisor decides its ticks", last_beat_at=facts.last_beat_at)
        return
    text = f"no supervisor has decided the tick that was due at {shown_moment(info.next_at)}"
    command = "everbeat doctor"
    if not facts.supervisors:
        text, command = f"{text}: no supervisor is alive", "everbeat worker MODULE:APP"
    elif not facts.zone_is_known and info.rule is not None:
        text = (
            f"{text}: this machine does not know the time zone {info.rule.timing.timezone}, and supervisors that do not"
            " know it leave the schedule to others"
        )
    elif info.rule is None:
        text = f"{text}, because its stored rule is unreadable"
    else:
        text = f"{text}, although {amount(facts.supervisors, 'supervisor is', plural='supervisors are')} alive. Their logs give the cause"
    since = info.next_at
    if not facts.supervisors and facts.last_beat_at is not None:
        since = max(since, facts.last_beat_at)
    yield Reason(code=ReasonCode.TICKS_LATE, text=text, since=since, command=command)


def _unread(facts: Scheduling) -> Iterator[Reason]:
    if facts.info.rule is None:
        yield Reason(
            code=ReasonCode.BAD_ROW,
            text="its stored rule is unreadable, so no supervisor can decide its ticks. Store the schedule again, or delete it",
            command=None if facts.info.owner is not None else _command("delete", facts.info),
        )


def _crew(facts: Scheduling) -> Iterator[Reason]:
    """Yield the reason why no live worker can run the task of a schedule that sends tasks."""
    info = facts.info
    if info.state != "ACTIVE" or facts.is_standby:
        return
    if not facts.workers:
        yield no_worker("no live worker runs its tasks", since=facts.last_beat_at, restarting=())
    elif info.task not in facts.known_tasks:
        guess = nearest(info.task, facts.known_tasks)
        hint = "" if guess is None else f"; did you mean {guess!r}?"
        yield Reason(
            code=ReasonCode.NAME_UNKNOWN,
            text=f"no live worker has a function named {info.task}; known: {some(sorted(facts.known_tasks))}{hint}",
            blocked_by=info.task,
            command="everbeat workers",
        )


def _next(info: ScheduleInfo) -> Reason:
    last = info.last_tick
    sent = ""
    if last is not None and last.outcome == "SENT":
        became = "has been pruned" if last.state is None else f"is {last.state}"
        sent = f". Task {last.task_id} of tick {shown_moment(last.at)} {became}"
    failed = last is not None and last.state in (TaskState.FAILED, TaskState.EXPIRED)
    due = "soon" if info.next_at is None else f"at {shown_moment(info.next_at)}"
    return Reason(
        code=ReasonCode.SCHEDULED,
        text=f"its next tick is due {due}{sent}",
        until=info.next_at,
        command=f"everbeat explain {last.task_id}" if last is not None and failed else None,
    )


def _run(facts: Scheduling) -> Iterator[Reason]:
    """Yield what the oldest live run is doing, or what it is waiting for."""
    run = facts.first_run
    if run is None or not run.reasons:
        return
    main = run.reasons[0]
    more = f" ({amount(len(facts.runs) - 1, 'more live run')})" if len(facts.runs) > 1 else ""
    yield Reason(
        code=main.code,
        text=f"its run {run.task_id} is {run.state}{more}: {main.text}",
        since=main.since,
        until=main.until,
        blocked_by=str(run.task_id),
        command=f"everbeat explain {run.task_id}",
    )


def _ticks(facts: Scheduling) -> Iterator[Reason]:
    groups = groupby(facts.ticks, key=lambda tick: (tick.outcome, tick.reason))
    unsent = [tuple(found) for (outcome, _), found in groups if outcome != "SENT"]
    for group in unsent[:_MOST_GROUPS]:
        yield _skipped(group, facts) if group[0].outcome == "SKIPPED" else _missed(group, facts.info)


def _skipped(group: Sequence[TickInfo], facts: Scheduling) -> Reason:
    latest = group[0]
    detail = latest.detail or "another run was live"
    live = [str(run.task_id) for run in facts.runs if run.sent_at <= latest.decided_at]
    blocking = f". Live runs: {some(live, limit=_MOST_RUNS)}" if live else ""
    return Reason(
        code=ReasonCode.TICK_SKIPPED,
        text=f"{_named(group)} skipped, because {detail}{blocking}",
        since=group[-1].at,
        until=latest.last_at or latest.at,
        blocked_by=live[0] if live else None,
        command=f"everbeat explain {live[0]}" if live else None,
    )


def _missed(group: Sequence[TickInfo], info: ScheduleInfo) -> Reason:
    latest, first = group[0], group[-1]
    unseen = f"no supervisor decided {'it' if _number(group) == 1 else 'them'} from {shown_moment(first.at)} to {shown_moment(latest.decided_at)}"
    match latest.reason:
        case "PAUSED":
            why = "the schedule was paused"
        case "RETIRED":
            why = "the schedule was retired"
        case "LATE":
            why = f'{unseen}, and missed is "skip"'
        case "CATCHUP_WINDOW":
            why = f"{unseen}, which is longer than the catchup_window"
        case "TOO_MANY":
            why = f"{unseen}, and more ticks were missed than the option most allows"
        case _:
            why = f"{unseen}, and only the latest of several missed ticks is sent"
    is_unseen = latest.reason not in ("PAUSED", "RETIRED")
    return Reason(
        code=ReasonCode.TICK_MISSED,
        text=f"{_named(group)} missed, because {why}",
        since=first.at,
        until=latest.decided_at if is_unseen else latest.last_at or latest.at,
        command=_command("ticks", info),
    )


def _number(group: Sequence[TickInfo]) -> int | None:
    """Return the number of ticks in a group of rows, or None if a row stands for ticks that were not counted."""
    counts = [each.missed if each.last_at is not None else 1 for each in group]
    return None if None in counts else sum(each for each in counts if each is not None)


def _named(group: Sequence[TickInfo]) -> str:
    """Return the subject and the verb of a sentence about a group of ticks."""
    first, last = group[-1].at, group[0].last_at or group[0].at
    number = _number(group)
    if number == 1:
        return f"the tick of {shown_moment(first)} was"
    counted = "the ticks" if number is None else f"{number:,} ticks"
    return f"{counted} from {shown_moment(first)} to {shown_moment(last)} were"


def _command(name: str, info: ScheduleInfo) -> str:
    return f"everbeat schedules {name} {shlex.quote(info.name)}"
