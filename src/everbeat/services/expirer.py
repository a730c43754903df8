"""The expirer: tasks whose `good_until` passed before anybody claimed them."""

from __future__ import annotations

from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.services.observer import Observer, Statements
from everbeat.store import tasks, workers

_BATCH: Final = 200
_ONE_TRY: Final = 0.0
_LONGEST_INTERVAL_S: Final = 15.0


class Expirer:
    """A service of every supervisor, of which one at a time has the turn."""

    name = "expirer"

    def __init__(
        self, statements: Statements, config: RecoveryConfig, *, channel: str, observer: Observer
    ) -> None:
        # Half: whoever has the turn may die right after taking it, and all others wait for their own next tick.
        self.interval_s = min(config.check_interval_ms / 2_000, _LONGEST_INTERVAL_S)
        self._statements = statements
        self._channel = channel
        self._observer = observer

    async def tick(self) -> float | None:
        """One pass: everything that is late."""
        turn = workers.take_turn(
            self.name, interval_ms=round(self.interval_s * 1_000), taken_by=self._observer.supervisor_id
        )
        if await self._statements.run(turn, patience_s=_ONE_TRY):
            late = tasks.expire(channel=self._channel, limit=_BATCH)
            expired = _BATCH
            while expired == _BATCH:
                ids = await self._statements.run(late, patience_s=_ONE_TRY)
                expired = len(ids)
        return None
