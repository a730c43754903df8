"""Snapshots of what the workers of this supervisor are doing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.services.observer import Statements
from everbeat.store import workers
from everbeat.store.workers import WorkerState

_ONE_TRY: Final = 0.0


class Snapshots:
    """A service of every supervisor; `states` reads its workers' latest ticks."""

    name = "snapshots"

    def __init__(
        self, statements: Statements, config: RecoveryConfig, *, states: Callable[[], Sequence[WorkerState]]
    ) -> None:
        self.interval_s = config.worker_state_snapshot_interval_ms / 1_000
        self._statements = statements
        self._states = states

    async def tick(self) -> float | None:
        """One row for each worker that has ticked."""
        states = self._states()
        if states:
            await self._statements.run(workers.record_states(states), patience_s=_ONE_TRY)
        # The first tick of a worker comes a second after its start; it should not wait a whole interval to be seen.
        return None if states else min(1.0, self.interval_s)
