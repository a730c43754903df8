"""Write what a tree has counted, and sample and roll up the counts of all trees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Final

from everbeat.domain.metrics.events import EventTotals
from everbeat.domain.series import RateBook, RateCounts
from everbeat.errors import DatabaseError
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.runtime.identity import new_id
from everbeat.store import series
from everbeat.store.statement import Statement

WRITE_EVERY_S: Final = 10.0
LONGEST_FLUSH_S: Final = 2.0
_MOST_ROWS: Final = 1_000
_MINUTE: Final = timedelta(minutes=1)
_ACCEPTED: Final = timedelta(minutes=5)
"""The database refuses older minutes."""
_BEHIND_S: Final = 0.05
"""How long after the end of a minute its last counts are taken."""
_SELDOM: Final = 6
"""A supervisor without a turn to watch tries to sample only once in this many of its other passes."""
_MOST_SPANS: Final = 50
"""How many spans are summed, and of how many peaks are stored, after one sample, so that the next one is not late."""
_SURE_FOR_S: Final = 60.0
"""How long after a reply the database's time is calculated from it."""


class RatesWriter:
    """A service in every supervisor that writes the counts of its tree. A tree in which nothing happens writes nothing.

    The rows contain absolute values, so a statement can be repeated after a lost reply. They have an id that stays the same when the
    supervisor gets another one, because new rows with the same counts would count twice. If the server's clock was set back, minutes come
    again. The writer then has forgotten their counts. So it begins new rows with another id, which add to those that exist.
    """

    name = "rates"
    interval_s = WRITE_EVERY_S

    def __init__(self, environment: RecoveryEnvironment) -> None:
        self._environment = environment
        self._counter = environment.rates
        self._clock = environment.clock
        self._book = RateBook()
        self._in_hand: list[RateCounts] = []
        self._events = EventTotals()
        self._id = new_id()
        self._now: datetime | None = None
        self._now_at = self._taken_at = self._clock.monotonic()

    async def tick(self) -> float | None:
        """Write the counts since the last tick. Another tick is due at the end of a minute, so that minutes are separate."""
        await self.write()
        return None if self._now is None else self._next_in_s()

    async def flush(self) -> None:
        """Write the last counts. An error or a missing reply is ignored, because the supervisor is about to exit."""
        with suppress(DatabaseError, TimeoutError):
            async with asyncio.timeout(LONGEST_FLUSH_S):
                await self.write()

    async def write(self, *, patience_s: float = 0.0) -> None:
        """Write the counts since the last write, and those that have not been written before because of an error."""
        since, self._taken_at = self._taken_at, self._clock.monotonic()
        self.event_totals()  # so that the counter does not grow
        if counts := self._counter.take():
            self._in_hand = counts
            try:
                now = await self._database_time(patience_s)
            except BaseException:
                self._counter.add(counts)
                raise
            finally:
                self._in_hand = []
            # Half of the time since the last tick has passed before the middle of the counts. A tick follows the end of each minute.
            middle = now - timedelta(seconds=(self._taken_at - since) / 2)
            self._book.add(_minute(middle), counts)
        if self._now is not None:
            now = self._calculated()
            self._book.forget(before=_minute(now) - _ACCEPTED, after=now + _MINUTE)
        while rows := self._book.take_changed(_MOST_ROWS):
            statement = series.write_rates(rows, supervisor=self._id)
            try:
                answer = await self._environment.statements.run(statement, patience_s=patience_s)
            except BaseException:
                self._book.put_back(rows)
                raise
            self._set_time(answer.now)

    def totals(self) -> list[RateCounts]:
        """Return all counts since the start, written or not. No count is missing or double at any moment, so the numbers never fall."""
        return self._book.totals(self._in_hand, self._counter.waiting())

    def event_totals(self) -> EventTotals:
        """Return the counts of recoveries and other events since the start."""
        self._events.add(self._counter.take_events())
        return self._events

    async def _database_time(self, patience_s: float) -> datetime:
        """Return the database's time. It is read only if the last reply is old, because a machine in standby stops this process's clock."""
        if self._now is None or self._clock.monotonic() - self._now_at > _SURE_FOR_S:
            empty = series.write_rates([], supervisor=self._id)
            self._set_time((await self._environment.statements.run(empty, patience_s=patience_s)).now)
        return self._calculated()

    def _set_time(self, now: datetime) -> None:
        if self._now is not None and now < self._calculated() - _MINUTE:
            self._id = new_id()
            self._book.begin_again()
        self._now, self._now_at = now, self._clock.monotonic()

    def _calculated(self) -> datetime:
        assert self._now is not None
        return self._now + timedelta(seconds=self._clock.monotonic() - self._now_at)

    def _next_in_s(self) -> float:
        now = self._calculated()
        end_in_s = (_minute(now) + _MINUTE - now).total_seconds() + _BEHIND_S
        return min(WRITE_EVERY_S, end_in_s)


def _minute(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


class DepthSampler:
    """A service in every supervisor that samples all queues and adds up what is old. Only one supervisor at a time does the work.

    In a large cluster, most supervisors try seldom: `pace_s` returns more than 0 without a turn to watch.
    """

    name = "depths"
    interval_s = series.SAMPLE_EVERY_MS / 1_000

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        pace_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._environment = environment
        self._pace_s = pace_s

    async def tick(self) -> float | None:
        """Take a sample, unless it is another supervisor's turn. After the first sample of a minute, add up what is old."""
        supervisor_id = self._environment.observer.supervisor_id
        if await self._environment.run_once(series.sample_depths(taken_by=supervisor_id)):
            await self._environment.run_once(series.delete_early())
            while await self._environment.run_once(series.roll_up_rates()) >= series.MOST_ROLLED_UP:
                pass
            await self._environment.run_once(series.sum_minutes())
            await self._repeated(series.sum_rates)
            await self._repeated(series.add_peaks)
        return max(self.interval_s, _SELDOM * self._pace_s())

    async def _repeated(self, step: Callable[[], Statement[bool]]) -> None:
        """Run a statement for each span that has ended. After an upgrade, this takes some minutes."""
        for _ in range(_MOST_SPANS):
            if not await self._environment.run_once(step()):
                return
