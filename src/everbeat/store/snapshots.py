"""Statements about the snapshots of several workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everbeat.domain.inspection import WorkerStateInfo
from everbeat.store.rows import Row
from everbeat.store.statement import Statement


def latest_states(
    worker_ids: Sequence[str], *, each: int
) -> Statement[Mapping[str, Sequence[WorkerStateInfo]]]:
    """Return up to `each` snapshots of each worker, newest first, without the counts of their messages."""

    def read(found: Sequence[Row]) -> Mapping[str, Sequence[WorkerStateInfo]]:
        states: dict[str, list[WorkerStateInfo]] = {worker_id: [] for worker_id in worker_ids}
        for row in found:
            states[row[0]].append(WorkerStateInfo(*row))
        return states

    return Statement("inspect/list_latest_states", {"worker_ids": [*worker_ids], "each": each}, read)
