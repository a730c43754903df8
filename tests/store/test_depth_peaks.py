"""Peaks of depths are found once, charts of peaks equal charts of samples, and old peaks are deleted."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from msgspec import structs

from everbeat.domain.charts import RANGES, ChartRange
from everbeat.domain.series import SUMS_KEPT_S, DepthBucket
from everbeat.store import charts, migrating, retention, series
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.plans import pages_of, plan
from tests.store.test_rate_sums import bounds, check_retention, set_back
from tests.store.test_series import now

SAMPLE = """
insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)
values (%(seconds)s, now() - %(ago)s::interval, %(queue)s, %(due)s, 0, 0, 0, 1, 5, %(at_least)s)
"""
TABLES = "insert into {schema}.depths (seconds, at, table_bytes) values (60, now() - %(ago)s::interval, 1)"
FILL = """
insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running, oldest_due_s, at_least)
select kind.seconds, now() - kind.since - n * kind.seconds * interval '1 second', 'queue_' || nullif(q, 0), c.due,
    c.due %% 11, q * c.due / c.due, c.due %% 5, c.due %% 2, c.due %% 97, case when c.due %% 13 = 0 then array['due'] end
from (values (60, 2880, interval '5 seconds'), (3600, 720, '25 seconds')) kind (seconds, count, since)
cross join lateral generate_series(0, kind.count, case when kind.seconds = 60 then %(every)s else 1 end) n
cross join generate_series(0, %(queues)s) q
cross join lateral (select 1 + (n * 7919 + nullif(q, 0) * 31) %% 1009 as due) c
"""
PEAKS = """
insert into {schema}.depth_peaks
select kind.seconds, q = 0, date_bin(kind.seconds * interval '1 second', now() - interval '10 min', timestamptz '2000-01-01 00:00+00')
    - n * kind.seconds * interval '1 second', case when q > 0 then 'queue_' || q else '' end, 1, 1, 1, 1, 1, 1, false
from (values (60, 110), (300, 570), (3600, 82), (43200, 60)) kind (seconds, count)
cross join lateral generate_series(1, kind.count) n cross join generate_series(0, %(queues)s) q
"""


def add_all(db: StoreHarness) -> int:
    steps = 0
    while db.run(series.add_peaks()):
        steps += 1
    return steps


def peaks(db: StoreHarness, seconds: int) -> list[tuple[bool, str, int | None]]:
    query = "select is_total, queue, due from {schema}.depth_peaks where seconds = %s order by at, is_total, queue"
    return list(db.connection.execute(db.plain(query), [seconds]).fetchall())


def sample(db: StoreHarness, queue: str, due: int, *, ago: str, seconds: int = 60) -> None:
    given = {"seconds": seconds, "queue": queue, "due": due, "ago": ago, "at_least": ["due"]}
    db.connection.execute(db.plain(SAMPLE), given)


def chart(
    db: StoreHarness, name: str = "1h", *, queue: str | None = None, at: datetime | None = None
) -> list[DepthBucket]:
    """Return the chart of a range that ends at a time, which is now by default."""
    chosen = chosen_range(name)
    since, until = bounds(chosen, now(db) if at is None else at)
    return db.run(charts.total_depths(chosen, since=since, until=until, queue=queue))


def lines(db: StoreHarness, name: str, *, at: datetime) -> list[charts.QueueSpan]:
    chosen = chosen_range(name)
    since, until = bounds(chosen, at)
    return db.run(charts.queue_depths(chosen, ["queue_1", "queue_2"], since=since, until=until))


def chosen_range(name: str) -> ChartRange:
    return structs.replace(next(each for each in RANGES if each.name == name), depth_seconds=(60, 3_600))


def test_a_span_is_added_once_for_each_queue_and_for_all_queues(db: StoreHarness) -> None:
    sample(db, "mail", 3, ago="12 minutes")
    db.connection.execute(db.plain("update {schema}.depths set at = date_bin('1 minute', at, 'epoch')"))
    sample(db, "film", 4, ago="0 minutes")
    db.connection.execute(
        db.plain(
            "update {schema}.depths set at = (select min(at) from {schema}.depths) + interval '1 second'"
        )
    )
    assert add_all(db) >= 1
    first = [(False, "film", 4), (False, "mail", 3), (True, "", 7)]
    assert peaks(db, 60)[:3] == first
    assert add_all(db) <= len(SUMS_KEPT_S), "only spans that ended meanwhile"
    assert peaks(db, 60)[:3] == first


def test_two_queues_that_were_full_at_different_times_do_not_add_up(db: StoreHarness) -> None:
    for queue, due, ago in (("mail", 8, "50 hours"), ("film", 9, "51 hours"), ("mail", 2, "51 hours")):
        sample(db, queue, due, ago=ago, seconds=3_600)
    db.connection.execute(
        db.plain("update {schema}.depths set at = date_bin('1 hour', at, 'epoch') - interval '15 hours'")
    )
    add_all(db)
    per_hour = {due for is_total, _, due in peaks(db, 43_200) if is_total}
    assert max(due for due in per_hour if due is not None) == 11
    assert max(each.due for each in chart(db, "30d")) == 11


def test_a_span_without_a_sample_is_not_drawn_and_an_empty_one_is_zero(db: StoreHarness) -> None:
    sample(db, "mail", 3, ago="40 minutes")
    db.connection.execute(db.plain(TABLES), {"ago": "30 minutes"})
    before = chart(db)
    assert add_all(db) > 20
    assert [each.due for each in chart(db)] == [3, 0]
    assert chart(db) == before
    assert [each.due for each in chart(db, queue="film")] == [0, 0]
    assert {due for is_total, _, due in peaks(db, 60) if is_total} == {3, 0, None}


def test_a_span_that_ended_a_moment_ago_is_not_added(db: StoreHarness) -> None:
    sample(db, "mail", 3, ago="9 minutes")
    assert add_all(db) == 0


def test_peaks_are_found_again_after_the_clock_was_set_back(db: StoreHarness) -> None:
    sample(db, "mail", 3, ago="45 minutes")
    add_all(db)
    set_back(db, "30 minutes")
    db.run(series.delete_early())
    set_back(db, "-31 minutes")  # time passes
    sample(db, "mail", 9, ago="15 minutes")
    add_all(db)
    assert [each.due for each in chart(db)] == [3, 9]
    assert [due for is_total, _, due in peaks(db, 60) if is_total and due] == [3, 9]


def test_an_installation_without_samples_has_no_peaks(db: StoreHarness) -> None:
    assert not db.run(series.add_peaks())
    assert chart(db) == []


def test_two_sessions_that_add_the_same_span_write_it_once(db: StoreHarness) -> None:
    sample(db, "mail", 3, ago="15 minutes")
    with ThreadPoolExecutor(4) as threads:
        steps = sum(threads.map(lambda _: add_all(db), range(4)))
    assert steps >= 1
    assert peaks(db, 60)[:2] == [(False, "mail", 3), (True, "", 3)]
    assert {due for _, _, due in peaks(db, 60)[2:]} <= {None}


def test_charts_of_peaks_equal_those_of_samples_now_and_in_the_past(db: StoreHarness) -> None:
    """Of added spans, of older ones whose peaks are deleted, and of minutes that are not added yet."""
    db.connection.execute(db.plain(FILL), {"queues": 2, "every": 7})
    times = [now(db) - timedelta(days=days) for days in (0, 1, 9)]
    cases = list(itertools.product(("1h", "6h", "48h", "30d"), times, (None, "queue_1", "queue_3")))
    every = [chart(db, name, at=at, queue=queue) for name, at, queue in cases]
    due = [lines(db, name, at=at) for name, at, _ in cases]
    assert add_all(db) > 500
    for case, charted, lined in zip(cases, every, due, strict=True):
        name, at, queue = case
        assert chart(db, name, at=at, queue=queue) == charted != [], case
        assert lines(db, name, at=at) == lined != [], case


def test_samples_that_are_younger_than_the_peaks_are_drawn(db: StoreHarness) -> None:
    """Trees of an earlier version sample and store no peaks."""
    sample(db, "mail", 3, ago="40 minutes")
    add_all(db)
    sample(db, "mail", 5, ago="5 minutes")
    sample(db, "mail", 6, ago="0 minutes")
    assert [each.due for each in chart(db)] == [3, 5, 6]
    assert [each.due for each in chart(db, queue="mail")] == [3, 5, 6]
    assert chart(db)[0].at_least == ["due"]


def test_old_peaks_are_deleted_and_younger_ones_are_kept(db: StoreHarness) -> None:
    db.connection.execute(db.plain(FILL), {"queues": 1, "every": 50})
    add_all(db)
    check_retention(db, "depth_peaks", retention.prune_depth_peaks)


def test_charts_of_200_queues_read_few_pages_of_200_000_samples(database_url: str) -> None:  # O2
    target = Target.parse(database_url, schema=f"test_peaks_{uuid4().hex[:8]}")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        # VACUUM marks a page as visible to all only if the commits of its rows are in the WAL on disk.
        connection.execute("set synchronous_commit = on")
        connection.execute(db.plain(FILL), {"queues": 200, "every": 10})
        connection.execute(db.plain(PEAKS), {"queues": 200})
        for table in ("depths", "depth_peaks"):
            connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
        most = {}
        queues = [f"queue_{n}" for n in range(100)]
        for chosen in RANGES:
            since, until = bounds(chosen, now(db))
            for key, statement in (
                ("total", charts.total_depths(chosen, since=since, until=until, queue=None)),
                ("queue", charts.total_depths(chosen, since=since, until=until, queue="queue_1")),
                ("lines", charts.queue_depths(chosen, queues, since=since, until=until)),
            ):
                most[key, chosen.name] = touched(db, statement)
        most["add", ""] = touched(db, series.add_peaks())
        connection.execute(db.plain("drop schema {schema} cascade"))
        db.database.close()
    print(most)
    assert {each: pages for each, pages in most.items() if pages > MOST_PAGES[each[0]]} == {}


MOST_PAGES = {"total": 1_500, "queue": 1_500, "lines": 12_000, "add": 3_000}


def touched(db: StoreHarness, statement: Statement[Any]) -> int:
    return pages_of(plan(db, statement), statement, tables=["depths", "depth_peaks"])
