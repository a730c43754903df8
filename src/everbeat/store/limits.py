"""Statements that declare, set and inspect limits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.doctor.limits import CostlyTask, LimitProblems, SetLimit
from everbeat.domain.explain.limits import GateHolder, WaitingGate
from everbeat.domain.limit.inspection import LimitInfo, LimitKey, LimitNumbers, Permit
from everbeat.domain.limit.model import LimitDefinition
from everbeat.domain.limit.options import spelled_rate
from everbeat.domain.task.states import TaskState
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_LISTED: Final = 1_000
MOST_LINES: Final = 100_000
"""Of how many keys the waiting tasks are counted."""
"""The largest number of keys in use, and of holders, that is listed of a limit."""
_MOST_PROBLEMS: Final = 100
_GATE_COLUMNS: Final = (
    "gate", "cost", "is_declared", "concurrency", "starts", "period_s", "set_by", "set_at", "reason", "until", "is_fair", "most", "held",
    "closed_until", "closed_by", "rate_opens_at", "before", "keys_before", "holders", "holder_count",
)  # fmt: skip


class LimitChange(Struct, frozen=True):
    """A limit that the declaration of live workers changed or deleted. TAKEN: the declaration of `owner` does not count, but that of another."""

    name: str
    verdict: Literal["STORED", "DELETED", "TAKEN"]
    owner: str | None = None


class _Declared(Struct, frozen=True):
    concurrency: int | None = None
    starts: int | None = None
    period_s: float | None = None
    burst: int | None = None
    key: str | None = None


def definitions_json(limits: Sequence[LimitDefinition]) -> str:
    """Return limits as the JSON text of a statement parameter."""
    return msgspec.json.encode(limits).decode()


def declare_limits(limits: Sequence[LimitDefinition]) -> Statement[None]:
    """Store the limits that do not exist yet, for a program that sends tasks of them."""
    return Statement("limit/declare_limits", {"limits": definitions_json(limits)}, rows.nothing)


def apply_declared(*, channel: str) -> Statement[list[LimitChange]]:
    """Store the limits that live workers declare, and delete unused ones that they no longer declare. Return the changes,
    and the names that several owners declare.
    """

    def read(found: Sequence[Row]) -> list[LimitChange]:
        return [LimitChange(*row) for row in found if row[0] is not None]

    return Statement("limit/apply_declared", {"channel": channel}, read)


def set_limit(
    name: str,
    *,
    concurrency: int | None,
    rate: tuple[int, float] | None,
    burst: int | None,
    sets_concurrency: bool,
    sets_rate: bool,
    sets_reason: bool,
    sets_until: bool,
    set_by: str,
    reason: str | None,
    until: datetime | None,
    channel: str,
) -> Statement[bool]:
    """Replace numbers of a limit. Return False if the limit does not exist. Other values stay as they are."""
    starts, period_s = (None, None) if rate is None else rate
    parameters = {
        "name": name, "concurrency": concurrency, "starts": starts, "period_s": period_s, "burst": burst, "sets_concurrency": sets_concurrency,
        "sets_rate": sets_rate, "sets_reason": sets_reason, "sets_until": sets_until, "set_by": set_by, "reason": reason, "until": until,
        "channel": channel,
    }  # fmt: skip
    return Statement("limit/set_limit", parameters, rows.any_row)


def clear_limit(name: str, *, channel: str) -> Statement[bool]:
    """Restore the declared numbers of a limit. Return False if the limit does not exist."""
    return Statement("limit/clear_limit", {"name": name, "channel": channel}, rows.any_row)


def list_limits(name: str | None = None, *, most_lines: int = MOST_LINES) -> Statement[list[LimitInfo]]:
    """Return the limits in the order of their names, or only the limit with this name. At most `most_lines` keys with waiting tasks are read."""
    values = {"name": name, "most_lines": most_lines}
    return Statement("limit/list_limits", values, lambda found: [_info(row) for row in found])


def _info(row: Row) -> LimitInfo:
    name, concurrency, starts, period_s, burst, sliding, fair, weights, when_full, declared, *others = row
    declared_by, declared_at, set_by, set_at, reason, until, held, waiting, keys, closed_until, at_least = (
        others
    )
    code = None if declared is None else _declared(declared)
    return LimitInfo(
        name=name, numbers=_numbers(concurrency, starts, period_s, burst),
        declared=None if code is None else _numbers(code.concurrency, code.starts, code.period_s, code.burst),
        declared_by=declared_by, declared_at=declared_at, key=None if code is None else code.key,
        window="sliding" if sliding else "smooth", fairness="round_robin" if fair else "fifo", weights=rows.mapping(weights),
        when_full=when_full, set_by=set_by, set_at=set_at, reason=reason, until=until, held=held, waiting=waiting, keys=keys,
        closed_until=closed_until, at_least=at_least,
    )  # fmt: skip


def _declared(text: str) -> _Declared | None:
    try:
        return msgspec.json.decode(text, type=_Declared)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None  # the row was edited by hand


def _numbers(
    concurrency: int | None, starts: int | None, period_s: float | None, burst: int | None
) -> LimitNumbers:
    rate = None if starts is None or period_s is None else spelled_rate(starts, period_s)
    return LimitNumbers(concurrency=concurrency, rate=rate, burst=burst or 1)


def list_gates(
    names: Sequence[str], *, most_lines: int = MOST_LINES, most_listed: int = MOST_LISTED
) -> Statement[dict[str, list[LimitKey]]]:
    """Return up to `most_listed` keys in use of each of these limits, those with most waiting tasks first. See `list_limits`."""

    def read(found: Sequence[Row]) -> dict[str, list[LimitKey]]:
        listed: dict[str, list[LimitKey]] = {}
        for name, gate, held, waiting, closed_until, opens_at in found:
            key = LimitKey(
                key=_key(gate), held=held, waiting=waiting, closed_until=closed_until, opens_at=opens_at
            )
            listed.setdefault(name, []).append(key)
        return listed

    parameters = {"names": list(names), "limit": most_listed, "most_lines": most_lines}
    return Statement("limit/list_gates", parameters, read)


def list_holders(
    names: Sequence[str], *, most_listed: int = MOST_LISTED
) -> Statement[dict[str, list[Permit]]]:
    """Return up to `most_listed` tasks that hold permits of each of these limits, the longest holder first."""

    def read(found: Sequence[Row]) -> dict[str, list[Permit]]:
        listed: dict[str, list[Permit]] = {}
        for name, *row in found:
            listed.setdefault(name, []).append(_holder(row))
        return listed

    return Statement("limit/list_holders", {"names": list(names), "limit": most_listed}, read)


def _holder(row: Sequence[Any]) -> Permit:
    task_id, name, gate, cost, state, claimed_at, started_at, worker_id, hostname, pid, last_beat_at = row
    return Permit(
        task_id=task_id, name=name, key=_key(gate), cost=cost, state=TaskState(state), claimed_at=claimed_at, started_at=started_at,
        worker_id=worker_id, hostname=hostname, pid=pid, last_beat_at=last_beat_at,
    )  # fmt: skip


def _key(gate: str) -> str | None:
    _, slash, key = gate.partition("/")
    return key if slash else None


def read_waiting_gates(task_id: UUID) -> Statement[list[WaitingGate]]:
    """Return the gates that a PENDING task must pass, in the task's order. A task without limits has none."""
    return Statement(
        "inspect/read_waiting_gates", {"id": task_id}, lambda found: [_waiting_gate(row) for row in found]
    )


def _waiting_gate(row: Row) -> WaitingGate:
    fields = dict(zip(_GATE_COLUMNS, row, strict=True))
    fields["is_fair"] = bool(fields["is_fair"])
    fields["holders"] = msgspec.json.decode(fields["holders"], type=tuple[GateHolder, ...])
    return WaitingGate(**fields)


def find_problems(*, set_ms: int) -> Statement[LimitProblems]:
    """Return the problems of limits for the doctor. A limit that was set without an end counts after `set_ms` milliseconds."""

    def read(found: Sequence[Row]) -> LimitProblems:
        return LimitProblems(
            tuple(row[1] for row in found if row[0] == "undeclared"),
            tuple(SetLimit(row[1], row[2], row[3]) for row in found if row[0] == "set"),
            tuple(CostlyTask(row[1], row[2], row[3], tuple(row[4])) for row in found if row[0] == "cost"),
            next((row[3] for row in found if row[0] == "changes"), 0),
        )

    return Statement(
        "limit/find_problems", {"set_ms": set_ms, "limit": _MOST_PROBLEMS, "most_lines": MOST_LINES}, read
    )


def oldest_change() -> Statement[int | None]:
    """Return the transaction of the oldest change that is noted but not applied, or None if there is none."""
    return Statement("limit/read_oldest_change", {}, lambda found: found[0][0])


def known_limits() -> Statement[list[Any]]:
    """Return the names of limits, for the message about an unknown one."""
    return Statement("limit/list_names", {}, rows.first_column)
