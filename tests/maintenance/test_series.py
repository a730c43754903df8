"""The services that write the counts of a tree, sample the queues and roll rates up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from everbeat.domain.series import RateBucket
from everbeat.errors import DatabaseUnreachable
from everbeat.maintenance.cleanup import Expirer
from everbeat.maintenance.series import DepthSampler, RatesWriter
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.recovering.orders import Death
from everbeat.store import series
from everbeat.store.statement import Statement
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness
from tests.store.test_series import LONG_AGO, NEVER, minute, shift, stored

T = TypeVar("T")


class Unreliable:
    """Runs statements, and raises an error before or after the next one."""

    def __init__(self, environment: RecoveryEnvironment) -> None:
        self._statements = environment.statements
        self.fails: str | None = None
        self.ran: list[str] = []

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        fails, self.fails = self.fails, None
        if fails == "before":
            raise DatabaseUnreachable("away", fix="wait")
        answer = await self._statements.run(statement, patience_s=patience_s)
        self.ran.append(statement.name)
        if fails == "after":
            raise DatabaseUnreachable("away", fix="wait")
        return answer


class ShiftedTime:
    """Runs statements on a server whose time begins at `began` and moves only with the test's clock."""

    def __init__(self, environment: RecoveryEnvironment, *, began: datetime) -> None:
        self._environment = environment
        self._began = began
        self.ahead = timedelta(0)

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        answer = await self._environment.statements.run(statement, patience_s=patience_s)
        assert isinstance(answer, series.RatesWritten)
        shifted: Any = replace(
            answer, now=self._began + self.ahead + timedelta(seconds=self._environment.clock.monotonic())
        )
        return shifted  # type: ignore[no-any-return]


def counted(db: StoreHarness) -> list[RateBucket]:
    return db.run(series.rates(since=LONG_AGO, until=NEVER, bucket_s=60))


def start(environment: RecoveryEnvironment, *, times: int = 1, **names: Any) -> None:
    for _ in range(times):
        waits = environment.rates.waits(names.get("queue", "default"), names.get("name", "work"))
        waits.append(names.get("wait_s", 0.1))


async def test_a_tree_in_which_nothing_happens_sends_no_statement(observer: ManualObserver) -> None:
    environment = observer.environment()
    unreliable = Unreliable(environment)
    writer = RatesWriter(replace(environment, statements=unreliable))
    for _ in range(5):
        assert await writer.tick() is None
        await observer.clock.advance(10)
    assert unreliable.ran == []


@pytest.mark.parametrize("fails", ["before", "after"])
async def test_counts_are_written_once_although_a_reply_was_lost(
    observer: ManualObserver, db: StoreHarness, fails: str
) -> None:
    environment = observer.environment()
    unreliable = Unreliable(environment)
    writer = RatesWriter(replace(environment, statements=unreliable))
    start(environment, times=2)
    await writer.tick()
    start(environment, times=3)
    unreliable.fails = fails
    with pytest.raises(DatabaseUnreachable):
        await writer.tick()
    start(environment)
    await writer.tick()
    assert sum(each.started for each in counted(db)) == 6


async def test_counts_are_kept_if_the_time_could_not_be_read(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    unreliable = Unreliable(environment)
    writer = RatesWriter(replace(environment, statements=unreliable))
    start(environment, times=2)
    unreliable.fails = "before"
    with pytest.raises(DatabaseUnreachable):
        await writer.tick()
    await writer.tick()
    assert sum(each.started for each in counted(db)) == 2


async def test_counts_before_and_after_the_end_of_a_minute_are_separate(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    began = minute(db)
    shifted = ShiftedTime(environment, began=began + timedelta(seconds=35))
    writer = RatesWriter(replace(environment, statements=shifted))
    start(environment)
    rests = []
    for times in (2, 4, 8, 16, 32):
        rest_s = await writer.tick()
        assert rest_s is not None
        rests.append(round(rest_s))
        start(environment, times=times)
        await observer.clock.advance(rest_s)
    await writer.tick()
    # The ticks follow after 35, 45, 55, 60, 70 and 80 seconds. Each takes the counts of the time before it.
    assert rests == [10, 10, 5, 10, 10]
    assert [(each.at, each.started) for each in counted(db)] == [
        (began, 15),
        (began + timedelta(minutes=1), 48),
    ]


async def test_counts_after_the_clock_was_set_back_add_to_those_before(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    shifted = ShiftedTime(environment, began=minute(db) - timedelta(minutes=4))
    writer = RatesWriter(replace(environment, statements=shifted))
    start(environment, times=5)
    await writer.write()
    for ahead in (timedelta(minutes=20), timedelta(0)):
        shifted.ahead = ahead
        await observer.clock.advance(61)
        await writer.write()
        start(environment)
        await writer.write()  # the time is read again, and the minutes before the jump are forgotten
    shifted.ahead = timedelta(seconds=-122)
    await observer.clock.advance(61)
    start(environment, times=3)
    await writer.write()
    assert {each.at: each.started for each in counted(db)}[minute(db) - timedelta(minutes=4)] == 8


async def test_a_supervisor_that_gets_another_id_continues_its_rows(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    writer = RatesWriter(environment)
    start(environment, times=2)
    await writer.tick()
    observer.supervisor_id = "another"
    start(environment, times=3)
    await writer.tick()
    assert sum(each.started for each in counted(db)) == 5


async def test_the_last_counts_are_written_or_dropped_without_an_error(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    unreliable = Unreliable(environment)
    writer = RatesWriter(replace(environment, statements=unreliable))
    start(environment)
    await writer.flush()
    assert sum(each.started for each in counted(db)) == 1
    start(environment)
    unreliable.fails = "before"
    await writer.flush()
    assert sum(each.started for each in counted(db)) == 1


async def test_a_sampler_rolls_up_after_the_first_sample_of_a_minute(
    observer: ManualObserver, db: StoreHarness
) -> None:
    environment = observer.environment()
    for _ in range(3):
        start(environment)
        await RatesWriter(environment).write()
    assert stored(db) == 3
    shift(db, "12 minutes")
    db.send()
    sampler = DepthSampler(environment)
    assert await sampler.tick() == 10.0
    assert stored(db) == 1
    assert [each.queue for each in db.run(series.latest_depths()).queues] == ["default"]


async def test_a_supervisor_without_a_turn_to_watch_tries_seldom(observer: ManualObserver) -> None:
    sampler = DepthSampler(observer.environment(), pace_s=lambda: 10.0)
    assert await sampler.tick() == 60.0


async def test_a_recovery_counts_the_attempts_that_it_ends(
    observer: ManualObserver, db: StoreHarness
) -> None:
    recoverer = observer.recoverer()
    db.running("w1", queue="mail")
    db.send(queue="mail")
    assert len(db.claim("w1")) == 1
    assert await recoverer.recover_supervisor("s1", Death(noticed_by="session", cause="gone")) == 2
    assert await recoverer.recover_supervisor("s1", Death(noticed_by="session", cause="gone")) == 0
    [found] = recoverer.environment.rates.take()
    assert (found.queue, found.name, found.lost) == ("mail", "work", 1)
    assert (found.started, found.crashed, found.failed, found.released) == (0, 0, 0, 0)


async def test_an_expiry_counts_the_tasks_that_expire(observer: ManualObserver, db: StoreHarness) -> None:
    environment = observer.environment()
    for _ in range(3):
        db.send(queue="mail", good_until=datetime.now(UTC) - timedelta(seconds=1))
    db.send()
    await Expirer(environment).tick()
    [found] = environment.rates.take()
    assert (found.queue, found.name, found.expired) == ("mail", "work", 3)
