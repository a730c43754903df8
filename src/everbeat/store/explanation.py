"""Statements that find out why a task is not running, and a workflow does not move: what a PENDING task waits for, who holds a CLAIMED or
RUNNING one, who lives to act on what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec

from everbeat.domain.explanation import FailingStart, Holding, Waiting
from everbeat.domain.locks import LONG_WAIT_MS, LockHolder
from everbeat.domain.needs import read_registered
from everbeat.domain.pauses import Pause
from everbeat.domain.read_only import ReadOnly
from everbeat.domain.states import TaskState
from everbeat.domain.workflow_explanation import Movement
from everbeat.store.statement import Row, Statement

_LEASE_COLUMNS = 14


def waiting(task_id: UUID, *, stale_ms: int, unfit: Sequence[str] = ()) -> Statement[Waiting | None]:
    """What the task waits for; None when there is no such task. A worker without a beat for `stale_ms` does not live.

    `unfit`: the ids of workers that cannot run the task with its arguments.
    """
    parameters = {"id": task_id, "stale_ms": stale_ms, "unfit": list(unfit)}
    return Statement("inspect/waiting", parameters, _waiting)


def holding(task_id: UUID, *, stale_ms: int) -> Statement[Holding | None]:
    """The lease of the task with its holder; None when nobody holds it."""
    return Statement("inspect/holding", {"id": task_id, "stale_ms": stale_ms}, _holding)


def lock_holders(schema: str) -> Statement[list[LockHolder]]:
    """The sessions for whose locks others have waited long, at most five; the longest wait first."""
    parameters = {"schema": schema, "older_than_ms": LONG_WAIT_MS}
    return Statement("inspect/lock_holders", parameters, lambda found: [LockHolder(*row) for row in found])


def read_only() -> Statement[ReadOnly | None]:
    """Where it was set that transactions are read-only by default; None where they are not, and on a standby."""
    return Statement("inspect/read_only", {}, lambda found: ReadOnly(*found[0]) if found else None)


def failing_starts(*, stale_ms: int) -> Statement[list[FailingStart]]:
    """The live supervisors that cannot start a worker process, at most 100; one without a beat for `stale_ms` does not live."""
    return Statement(
        "inspect/failing_starts", {"stale_ms": stale_ms}, lambda found: [FailingStart(*row) for row in found]
    )


def known_names(*, stale_ms: int) -> Statement[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The names of tasks, and of queues, that live workers told."""

    def read(found: Sequence[Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        tasks = tuple(row[1] for row in found if row[0] == "task")
        return tasks, tuple(row[1] for row in found if row[0] == "queue")

    return Statement("inspect/known_names", {"stale_ms": stale_ms}, read)


def movement(workflow_id: UUID, *, stale_ms: int) -> Statement[Movement]:
    """Whether anybody moves the workflow on. A worker without a beat for `stale_ms` does not live."""
    parameters = {"id": workflow_id, "stale_ms": stale_ms}
    return Statement("inspect/movement", parameters, lambda found: Movement(*found[0]))


def _waiting(found: Sequence[Row]) -> Waiting | None:
    if not found:
        return None
    alive, serving, knowing, slots, running, last_beat_at, ahead, before, *rest = found[0]
    (
        first_id,
        first_state,
        first_name,
        first_due_at,
        alone,
        lagging,
        *pauses,
        is_standby,
        lost,
        quiet,
        quiet_since,
        fitting,
        told,
    ) = rest
    return Waiting(
        alive=alive,
        serving=serving,
        knowing=knowing,
        slots=slots,
        running=running,
        last_beat_at=last_beat_at,
        ahead=ahead,
        before=before,
        first_id=first_id,
        first_state=None if first_state is None else TaskState(first_state),
        first_name=first_name,
        first_due_at=first_due_at,
        alone=alone,
        lagging=lagging,
        task_pause=_pause(pauses[:6]),
        queue_pause=_pause(pauses[6:]),
        is_standby=is_standby,
        lost=lost,
        quiet=quiet,
        quiet_since=quiet_since,
        fitting=fitting,
        registered=read_registered(told),
    )


def _pause(columns: Sequence[Any]) -> Pause | None:
    return None if columns[0] is None else Pause(*columns)


def _holding(found: Sequence[Row]) -> Holding | None:
    if not found:
        return None
    facts, (flags, neighbours, *rest) = found[0][:_LEASE_COLUMNS], found[0][_LEASE_COLUMNS:]
    return Holding(*[*facts, _flags(flags), tuple(neighbours), *rest])


def _flags(text: str | None) -> dict[str, Any]:
    """The flags; none where the column is damaged, as recovery has it."""
    try:
        return {} if text is None else msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}
