"""Statements that only look: tasks with their history, workers, supervisors, queues, heartbeats, recoveries, snapshots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from msgspec import Struct

from everbeat.domain.duration import When, milliseconds
from everbeat.domain.failure import error_from_json
from everbeat.domain.inspection import (
    AttemptInfo,
    HeartbeatInfo,
    QueueInfo,
    RecoveryInfo,
    SupervisorInfo,
    TaskSummary,
    WorkerInfo,
    WorkerStateInfo,
)
from everbeat.domain.needs import Needs, read_needs
from everbeat.domain.outcome import TaskError
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.states import TaskState
from everbeat.store.readable import document, is_marker, mapping, names, optional_mapping, progress, state
from everbeat.store.statement import Row, Statement

_SUMMARY_COLUMNS = 33
_LAST_ID = UUID(int=2**128 - 1)


class StoredTask(Struct, frozen=True, kw_only=True):
    """A task's row: its summary, what a list leaves out, and the database's time of the look."""

    summary: TaskSummary
    at: datetime
    arguments: Mapping[str, Any]
    result: Any
    policy: StoredPolicy
    flags: Mapping[str, bool]
    needs: Needs | None

    @property
    def given(self) -> Needs | None:
        """What the task would need if it were marked; None if its arguments cannot be read."""
        return None if is_marker(self.arguments) else Needs(tuple(sorted(self.arguments)))


def task(task_id: UUID) -> Statement[StoredTask | None]:
    """One task as it is stored; None when there is none."""

    def read(found: Sequence[Row]) -> StoredTask | None:
        if not found:
            return None
        at, arguments, result, policy, flags, needs = found[0][_SUMMARY_COLUMNS:]
        return StoredTask(
            summary=_summary(found[0]),
            at=at,
            arguments=mapping(arguments),
            result=document(result),
            policy=StoredPolicy.from_json(policy),
            flags=mapping(flags),
            needs=read_needs(needs),
        )

    return Statement("inspect/task", {"id": task_id}, read)


def tasks(
    *,
    states: Sequence[TaskState] | None = None,
    name: str | None = None,
    queue: str | None = None,
    workflow: UUID | None = None,
    before: UUID | None = None,
    parent: UUID | None = None,
    limit: int,
) -> Statement[list[TaskSummary]]:
    """Tasks, newest id first; None takes all, `before` continues a page."""
    chosen = None if states is None else [state.value for state in states]
    first, last = (UUID(int=0), _LAST_ID) if workflow is None else _ids_in(workflow)
    parameters = {
        "states": chosen, "name": name, "queue": queue, "before": before, "parent": parent, "limit": limit,
        "workflow": workflow, "first_id": first, "last_id": last,
    }  # fmt: skip
    return Statement("inspect/tasks", parameters, lambda found: [_summary(row) for row in found])


def _ids_in(workflow: UUID) -> tuple[UUID, UUID]:
    """Between which ids the tasks of a workflow are: they begin with the same time."""
    time = workflow.int >> 80 << 80
    return UUID(int=time), UUID(int=time + 2**80 - 1)


def attempts(task_id: UUID) -> Statement[tuple[AttemptInfo, ...]]:
    """The ended attempts of a task, first one first."""
    return Statement(
        "inspect/attempts",
        {"id": task_id},
        lambda found: tuple(AttemptInfo(*_with(row, {9: _error})) for row in found),
    )


def heartbeats(task_id: UUID | None, *, limit: int) -> Statement[list[HeartbeatInfo]]:
    """The heartbeats of one task in flight, or the latest of every one; newest first."""
    if task_id is None:
        return Statement("inspect/latest_heartbeats", {"limit": limit}, _heartbeats)
    return Statement("inspect/heartbeats_of_task", {"id": task_id, "limit": limit}, _heartbeats)


def recoveries(
    task_id: UUID | None = None,
    *,
    number: int | None = None,
    worker: str | None = None,
    since: When | None = None,
    cause: str | None = None,
    limit: int,
) -> Statement[list[RecoveryInfo]]:
    """Recoveries, newest first; None takes all. `since`: a moment, or so long before the database's now.

    `cause` is a part of the cause in any case, or one of the ways in which deaths are noticed.
    """
    parameters = {
        "task_id": task_id, "number": number, "worker": worker, "cause": cause, "limit": limit,
        "since": since if isinstance(since, datetime) else None,
        "within_ms": milliseconds(since.total_seconds()) if isinstance(since, timedelta) else None,
    }  # fmt: skip
    return Statement("inspect/recoveries", parameters, _recoveries)


def workers(
    *, stale_ms: int, ended_too: bool, limit: int, exact: bool = False
) -> Statement[list[WorkerInfo]]:
    """Workers, newest beat first. Unless `exact`, a tree that wrote a longer threshold is judged by that."""
    parameters = {"stale_ms": stale_ms, "exact": exact, "ended_too": ended_too, "limit": limit}
    return Statement("inspect/workers", parameters, lambda found: [_worker(row) for row in found])


def supervisors(
    *, stale_ms: int, ended_too: bool, limit: int, exact: bool = False
) -> Statement[list[SupervisorInfo]]:
    """Supervisors, newest beat first. Unless `exact`, a tree that wrote a longer threshold is judged by that."""
    parameters = {"stale_ms": stale_ms, "exact": exact, "ended_too": ended_too, "limit": limit}
    return Statement("inspect/supervisors", parameters, lambda found: [SupervisorInfo(*row) for row in found])


def worker_states(worker_id: str | None, *, limit: int) -> Statement[list[WorkerStateInfo]]:
    """The snapshots of one worker, or of all; newest first."""
    parameters = {"worker_id": worker_id, "limit": limit}
    return Statement(
        "inspect/worker_states",
        parameters,
        lambda found: [WorkerStateInfo(*_with(row, {8: optional_mapping})) for row in found],
    )


def queues() -> Statement[list[QueueInfo]]:
    """Queues that have live tasks, by name."""
    return Statement("inspect/queues", {}, lambda found: [_queue(row) for row in found])


def _summary(row: Row) -> TaskSummary:
    return TaskSummary(*_with(row[:_SUMMARY_COLUMNS], {4: TaskState, 23: progress, 24: _error}))


def _heartbeats(found: Sequence[Row]) -> list[HeartbeatInfo]:
    return [HeartbeatInfo(*row) for row in found]


def _recoveries(found: Sequence[Row]) -> list[RecoveryInfo]:
    return [RecoveryInfo(*_with(row, {10: state, 19: optional_mapping, 25: state})) for row in found]


def _worker(row: Row) -> WorkerInfo:
    return WorkerInfo(*_with(row, {4: names, 14: mapping}))


def _with(row: Row, readers: Mapping[int, Callable[[Any], Any]]) -> list[Any]:
    """The columns of a row, some of them read further."""
    return [readers[place](value) if place in readers else value for place, value in enumerate(row)]


def _queue(row: Row) -> QueueInfo:
    name, pending, scheduled, claimed, running, oldest_due_s = row
    return QueueInfo(
        name=name,
        pending=pending,
        scheduled=scheduled,
        claimed=claimed,
        running=running,
        oldest_due_s=oldest_due_s,
    )


def _error(text: str | None) -> TaskError | None:
    return None if text is None else error_from_json(text)
