"""The reasons why limits keep a PENDING task from starting."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.explain.reasons import Reason, ReasonCode, SilenceRules, counted
from everbeat.domain.limit.model import limit_of
from everbeat.domain.settings.units import shown_moment, spelled_duration
from everbeat.domain.task.states import TaskState
from everbeat.errors.wording import amount

_MOST_HOLDERS: Final = 3


class GateHolder(Struct, frozen=True, kw_only=True):
    """A task that holds permits of a gate, and the last heartbeat of its worker."""

    task_id: UUID
    state: TaskState
    claimed_at: datetime
    worker_id: str | None
    last_beat_at: datetime | None


class WaitingGate(Struct, frozen=True, kw_only=True):
    """A gate that a PENDING task must pass, with the numbers in force.

    `held` permits are in use by `holder_count` tasks. The `holders` are those with the oldest leases. `closed_until`: a task (`closed_by`)
    closed the gate until then.
    `rate_opens_at`: the rate permits the next start then. `before` earlier tasks wait in the task's line, and `keys_before` keys have an
    earlier turn. `most` is the largest number of permits that the limit can ever give to one task.
    """

    gate: str
    cost: int
    is_declared: bool
    concurrency: int | None
    starts: int | None
    period_s: float | None
    set_by: str | None
    set_at: datetime | None
    reason: str | None
    until: datetime | None
    is_fair: bool
    most: int | None
    held: int
    closed_until: datetime | None
    closed_by: UUID | None
    rate_opens_at: datetime | None
    before: int
    keys_before: int
    holders: tuple[GateHolder, ...]
    holder_count: int


def why_limited(gates: Sequence[WaitingGate], *, rules: SilenceRules) -> Iterator[Reason]:
    """Yield the reasons why the limits of a task keep it from starting."""
    blocked = False
    for gate in gates:
        if (reason := _reason(gate, rules)) is not None:
            blocked = True
            yield reason
    fair = next((each for each in gates if each.is_fair and each.keys_before), None)
    if fair is not None:
        then = " when it has room" if blocked else ""
        yield Reason(
            code=ReasonCode.FAIRNESS_TURN,
            text=f"limit {limit_of(fair.gate)!r} takes turns among its keys: {counted(fair.keys_before, 'key')} before this one{then}",
            blocked_by=fair.gate,
            command=_show(fair.gate),
        )


def _reason(gate: WaitingGate, rules: SilenceRules) -> Reason | None:
    if gate.concurrency == 0:
        return _paused(gate)
    if gate.most is not None and gate.cost > gate.most:
        return Reason(
            code=ReasonCode.LIMIT_REACHED,
            text=f"the task needs {gate.cost:,} permits of {_named(gate)}, which never has more than {gate.most:,}, so it never starts",
            blocked_by=gate.gate,
            command=_show(gate.gate),
        )
    if gate.closed_until is not None:
        by = "a task" if gate.closed_by is None else f"task {gate.closed_by}"
        return Reason(
            code=ReasonCode.RATE_LIMITED,
            text=f"{by} closed {_named(gate)} with RateLimited, until {shown_moment(gate.closed_until)}",
            until=gate.closed_until,
            blocked_by=gate.gate,
            command=_show(gate.gate),
        )
    if gate.concurrency is not None and gate.held + gate.cost > gate.concurrency:
        return _reached(gate, gate.concurrency, rules)
    if gate.rate_opens_at is not None and gate.starts is not None and gate.period_s is not None:
        rate = f"{amount(gate.starts, 'start')} in {spelled_duration(gate.period_s)}"
        return Reason(
            code=ReasonCode.RATE_REACHED,
            text=f"{_named(gate)} permits {rate}: the next start is at {shown_moment(gate.rate_opens_at)}{_earlier(gate)}",
            until=gate.rate_opens_at,
            blocked_by=gate.gate,
            command=_show(gate.gate),
        )
    return None


def _paused(gate: WaitingGate) -> Reason:
    by = "" if gate.set_by is None else f" by {gate.set_by}"
    why = "" if gate.reason is None else f": {gate.reason}"
    return Reason(
        code=ReasonCode.LIMIT_PAUSED,
        text=f"the concurrency of limit {limit_of(gate.gate)!r} was set to 0{by}{why}",
        since=gate.set_at,
        until=gate.until,
        blocked_by=gate.gate,
        command=f"everbeat limits clear {shlex.quote(limit_of(gate.gate))}",
    )


def _reached(gate: WaitingGate, concurrency: int, rules: SilenceRules) -> Reason:
    needs = "" if gate.cost == 1 else f", and the task needs {gate.cost:,}"
    shown = [_holder(each, rules) for each in gate.holders[:_MOST_HOLDERS]]
    held = f"; held by {', '.join(shown)}" if shown else ""
    others = gate.holder_count - len(shown)
    rest = f" and {amount(others, 'other task')}" if shown and others > 0 else ""
    return Reason(
        code=ReasonCode.LIMIT_REACHED,
        text=f"{_named(gate)} has {amount(concurrency, 'permit')}, and {gate.held:,} are in use{needs}{held}{rest}{_earlier(gate)}",
        since=gate.holders[0].claimed_at if gate.holders else None,
        blocked_by=str(gate.holders[0].task_id) if gate.holders else gate.gate,
        command=_show(gate.gate),
    )


def _holder(each: GateHolder, rules: SilenceRules) -> str:
    """Return the task and its worker. If the worker is silent, say until when it can keep the permit."""
    if each.worker_id is None or each.last_beat_at is None:
        return f"task {each.task_id}"
    silent_ms = rules.running_ms if each.state is TaskState.RUNNING else rules.claimed_ms
    beat = f"beat {shown_moment(each.last_beat_at)}"
    if silent_ms is None:
        kept = "a silent holder keeps it until an operator releases it"
    else:
        kept = (
            f"if silent, keeps it until {shown_moment(each.last_beat_at + timedelta(milliseconds=silent_ms))}"
        )
    return f"task {each.task_id} on worker {each.worker_id} ({beat}; {kept})"


def _earlier(gate: WaitingGate) -> str:
    return f"; {counted(gate.before, 'earlier task')} with the same limits" if gate.before else ""


def _named(gate: WaitingGate) -> str:
    limit, slash, key = gate.gate.partition("/")
    return f"key {key!r} of limit {limit!r}" if slash else f"limit {limit!r}"


def _show(gate: str) -> str:
    return f"everbeat limits show {shlex.quote(limit_of(gate))}"
