"""When recovered tasks ran again."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from msgspec import Struct

from everbeat.store import rows
from everbeat.store.statement import Statement, integers, uuids


class FoundRerun(Struct, frozen=True):
    """Whether a recovered task ran again, and how many seconds after the last sign of life of the lease with this `fence`."""

    task_id: UUID
    fence: int
    after_s: float | None
    has_ended: bool


def reruns(recovered: Sequence[tuple[UUID, int]]) -> Statement[list[FoundRerun]]:
    """Find when recovered tasks ran again. Each is given by its id and the fence of the dead lease."""
    ids, fences = [task_id for task_id, _ in recovered], [fence for _, fence in recovered]
    parameters = {"task_ids": uuids(ids), "fences": integers(fences)}
    return Statement("inspect/list_reruns", parameters, rows.each(FoundRerun))
