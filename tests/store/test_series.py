"""Rates and depths: what a write changes, what it refuses, and how rows are added up, thinned and read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.domain.series import CLASSES, RateBucket, class_of, quantile_s
from everbeat.store import inspection, retention, series
from tests.store.conftest import StoreHarness

LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)
NEVER = datetime(2100, 1, 1, tzinfo=UTC)
COUNTERS = (
    "started", "completed", "failed", "retried", "cancelled", "suspended", "released", "crashed", "lost", "expired",
)  # fmt: skip


def now(db: StoreHarness) -> datetime:
    found = db.connection.execute("select statement_timestamp()").fetchone()
    assert found is not None
    moment: datetime = found[0]
    return moment


def minute(db: StoreHarness, *, ago: timedelta = timedelta(0)) -> datetime:
    return (now(db) - ago).replace(second=0, microsecond=0)


def counts(at: datetime, queue: str = "default", name: str = "work", **numbers: int) -> Mapping[str, Any]:
    """Return a row of `rates`. Each start waited 3 ms, and each end of code ran 2 s."""
    ends = sum(numbers.get(each, 0) for each in ("completed", "failed", "retried"))
    waits, runs = [0] * CLASSES, [0] * CLASSES
    waits[class_of(0.003)] = numbers.get("started", 0)
    runs[class_of(2.0)] = ends
    return {
        "at": at, "queue": queue, "name": name, **dict.fromkeys(COUNTERS, 0), **numbers,
        "wait_s": numbers.get("started", 0) * 0.003, "run_s": ends * 2.0, "waits": waits, "runs": runs,
    }  # fmt: skip


def total(db: StoreHarness, **by: Any) -> list[RateBucket]:
    return db.run(series.rates(since=LONG_AGO, until=NEVER, bucket_s=86_400 * 365, **by))


def stored(db: StoreHarness) -> int:
    found = db.connection.execute(db.plain("select count(*) from {schema}.rates")).fetchone()
    assert found is not None
    return int(found[0])


def shift(db: StoreHarness, by: str) -> None:
    """Make all rates older. Whole minutes and hours stay whole."""
    db.connection.execute(db.plain("update {schema}.rates set at = at - %s::interval"), [by])


def test_a_write_is_absolute_so_a_repeated_one_changes_nothing(db: StoreHarness) -> None:
    at = minute(db)
    first = db.run(series.write_rates([counts(at, started=3, completed=2)], supervisor="s1"))
    again = db.run(series.write_rates([counts(at, started=3, completed=2)], supervisor="s1"))
    assert (first.accepted, first.written) == (1, 1)
    assert (again.accepted, again.written) == (1, 0)
    db.run(series.write_rates([counts(at, started=5, completed=4, failed=1)], supervisor="s1"))
    [found] = total(db)
    assert (found.started, found.completed, found.failed) == (5, 4, 1)
    assert found.waits[class_of(0.003)] == 5
    assert found.runs[class_of(2.0)] == 5
    assert found.wait_s == pytest.approx(0.015)
    assert found.run_s == pytest.approx(10.0)


def test_a_write_that_arrives_after_a_later_one_does_not_replace_it(db: StoreHarness) -> None:
    at = minute(db)
    db.run(series.write_rates([counts(at, started=5)], supervisor="s1"))
    db.run(series.write_rates([counts(at, started=3)], supervisor="s1"))
    assert total(db)[0].started == 5


def test_a_minute_that_began_more_than_five_minutes_ago_is_refused(db: StoreHarness) -> None:
    before = [counts(minute(db, ago=timedelta(minutes=each)), started=1) for each in (0, 4, 7, 60)]
    answer = db.run(series.write_rates(before, supervisor="s1"))
    assert (answer.accepted, answer.written) == (2, 2)
    assert total(db)[0].started == 2


def test_a_minute_in_the_future_is_refused(db: StoreHarness) -> None:
    ahead = counts(minute(db, ago=timedelta(minutes=-3)), started=1)
    assert db.run(series.write_rates([ahead], supervisor="s1")).accepted == 0
    assert total(db) == []


def test_rates_are_read_by_queue_by_name_and_by_span(db: StoreHarness) -> None:
    here, before = minute(db), minute(db, ago=timedelta(minutes=2))
    rows = [
        counts(here, "mail", "send", started=1), counts(here, "mail", "drop", started=2), counts(before, "default", "send", started=4),
    ]  # fmt: skip
    db.run(series.write_rates(rows, supervisor="s1"))
    db.run(series.write_rates([counts(here, "mail", "send", started=8)], supervisor="s2"))
    every = series.rates(since=LONG_AGO, until=NEVER, bucket_s=60)
    assert [(each.at, each.started) for each in db.run(every)] == [(before, 4), (here, 11)]
    assert {each.queue: each.started for each in total(db, by_queue=True)} == {"mail": 11, "default": 4}
    assert {each.name: each.started for each in total(db, by_name=True)} == {"send": 13, "drop": 2}
    assert [each.started for each in total(db, queue="mail", name="send")] == [9]
    only = series.rates(since=here, until=here + timedelta(minutes=1), bucket_s=60)
    assert [each.started for each in db.run(only)] == [11]


def test_a_roll_up_makes_one_row_of_the_supervisors_of_a_minute(db: StoreHarness) -> None:
    at = minute(db)
    for supervisor in ("s1", "s2", "s3"):
        db.run(series.write_rates([counts(at, started=2, completed=1)], supervisor=supervisor))
    before = total(db)
    assert db.run(series.roll_up_rates()) == 0
    assert stored(db) == 3
    shift(db, "12 minutes")
    assert db.run(series.roll_up_rates()) == 3
    assert stored(db) == 1
    assert db.run(series.roll_up_rates()) == 0
    [after] = total(db)
    assert after == before[0]


def test_a_roll_up_adds_to_a_sum_that_exists(db: StoreHarness) -> None:
    at = minute(db)
    db.run(
        series.write_rates(
            [counts(at, started=2, completed=2), counts(at, "mail", started=1)], supervisor="s1"
        )
    )
    db.run(series.write_rates([counts(at, started=3, completed=3)], supervisor="s2"))
    [before] = total(db)
    shift(db, "12 minutes")
    for _ in range(3):
        db.run(series.roll_up_rates(most=1))
    assert stored(db) == 2
    assert total(db) == [before]


def test_a_roll_up_makes_one_row_of_the_minutes_of_an_hour(db: StoreHarness) -> None:
    minutes = [minute(db, ago=timedelta(minutes=each)) for each in range(4)]
    rows = [counts(each, started=2, completed=1) for each in minutes]
    for supervisor in ("s1", "s2"):
        db.run(series.write_rates(rows, supervisor=supervisor))
    [before] = total(db)
    shift(db, "50 hours")
    while db.run(series.roll_up_rates()):
        pass
    found = db.connection.execute(
        db.plain("select distinct seconds, supervisor from {schema}.rates")
    ).fetchall()
    assert found == [(3600, "")]
    assert stored(db) == len({each.replace(minute=0) for each in minutes})
    [after] = total(db)
    assert after.started == before.started == 16
    assert after.waits == before.waits
    assert after.runs == before.runs


def test_nothing_is_counted_twice_or_lost_while_several_sessions_roll_up(db: StoreHarness) -> None:
    at = minute(db)
    writers, names = 10, 10
    for supervisor in range(writers):
        rows = [counts(at, name=f"task_{n}", started=1, completed=1) for n in range(names)]
        db.run(series.write_rates(rows, supervisor=f"s{supervisor}"))
    shift(db, "12 minutes")
    done, seen = threading.Event(), list[int]()

    def roll_up() -> None:
        while db.run(series.roll_up_rates(most=3)):
            pass

    def write() -> None:
        for n in range(1, 40):
            db.run(series.write_rates([counts(at, name="late", started=n)], supervisor="s0"))

    def read() -> None:
        while not done.is_set():
            seen.append(sum(each.started for each in total(db, by_name=True) if each.name != "late"))

    watching = threading.Thread(target=read)
    watching.start()
    acting = [threading.Thread(target=each) for each in (roll_up, roll_up, roll_up, write)]
    for each in acting:
        each.start()
    for each in acting:
        each.join()
    done.set()
    watching.join()
    roll_up()
    assert set(seen) == {writers * names}
    assert {each.name: each.started for each in total(db, by_name=True)} == {
        "late": 39, **{f"task_{n}": writers for n in range(names)},
    }  # fmt: skip


def test_retention_deletes_rates_after_thirty_days(db: StoreHarness) -> None:
    db.run(series.write_rates([counts(minute(db), started=1)], supervisor="s1"))
    shift(db, "29 days")
    db.run(series.roll_up_rates())
    step = retention.prune_rates(limit=1, after=LONG_AGO)
    assert db.run(step).next_after is None
    assert stored(db) == 1
    shift(db, "2 days")
    assert db.run(step).next_after is not None
    assert stored(db) == 0


def sample(db: StoreHarness, by: str = "s1", *, most: int = 100) -> bool | None:
    return db.run(series.sample_depths(taken_by=by, most=most))


def test_one_supervisor_at_a_time_samples(db: StoreHarness) -> None:
    db.send()
    assert sample(db, "s1") is True
    assert sample(db, "s2") is None
    db.connection.execute(db.plain("update {schema}.turns set taken_until = now() where service = 'depths'"))
    assert sample(db, "s2") is not None
    found = db.connection.execute(db.plain("select count(*) from {schema}.depths where queue is not null"))
    assert found.fetchone() == (2,)


def test_a_sample_counts_each_live_task_once(db: StoreHarness) -> None:
    for _ in range(5):
        db.send(queue="mail")
    db.send(queue="mail", run_at=now(db) + timedelta(hours=1))
    db.send(queue="other", run_at=now(db) + timedelta(hours=1))
    first, *_ = db.claim(limit=2, queues=["mail"])
    db.start(first)
    later = "update {schema}.tasks set enqueued_at = now() + interval '1 hour', wake_at = now() + interval '1 hour' where queue = 'other'"
    db.connection.execute(db.plain(later))
    sample(db)
    latest = db.run(series.latest_depths())
    mail, other = latest.queues
    assert (mail.due, mail.scheduled, mail.suspended, mail.claimed, mail.running) == (3, 1, 0, 1, 1)
    assert (other.due, other.scheduled, other.suspended, other.claimed, other.running) == (0, 0, 1, 0, 0)
    assert mail.oldest_due_s is not None
    assert 0 <= mail.oldest_due_s < 60
    assert other.oldest_due_s is None
    assert mail.at_least == []
    assert latest.age_s is not None
    assert 0 <= latest.age_s < 60
    shown = {each.name: each for each in db.run(inspection.queues())}
    assert (shown["mail"].pending, shown["mail"].scheduled, shown["other"].scheduled) == (3, 1, 1)


def test_a_count_above_the_limit_is_marked_as_a_lower_bound(db: StoreHarness) -> None:
    for _ in range(4):
        db.send()
    sample(db, most=3)
    [found] = db.run(series.latest_depths()).queues
    assert (found.due, found.at_least) == (3, ["due"])


def test_a_queue_that_has_become_empty_is_not_in_the_last_sample(db: StoreHarness) -> None:
    assert db.run(series.latest_depths()).sampled_at is None
    task_id = db.send()
    sample(db)
    db.connection.execute(db.plain("delete from {schema}.tasks where id = %s"), [task_id])
    before = db.run(series.latest_depths())
    sample(db)
    after = db.run(series.latest_depths())
    assert [len(before.queues), len(after.queues)] == [1, 0]
    assert before.sampled_at is not None
    assert after.sampled_at is not None
    assert after.sampled_at > before.sampled_at


def test_the_first_sample_of_a_minute_has_the_size_of_the_tables(db: StoreHarness) -> None:
    assert [sample(db), sample(db)][0] is True
    [found] = db.run(series.sizes(since=LONG_AGO, until=NEVER, bucket_s=86_400 * 365))
    assert found.table_bytes > 100_000
    assert found.dead_rows >= 0


def test_samples_continue_after_the_clock_was_set_back(db: StoreHarness) -> None:
    db.send()
    sample(db)
    db.connection.execute(db.plain("update {schema}.depths set at = at + interval '1 hour'"))
    db.connection.execute(db.plain("update {schema}.turns set taken_at = taken_at + interval '1 hour'"))
    assert sample(db, "s2") is True
    db.run(series.delete_early())
    found = db.run(series.depths(since=LONG_AGO, until=NEVER, bucket_s=3_600))
    assert [each.at <= now(db) for each in found] == [True]


def test_samples_become_sparser_with_age(db: StoreHarness) -> None:
    insert = db.plain(
        "insert into {schema}.depths (seconds, at, queue, due) select case when n %% 360 = 0 then 3600 when n %% 6 = 0 then 60 else 10 end,"
        " now() - n * interval '10 seconds', 'default', n from generate_series(1, 2160) n"
    )

    def kept() -> dict[int, int]:
        found = db.connection.execute(
            db.plain("select seconds, count(*) from {schema}.depths group by 1")
        ).fetchall()
        return dict(found)

    def thin() -> None:
        for seconds in (10, 60, 3600):
            at: datetime | None = LONG_AGO
            while at is not None:
                at = db.run(retention.prune_depths(seconds, limit=500, after=at)).next_after

    db.connection.execute(insert, [])
    thin()
    assert kept() == {10: 600, 60: 354, 3600: 6}
    db.connection.execute(db.plain("update {schema}.depths set at = at - interval '47 hours'"))
    thin()
    assert kept() == {60: 59, 3600: 6}
    db.connection.execute(db.plain("update {schema}.depths set at = at - interval '27 days'"))
    thin()
    assert kept() == {3600: 6}
    db.connection.execute(db.plain("update {schema}.depths set at = at - interval '2 days'"))
    thin()
    assert kept() == {}


def test_depths_of_a_span_are_its_largest_counts(db: StoreHarness) -> None:
    db.send()
    sample(db)
    db.send()
    sample(db)
    [found] = db.run(series.depths(since=LONG_AGO, until=NEVER, bucket_s=86_400 * 365, queue="default"))
    assert found.due == 2
    assert db.run(series.depths(since=LONG_AGO, until=NEVER, bucket_s=60, queue="mail")) == []


def test_quantiles_lie_within_the_class_of_the_duration() -> None:
    found = [0] * CLASSES
    for seconds in (0.0001, 0.0015, 0.003, 0.003, 7.0, 90_000.0):
        found[class_of(seconds)] += 1
    median = quantile_s(found, 0.5)
    assert median is not None
    assert 0.002 < median <= 0.005
    assert quantile_s(found, 1.0) == 86_400.0
    assert quantile_s([0] * CLASSES, 0.5) is None
    assert class_of(86_400.0) == CLASSES - 2
