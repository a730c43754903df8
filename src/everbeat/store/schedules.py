"""Statements that store, change and inspect schedules, and that decide their ticks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from everbeat.domain.doctor.schedules import FailingSchedule, OverdueSchedule, ScheduleProblems
from everbeat.domain.schedule.inspection import (
    PAUSED_BY_FAILURES,
    RunInfo,
    ScheduleInfo,
    ScheduleState,
    TickInfo,
)
from everbeat.domain.schedule.model import (
    DecidedTick,
    Declared,
    Definition,
    DueSchedule,
    Rule,
    TickDecision,
    Timing,
)
from everbeat.domain.task.states import TaskState
from everbeat.store import rows
from everbeat.store.limits import definitions_json
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_LISTED: Final = 10_000


class BrokenSchedule(Struct, frozen=True):
    """A due schedule whose stored rule is unreadable, and the problem. It is read again in each pass, until it is skipped or repaired."""

    name: str
    problem: str


class DueSchedules(Struct, frozen=True):
    """A page of due schedules, the one that is due for the longest time first.

    `wait_s` is the number of seconds until the next schedule that is not due yet (None: there is none). `is_full`: more may be due.
    """

    due: tuple[DueSchedule, ...]
    wait_s: float | None
    broken: tuple[BrokenSchedule, ...] = ()
    is_full: bool = False


class DecidedTicks(Struct, frozen=True):
    """The schedules that a pass changed, and the number of tasks that it sent.

    A schedule that another process has changed since it was read is left out. `cancelled` are the runs that were cancelled, or asked to stop,
    because a later tick replaces them, and their children.
    """

    changed: tuple[str, ...]
    sent: int
    cancelled: tuple[UUID, ...] = ()


class StoredSchedule(Struct, frozen=True):
    """The reply to `put_schedule`. "declared": nothing was changed, because the code of the app `owner` declares the schedule."""

    verdict: Literal["created", "changed", "unchanged", "declared"]
    owner: str | None = None


class StoredCall(Struct, frozen=True, kw_only=True):
    """The options of a schedule's call that `ScheduleInfo` does not contain. `policy` and `flags` are JSON text."""

    policy: str | None
    flags: str | None
    gates: tuple[str, ...]
    costs: tuple[int, ...] | None
    labels: Mapping[str, str]


class ScheduleChange(Struct, frozen=True):
    """The reply to a change of a schedule. `owner` is the app whose code declares the schedule (None: it was made at run time).

    "unchanged": the schedule was already in this state. "declared": only the code of the app `owner` can change this.
    """

    verdict: Literal["changed", "unchanged", "declared"]
    owner: str | None = None


class SentRun(Struct, frozen=True):
    """The reply to `run_schedule`: the id of the task, or of the live task that has its key.

    It is None if that live task has just ended. In that case, run the schedule again.
    """

    task_id: UUID | None


DeclaredVerdict: TypeAlias = Literal["ADDED", "CHANGED", "RETURNED", "RETIRED", "TAKEN"]


class DeclaredChange(Struct, frozen=True):
    """The change of a declared schedule. TAKEN: it was not stored, because another app declares the name or it was made at run time."""

    owner: str
    name: str
    verdict: DeclaredVerdict
    because: str | None = None


_TIMING: Final = msgspec.json.Decoder(Timing)
_UNREADABLE: Final = (msgspec.MsgspecError, UnicodeError, RecursionError)
_RULE_COLUMNS: Final = (
    "missed", "most", "catchup_ms", "overlap", "jitter_ms", "starts_at", "ends_at", "most_runs", "pause_after_failures", "expires_ms",
)  # fmt: skip
_INFO_COLUMNS: Final = (
    "name", "state", "task", "arguments", "queue", "priority", "key", "serial", "note", "owner", "created_at", "changed_at", "decided_to",
    "next_at", "runs", "paused_at", "paused_by", "pause_reason", "resume_at", "retired_at", "retired_because", "ended_at", "held_until",
    "held_because", "at",
)  # fmt: skip
_TICK_COLUMNS: Final = (
    "schedule", "at", "outcome", "task_id", "reason", "detail", "last_at", "missed", "decided_at", "decided_by", "state",
)  # fmt: skip
_RUN_COLUMNS: Final = ("task_id", "state", "tick", "sent_at", "started_at", "attempt", "worker_id")


def list_due(
    *, limit: int, unknown_zones: Sequence[str] = (), skipped: Sequence[str] = ()
) -> Statement[DueSchedules]:
    """Return a page of due schedules, except those in a zone that the caller does not know and those that it skips by name."""
    parameters = {"limit": limit, "unknown_zones": list(unknown_zones), "skipped": list(skipped)}

    def read(found: Sequence[Row]) -> DueSchedules:
        due: list[DueSchedule] = []
        broken: list[BrokenSchedule] = []
        for row in found:
            if row[2] is None:  # no schedule is due, and the only row holds the wait
                continue
            try:
                due.append(_due(row))
            except _UNREADABLE as problem:
                broken.append(BrokenSchedule(row[2], str(problem)))
        return DueSchedules(tuple(due), found[0][0], tuple(broken), len(due) + len(broken) == limit)

    return Statement("schedule/list_due", parameters, read)


def _due(row: Row) -> DueSchedule:
    (
        _,
        now,
        name,
        timing,
        missed,
        most,
        catchup_ms,
        overlap,
        jitter_ms,
        starts_at,
        ends_at,
        most_runs,
        *others,
    ) = row
    (
        after_failures,
        expires_ms,
        decided_to,
        runs,
        is_paused,
        resume_at,
        held_until,
        held_because,
        changed_at,
        *live,
    ) = others
    rule = _rule(
        timing, (missed, most, catchup_ms, overlap, jitter_ms, starts_at, ends_at, most_runs, after_failures, expires_ms)
    )  # fmt: skip
    return DueSchedule(
        name=name, rule=rule, decided_to=decided_to, now=now, runs=runs, live=live[0], waiting=live[1], failures=live[2],
        is_paused=is_paused, resume_at=resume_at, held_until=held_until, held_because=held_because, changed_at=changed_at,
    )  # fmt: skip


def _rule(timing: str, columns: Sequence[Any]) -> Rule:
    return Rule(timing=_timing(timing), **dict(zip(_RULE_COLUMNS, columns, strict=True)))


def _timing(text: str) -> Timing:
    """Return a stored timing. Raises ValidationError if it has none or several kinds of ticks: it would end its schedule silently."""
    found = _TIMING.decode(text)
    if (bool(found.cron), found.every_ms is not None, bool(found.at)).count(True) != 1:
        raise msgspec.ValidationError(f"{text} does not have exactly one of cron, every_ms and at")
    return found


def decide_ticks(
    decisions: Sequence[TickDecision], *, channel: str, decided_by: str | None = None
) -> Statement[DecidedTicks]:
    """Store what happens to ticks and send their tasks, for each schedule that is still as it was read.

    If the statement is repeated after a lost reply, it changes and returns nothing.
    """
    parameters = {
        "decisions": msgspec.json.encode(decisions).decode(), "channel": channel, "decided_by": decided_by, "paused_by": PAUSED_BY_FAILURES,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> DecidedTicks:
        return DecidedTicks(
            tuple(sorted(row[0] for row in found if row[0] is not None)),
            next(row[2] for row in found if row[2] is not None),
            tuple(row[1] for row in found if row[1] is not None),
        )

    return Statement("schedule/decide_ticks", parameters, read)


def _fields(definition: Definition) -> dict[str, Any]:
    """Return a definition as the fields of `fragment/schedule_fields`."""
    call, rule = definition.call, definition.rule
    fields = structs.asdict(call) | {name: getattr(rule, name) for name in _RULE_COLUMNS}
    fields |= {
        name: Raw(text.encode()) for name in ("args", "policy", "flags") if (text := fields[name]) is not None
    }
    fields |= {
        "name": definition.name, "note": definition.note, "timing": Raw(msgspec.json.encode(rule.timing)), "timezone": rule.timing.timezone,
    }  # fmt: skip
    fields = {name: value for name, value in fields.items() if value is not UNSET}
    return fields | {"declaration": hashlib.sha256(msgspec.json.encode(definition)).hexdigest()}


def put_schedule(definition: Definition) -> Statement[StoredSchedule]:
    """Store a schedule that is made at run time, or replace one."""
    return Statement(
        "schedule/put_schedule",
        {"schedule": msgspec.json.encode(_fields(definition)).decode()},
        rows.only(StoredSchedule),
    )


def declared_parameters(declared: Declared | None) -> dict[str, Any]:
    """Return the statement parameters for the schedules and limits that a worker's code declares."""
    if declared is None:
        return {"schedule_owner": None, "schedule_version": None, "schedules": None, "limits": None}
    schedules = msgspec.json.encode([_fields(each) for each in declared.schedules]).decode()
    limits = definitions_json(declared.limits) if declared.limits else None
    return {
        "schedule_owner": declared.owner,
        "schedule_version": declared.version,
        "schedules": schedules,
        "limits": limits,
    }


def list_schedules(
    *,
    state: ScheduleState | None = None,
    task: str | None = None,
    owner: str | None = None,
    prefix: str | None = None,
    after: str | None = None,
    limit: int = 1_000,
) -> Statement[list[ScheduleInfo]]:
    """List schedules in the order of their names. A filter of None matches all schedules. `after` is the last name of the previous page."""
    parameters = {
        "state": state, "task": task, "owner": owner, "prefix": prefix, "after": after, "limit": limit,
    }  # fmt: skip
    return Statement("schedule/list_schedules", parameters, lambda found: [_info(row) for row in found])


def read_schedule(name: str) -> Statement[ScheduleInfo | None]:
    """Return a schedule, or None if it does not exist."""
    return Statement(
        "schedule/read_schedule", {"name": name}, lambda found: _info(found[0]) if found else None
    )


def read_call(name: str) -> Statement[StoredCall | None]:
    """Return what else is stored of the call of a schedule, or None if the schedule does not exist."""

    def read(found: Sequence[Row]) -> StoredCall | None:
        if not found:
            return None
        policy, flags, gates, costs, labels = found[0]
        return StoredCall(
            policy=policy,
            flags=flags,
            gates=tuple(gates or ()),
            costs=None if costs is None else tuple(costs),
            labels=labels or {},
        )

    return Statement("schedule/read_call", {"name": name}, read)


def _info(row: Row) -> ScheduleInfo:
    count = len(_INFO_COLUMNS)
    fields = dict(zip(_INFO_COLUMNS, row[:count], strict=True))
    timing, tick = row[count], row[count + 1 + len(_RULE_COLUMNS) :]
    try:
        rule = _rule(timing, row[count + 1 : count + 1 + len(_RULE_COLUMNS)])
    except _UNREADABLE:
        rule = None
    fields["arguments"] = rows.mapping(fields["arguments"])
    return ScheduleInfo(**fields, rule=rule, last_tick=None if tick[0] is None else _tick(tick))


def _tick(row: Row) -> TickInfo:
    fields = dict(zip(_TICK_COLUMNS, row, strict=True))
    return TickInfo(**fields | {"state": rows.state(fields["state"])})


def known_schedules(*, limit: int = MOST_LISTED) -> Statement[list[str]]:
    """Return the names of schedules, for the message about an unknown one."""
    return Statement("schedule/list_names", {"limit": limit}, rows.first_column)


def list_ticks(name: str, *, limit: int, before: datetime | None = None) -> Statement[list[TickInfo]]:
    """Return the decided ticks of a schedule, latest first. `before` is the last tick of the previous page."""
    parameters = {"name": name, "limit": limit, "before": before}
    return Statement("schedule/list_ticks", parameters, lambda found: [_tick(row) for row in found])


def list_latest_ticks(names: Sequence[str], *, limit: int) -> Statement[dict[str, list[TickInfo]]]:
    """Return the decided ticks of several schedules, up to `limit` of each, latest first. They do not contain the states of their tasks."""

    def read(found: Sequence[Row]) -> dict[str, list[TickInfo]]:
        ticks: dict[str, list[TickInfo]] = {name: [] for name in names}
        for row in found:
            ticks[row[0]].append(_tick(row))
        return ticks

    return Statement("schedule/list_latest_ticks", {"names": [*names], "limit": limit}, read)


def list_earlier_runs(befores: Mapping[str, datetime]) -> Statement[dict[str, TickInfo]]:
    """Return the tick of the latest run of each schedule before a tick. `befores` are these ticks by the names of the schedules."""
    parameters = {"names": [*befores], "befores": [*befores.values()]}
    return Statement(
        "schedule/list_earlier_runs", parameters, lambda found: {row[0]: _tick(row) for row in found}
    )


def list_sent_ticks(name: str, *, since: datetime, until: datetime) -> Statement[frozenset[datetime]]:
    """Return the ticks in [since, until) for which a task was sent."""
    parameters = {"name": name, "since": since, "until": until}
    return Statement(
        "schedule/list_sent_ticks", parameters, lambda found: frozenset(rows.first_column(found))
    )


def list_live_runs(name: str, *, limit: int = 100) -> Statement[list[RunInfo]]:
    """Return the runs of a schedule that have not ended, oldest first."""

    def read(found: Sequence[Row]) -> list[RunInfo]:
        fields = [dict(zip(_RUN_COLUMNS, row, strict=True)) for row in found]
        return [RunInfo(**each | {"state": TaskState(each["state"])}) for each in fields]

    return Statement("schedule/list_live_runs", {"name": name, "limit": limit}, read)


def pause_schedule(
    name: str, *, paused_by: str, reason: str | None = None, resume_at: datetime | None = None
) -> Statement[ScheduleChange | None]:
    """Pause a schedule until `resume_at` (None: until it is resumed). Return None if it does not exist. An earlier pause stays as it is."""
    parameters = {"name": name, "paused_by": paused_by, "reason": reason, "resume_at": resume_at}
    return Statement("schedule/pause_schedule", parameters, rows.first(ScheduleChange))


def resume_schedule(name: str) -> Statement[ScheduleChange | None]:
    """Resume a schedule. Its ticks until now are not sent. Return None if it does not exist."""
    return Statement("schedule/resume_schedule", {"name": name}, rows.first(ScheduleChange))


def delete_schedule(name: str) -> Statement[ScheduleChange | None]:
    """Delete a schedule that was made at run time, or that is retired. Return None if it does not exist. Its ticks stay until retention."""
    return Statement("schedule/delete_schedule", {"name": name}, rows.first(ScheduleChange))


def run_schedule(
    name: str, *, task_id: UUID, channel: str, context: str | None = None
) -> Statement[SentRun | None]:
    """Send a task as a tick of the schedule does. Return None if the schedule does not exist. The task's id makes the call idempotent.

    `context` is the carrier of the send, if it is traced.
    """
    return Statement(
        "schedule/run_schedule",
        {"name": name, "id": task_id, "channel": channel, "context": context},
        lambda found: SentRun(found[0][0]) if found else None,
    )


def backfill_ticks(
    name: str, ticks: Sequence[DecidedTick], *, channel: str, decided_by: str | None = None
) -> Statement[int | None]:
    """Send the given ticks, except those that were sent before. Return how many tasks were sent (None: the schedule does not exist)."""
    parameters = {
        "name": name, "ticks": msgspec.json.encode(ticks).decode(), "channel": channel, "decided_by": decided_by,
    }  # fmt: skip
    return Statement("schedule/backfill_ticks", parameters, lambda found: int(found[0][0]) if found else None)


def apply_declared(*, after_ms: int) -> Statement[list[DeclaredChange]]:
    """Store the schedules that live workers declare, and retire those that they do not. Return the changes.

    Of each owner's versions, the one that became live last counts. If an owner has no live worker for `after_ms`, its schedules are retired.
    """
    return Statement("schedule/apply_declared", {"after_ms": after_ms}, rows.each(DeclaredChange))


def find_problems(*, overdue_ms: int, limit: int = 100) -> Statement[ScheduleProblems]:
    """Return the schedules that are overdue by more than `overdue_ms`, failing schedules, and the zones in use, for the doctor."""
    parameters = {"overdue_ms": overdue_ms, "paused_by": PAUSED_BY_FAILURES, "limit": limit}

    def read(found: Sequence[Row]) -> ScheduleProblems:
        return ScheduleProblems(
            tuple(OverdueSchedule(row[1], row[3], row[2], row[5], _problem(row[4])) for row in found if row[0] == "overdue"),
            tuple(FailingSchedule(row[1], row[2], row[4]) for row in found if row[0] == "failing"),
            tuple(sorted(row[3] for row in found if row[0] == "zone")),
        )  # fmt: skip

    return Statement("schedule/find_problems", parameters, read)


def _problem(timing: str) -> str | None:
    try:
        _timing(timing)
    except _UNREADABLE as problem:
        return str(problem)
    return None
