"""Measure how long recovered tasks wait until their code begins again."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from everbeat.domain.series import RecoveredLease
from everbeat.maintenance.series import RatesWriter
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.store.reruns import reruns

LOOK_EVERY_S: Final = 2.0
_SELDOM: Final = 0.25
"""A task that has not run is checked again after this share of the time since its recovery."""
_LONGEST_PAUSE_S: Final = 60.0
_MOST_FOLLOWED: Final = 1_000
_FOLLOWED_S: Final = 86_400.0


class _Followed(Struct):
    lease: RecoveredLease
    since: float
    look_at: float


class RerunWatch:
    """A service in every supervisor that finds when the tasks ran again that its tree recovered.

    It sends a statement only while such a task waits.
    """

    name = "reruns"
    interval_s = LOOK_EVERY_S

    def __init__(self, environment: RecoveryEnvironment, rates: RatesWriter) -> None:
        self._environment = environment
        self._clock = environment.clock
        self._rates = rates
        self._followed: dict[tuple[object, int], _Followed] = {}

    async def tick(self) -> float | None:
        """Look at the recovered tasks whose look is due."""
        now = self._clock.monotonic()
        totals = self._rates.event_totals()
        while totals.recent and len(self._followed) < _MOST_FOLLOWED:
            lease = totals.recent.popleft()
            self._followed[lease.task_id, lease.fence] = _Followed(lease, now, now)
        asked = [each for each in self._followed.values() if each.look_at <= now]
        if not asked:
            return None
        statement = reruns([(each.lease.task_id, each.lease.fence) for each in asked])
        for found in await self._environment.run_once(statement):
            followed = self._followed[found.task_id, found.fence]
            waited_s = now - followed.since
            if found.after_s is not None:
                totals.ran_again(followed.lease.noticed_by, found.after_s)
            if found.after_s is not None or found.has_ended or waited_s > _FOLLOWED_S:
                del self._followed[found.task_id, found.fence]
            else:
                followed.look_at = now + min(_LONGEST_PAUSE_S, _SELDOM * waited_s)
        return None
