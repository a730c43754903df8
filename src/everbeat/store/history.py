"""Statements that move ended tasks to `history` and back, and that manage its partitions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

from msgspec import Struct

from everbeat.store import rows
from everbeat.store.retention import PruneStep, TaskIdBounds
from everbeat.store.rows import Row
from everbeat.store.statement import Statement, uuids
from everbeat.store.tasks import StoredOutcome, read_outcomes

SHORTEST_AGE_S: Final = 3_600
"""How long after its end a task stays in `tasks`, in seconds.

A send that is repeated after a lost reply must find its task there, so no call is repeated for as long as this (`LONGEST_PATIENCE_S`).
"""
PartUnit = Literal["day", "month"]


class MoveStep(Struct, frozen=True):
    """The result of one step: how many tasks moved, and the id after which the next step starts (None: nothing is left).

    If `lacks` is not None, the step moved nothing, because a partition is missing for tasks that ended at this time.
    """

    next_after: UUID | None
    moved: int
    lacks: datetime | None


class HistoryPart(Struct, frozen=True):
    """A partition of `history`. It contains the tasks that ended from `since` until just before `until`."""

    name: str
    since: datetime
    until: datetime


def move_tasks(
    *, age_ms: int, hours: int | None, limit: int, after: UUID, until: UUID
) -> Statement[MoveStep]:
    """Move tasks that ended at least `age_ms` ago, but not more than `hours` ago (None: at any time), with all data stored about them.

    Examine at most `limit` tasks between the two ids.
    """
    parameters = {"age_ms": age_ms, "hours": hours, "limit": limit, "after": after, "until": until}
    return Statement("history/move_tasks", parameters, lambda found: MoveStep(*found[0]))


def add_part(at: datetime, *, unit: PartUnit) -> Statement[bool]:
    """Create the partition for tasks that ended at this time. Return False if a lock was not free soon."""
    return Statement("history/add_part", {"at": at, "unit": unit}, rows.only(bool))


def old_parts(*, hours: int) -> Statement[list[HistoryPart]]:
    """List the partitions whose tasks all ended more than `hours` ago, oldest first."""
    return Statement("history/list_old_parts", {"hours": hours}, rows.each(HistoryPart))


def drop_part(name: str, *, hours: int) -> Statement[str]:
    """Drop a partition whose tasks all ended more than `hours` ago.

    Return "dropped", "locked" if a lock was not free soon, or "needed" if the partition contains tasks of existing workflows.
    """
    return Statement("history/drop_part", {"name": name, "hours": hours}, rows.only(str))


def is_part_needed(part: HistoryPart, *, hours: int, bounds: TaskIdBounds) -> Statement[bool]:
    """Return whether a partition contains tasks of a workflow that a pass with a retention of `hours` keeps."""
    return Statement("history/check_part", _of_part(part) | _kept(hours, bounds), rows.only(bool))


def count_part(
    part: HistoryPart, *, hours: int, bounds: TaskIdBounds, limit: int, after: UUID
) -> Statement[PruneStep[UUID]]:
    """Count the tasks of a partition that a pass with a retention of `hours` deletes. Examine at most the next `limit` tasks."""
    parameters = _of_part(part) | _kept(hours, bounds) | {"limit": limit, "after": after}
    return Statement("history/count_part", parameters, _deleted)


def prune_part(part: HistoryPart, *, limit: int, after: UUID) -> Statement[PruneStep[UUID]]:
    """Delete the tasks of a partition that belong to no existing workflow. Examine at most the next `limit` tasks."""
    return Statement("history/prune_part", _of_part(part) | {"limit": limit, "after": after}, _deleted)


def _of_part(part: HistoryPart) -> dict[str, Any]:
    return {"since": part.since, "until": part.until}


def _kept(hours: int, bounds: TaskIdBounds) -> dict[str, Any]:
    return {"hours": hours, "old_id": bounds.old, "now_id": bounds.now}


def _deleted(found: Sequence[Row]) -> PruneStep[UUID]:
    next_after, *counts = found[0]
    tables = ("tasks", "attempts", "recoveries", "steps", "signals")
    return PruneStep(dict(zip(tables, counts, strict=True)), next_after)


def recall_task(task_id: UUID) -> Statement[int]:
    """Move a task that can be retried back to `tasks`. Run it in the transaction of the retry. Return how many tasks moved."""
    return Statement("history/recall_task", {"id": task_id}, rows.only(int))


def recall_workflows(ids: Collection[UUID]) -> Statement[int]:
    """Lock these workflows and move their tasks back to `tasks`. Run it in the transaction of the retry. Return how many tasks moved."""
    return Statement("history/recall_workflows", {"ids": uuids(ids)}, rows.only(int))


def outcomes(ids: Sequence[UUID]) -> Statement[dict[UUID, StoredOutcome]]:
    """Return the states and outcomes of these tasks, also of those in `history`. Unknown ids are omitted."""
    return Statement("history/list_outcomes", {"ids": uuids(ids)}, read_outcomes)
