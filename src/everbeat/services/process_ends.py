"""Counts how often a process ended under the code of a task before: evidence against the code, as a lost host is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from uuid import UUID

from everbeat.domain.states import TaskState
from everbeat.services.death import Death, is_killed_by_us
from everbeat.services.observer import Statements
from everbeat.store.leases import Lease
from everbeat.store.suspects import process_ends


async def earlier_ends(
    statements: Statements,
    batch: Iterable[Lease],
    deaths: Mapping[UUID, Death],
    *,
    patience_s: float | None,
) -> Mapping[UUID, int]:
    """Return how many processes ended under each task before, for tasks whose process has ended now.

    Processes that everbeat killed do not count. Those that exited with a code of everbeat do: code can exit with the same one.
    """
    asked = [
        lease.id
        for lease in batch
        if deaths[lease.id].blame.of_the_process
        and lease.state is TaskState.RUNNING
        and lease.crash_count + lease.loss_count
    ]
    if not asked:
        return {}
    found = await statements.run(process_ends(asked), patience_s=patience_s)
    return Counter(task_id for task_id, cause in found if not is_killed_by_us(cause))
