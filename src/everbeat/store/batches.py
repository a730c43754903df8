"""Statements that create, fill, seal, cancel and advance batches, and read their progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.batch import BatchCallback, BatchInfo, ForgottenBatches
from everbeat.store import rows
from everbeat.store.inspection import Candidate, candidates
from everbeat.store.rows import Row
from everbeat.store.statement import Statement
from everbeat.store.tasks import NewTask, insert_tasks, traced_if

MOST_BATCHES: Final = 20
SendVerdict: TypeAlias = Literal["open", "sealed"]


class SentToBatch(Struct, frozen=True):
    """The ids of the tasks of a send, in order (None: the task was not stored), and whether the batch was open (None: unknown batch)."""

    ids: list[UUID | None]
    batch: SendVerdict | None


class AdvancedBatches(Struct, frozen=True):
    """The numbers of batches that had events, of batches that ended, and of tasks that are now due."""

    advanced: int
    ended: int
    enqueued: int


def open_batch(
    batch_id: UUID, *, name: str, on_end: BatchCallback | None, on_success: BatchCallback | None
) -> Statement[None]:
    """Create a batch. Its id makes the statement idempotent."""
    parameters = {"id": batch_id, "name": name, "on_end": _json(on_end), "on_success": _json(on_success)}
    return Statement("batch/open_batch", parameters, rows.nothing)


def _json(callback: BatchCallback | None) -> str | None:
    return None if callback is None else msgspec.json.encode(callback).decode()


def send_to_batch(batch_id: UUID, new: Sequence[NewTask], *, channel: str) -> Statement[SentToBatch]:
    """Send tasks of a batch, either all or none. If the batch is sealed, only tasks that an earlier call stored have ids."""
    plain = insert_tasks(new, channel=channel)

    def read(found: Sequence[Row]) -> SentToBatch:
        return SentToBatch(plain.read(found), next(row[3] for row in found if row[1] is None))

    parameters = {**plain.parameters, "batch_id": batch_id}
    name = traced_if(new, name="task/insert_tasks")
    return Statement(name, parameters, read, hints=plain.hints)


def seal_batch(batch_id: UUID) -> Statement[bool]:
    """Seal a batch. Return whether it exists."""
    return Statement("batch/seal_batch", {"id": batch_id}, rows.only(bool), hints=("w",))


def mark_cancelled(batch_id: UUID) -> Statement[bool | None]:
    """Seal a batch and mark it as cancelled, unless it has ended. Return whether it has ended, or None if it does not exist."""
    return Statement("batch/mark_cancelled", {"id": batch_id}, rows.first(bool), hints=("w",))


def cancel_tasks(batch_id: UUID, *, channel: str) -> Statement[int]:
    """Cancel the live tasks of a batch and their descendants. Repeat the statement until it returns 0."""
    return Statement(
        "batch/cancel_tasks", {"id": batch_id, "channel": channel}, lambda found: int(found[0][0])
    )


def read_batch(batch_id: UUID) -> Statement[BatchInfo | None]:
    """Return a batch and its progress, or None if it does not exist."""
    return Statement("batch/read_batch", {"id": batch_id}, rows.first(_info))


def list_batches(
    *, before: UUID | None = None, live_only: bool = False, limit: int
) -> Statement[list[BatchInfo]]:
    """List the newest batches with smaller ids than `before`. If `live_only` is set, omit ended batches."""
    parameters = {"before": before, "live_only": live_only, "limit": limit}
    return Statement("batch/list_batches", parameters, rows.each(_info))


def batches_between(first: UUID, last: UUID, *, limit: int) -> Statement[list[Candidate]]:
    """List the batches with ids from `first` to `last`, newest first."""
    parameters = {"first": first, "last": last, "limit": limit}
    return Statement("batch/find_batches", parameters, lambda found: candidates("batch", found))


def advance_batches(*, channel: str, most: int = MOST_BATCHES) -> Statement[AdvancedBatches]:
    """Count the events of up to `most` batches, and end those whose tasks have all ended."""
    return Statement("batch/advance_batches", {"channel": channel, "most": most}, rows.only(AdvancedBatches))


def repair_batches(*, limit: int) -> Statement[int]:
    """Let workers check sealed batches that should have ended, because another program deleted tasks of theirs. Return their number."""
    return Statement("batch/repair_batches", {"limit": limit}, lambda found: int(found[0][0]))


def find_forgotten() -> Statement[ForgottenBatches | None]:
    """Return the batches that have been open for more than a day, or None if there are none."""
    return Statement("batch/find_forgotten", {}, rows.first(ForgottenBatches))


_COLUMNS: Final = (
    "id", "name", "total", "waiting", "running", "completed", "failed", "cancelled", "expired", "created_at", "sealed_at", "cancelled_at",
    "ended_at", "on_end_id", "on_success_id", "problem",
)  # fmt: skip
_info = rows.by_name(BatchInfo, _COLUMNS)
