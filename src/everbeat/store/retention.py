"""Statements that delete rows for their age: each is one step of a walk through a table, bounded, and says where the next begins.

What lives here: the steps and the count of a dry run. What may not: the order of the walks and the rests between steps
(`services.pruner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Generic, TypeVar
from uuid import UUID

from msgspec import Struct

from everbeat.domain.retention import PruneResult
from everbeat.store.statement import Row, Statement

K = TypeVar("K")


class Step(Struct, Generic[K], frozen=True):
    """What one step did: rows deleted, by table, and the key after which the next step looks (None: the walk is over)."""

    deleted: Mapping[str, int]
    next_after: K | None


class TaskIdBounds(Struct, frozen=True):
    """The smallest ids that tasks sent when ended tasks become old, and tasks sent now, can have."""

    old: UUID
    now: UUID


def task_id_bounds(*, hours: int) -> Statement[TaskIdBounds]:
    """Where to look for tasks that ended `hours` ago: they were sent before, and ids sort by the time of sending."""
    return Statement("retention/task_id_bounds", {"hours": hours}, lambda found: TaskIdBounds(*found[0]))


def prune_tasks(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[Step[UUID]]:
    """Deletes tasks that ended more than `hours` ago with all that is stored of them, of `limit` tasks between two ids."""
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement(
        "retention/prune_tasks", parameters, _step("tasks", "attempts", "recoveries", "steps", "signals")
    )


def prune_workflows(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[Step[UUID]]:
    """Deletes workflows that ended more than `hours` ago with their nodes and edges, of `limit` workflows between two ids."""
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_workflows", parameters, _step("workflows", "nodes", "edges"))


def prune_stray_attempts(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[Step[UUID]]:
    """Deletes attempts that ended more than `hours` ago and have no task, of `limit` between two ids of tasks."""
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_attempts", parameters, _step("attempts"))


def prune_stray_steps(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[Step[UUID]]:
    """Deletes steps recorded more than `hours` ago that have no task, of `limit` between two ids of tasks."""
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_steps", parameters, _step("steps"))


def prune_stray_signals(*, hours: int, limit: int, after: UUID, until: UUID) -> Statement[Step[UUID]]:
    """Deletes signals sent more than `hours` ago that have neither task nor workflow, of `limit` between two ids of signals."""
    parameters = {"hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("retention/prune_stray_signals", parameters, _step("signals"))


def prune_stray_recoveries(*, hours: int, limit: int, after: int) -> Statement[Step[int]]:
    """Deletes recoveries older than `hours` that have no task, of the next `limit`."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_stray_recoveries", parameters, _step("recoveries"))


def prune_beats(*, hours: int, limit: int, after: datetime) -> Statement[Step[datetime]]:
    """Deletes up to `limit` beats older than `hours`, the oldest since `after`."""
    return Statement(
        "retention/prune_beats", {"hours": hours, "limit": limit, "after": after}, _step("beats")
    )


def prune_worker_states(*, hours: int, limit: int, after: datetime) -> Statement[Step[datetime]]:
    """Deletes up to `limit` snapshots older than `hours`, the oldest since `after`."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_worker_states", parameters, _step("worker_states"))


def prune_workers(*, hours: int, limit: int, after: str) -> Statement[Step[str]]:
    """Deletes workers that ended more than `hours` ago and hold nothing, of the next `limit`."""
    return Statement(
        "retention/prune_workers", {"hours": hours, "limit": limit, "after": after}, _step("workers")
    )


def prune_supervisors(*, hours: int, limit: int, after: str) -> Statement[Step[str]]:
    """Deletes supervisors that ended more than `hours` ago and whose workers are deleted, of the next `limit`."""
    parameters = {"hours": hours, "limit": limit, "after": after}
    return Statement("retention/prune_supervisors", parameters, _step("supervisors"))


def count(
    *, terminal_hours: int | None, worker_hours: int | None, beat_hours: int | None, bounds: TaskIdBounds
) -> Statement[PruneResult]:
    """What a pass would delete now; None keeps."""
    parameters = {
        "terminal_hours": terminal_hours, "worker_hours": worker_hours, "beat_hours": beat_hours, "old_id": bounds.old, "now_id": bounds.now,
    }  # fmt: skip
    return Statement("retention/count", parameters, lambda found: PruneResult(*found[0]))


def rest(seconds: float) -> Statement[None]:
    """Lets time pass on the server, with nothing held."""
    return Statement("retention/rest", {"seconds": seconds}, lambda _: None)


def _step(*tables: str) -> Callable[[Sequence[Row]], Step[K]]:
    def read(found: Sequence[Row]) -> Step[K]:
        next_after, *counts = found[0]
        return Step(dict(zip(tables, counts, strict=True)), next_after)

    return read
