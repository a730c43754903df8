"""Count the rows that a retention pass deletes: of all tables for a dry run, and of partitions of `history` before they are dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final
from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import PruneResult
from everbeat.recovering.observer import Statements
from everbeat.store import history, retention
from everbeat.store.history import HistoryPart
from everbeat.store.retention import PruneStep, TaskIdBounds

LOWEST_ID: Final = UUID(int=0)
MOST_COUNTED: Final = 10_000
"""How many tasks of a partition are counted before the partition is dropped. A scan of a big partition would cost more than the drop."""


def pruned(counts: Mapping[str, int], *, at_least: frozenset[str]) -> PruneResult:
    """Return the result of a pass. `at_least` names the counts that can be too low."""
    names = PruneResult().by_table()
    return PruneResult(**counts, at_least=tuple(name for name in names if name in at_least))


def unsure(step: PruneStep[UUID]) -> frozenset[str]:
    """Return the names of the counts that are too low if no further step is run."""
    return frozenset() if step.next_after is None else frozenset(step.deleted)


async def count_old(statements: Statements, config: RecoveryConfig) -> PruneResult:
    """Return how many rows a retention pass would delete now, without deleting them."""
    hours = config.terminal_record_retention_hours
    bounds = await statements.run(retention.task_id_bounds(hours=hours or 0))
    found = await statements.run(
        retention.count(
            terminal_hours=hours,
            worker_hours=config.worker_state_retention_hours,
            beat_hours=config.heartbeat_retention_hours,
            bounds=bounds,
        )
    )
    counts, at_least = Counter(found.by_table()), frozenset[str]()
    if hours is not None:
        for part in await statements.run(history.old_parts(hours=hours)):
            if await statements.run(history.is_part_needed(part, hours=hours, bounds=bounds)):
                counts.update(await _count_needed(statements, part, hours=hours, bounds=bounds))
            else:
                step = await statements.run(
                    history.count_part(part, hours=hours, bounds=bounds, limit=MOST_COUNTED, after=LOWEST_ID)
                )
                counts.update({"history_parts": 1, **step.deleted})
                at_least |= unsure(step)
    return pruned(counts, at_least=at_least)


async def _count_needed(
    statements: Statements, part: HistoryPart, *, hours: int, bounds: TaskIdBounds
) -> Counter[str]:
    """Count the rows that a pass deletes from a partition that it keeps. The pass reads the whole partition, so this does as well."""
    counts: Counter[str] = Counter()
    key: UUID | None = LOWEST_ID
    while key is not None:
        step = await statements.run(
            history.count_part(part, hours=hours, bounds=bounds, limit=MOST_COUNTED, after=key)
        )
        counts.update(step.deleted)
        key = step.next_after
    return counts
