"""Sums of rates count each event once, charts of sums equal charts of rates, and old sums are deleted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

from everbeat.domain.charts import RANGES, ChartRange, spans_of
from everbeat.domain.series import SUMS_KEPT_S, RateBucket
from everbeat.store import charts, migrating, retention, series
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.plans import pages_of, plan
from tests.store.test_series import LONG_AGO, counts, minute, now, shift

FILL = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed, wait_s, waits)
select kind.seconds, date_bin(kind.seconds * interval '1 second', now() - kind.since, timestamptz '2000-01-01 00:00+00')
    - n * kind.seconds * interval '1 second', 'queue_' || q, 'task_' || k, case when kind.seconds = 60 and n < 9 then 's1' else '' end,
    1 + n %% 7 + q, n %% 5, 0.25, array_fill(0::bigint, array[20]) || array[n %% 3, 0, q, 0]::bigint[]
from (values (60, 2900, interval '0'), (3600, 680, interval '49 hours')) kind (seconds, count, since)
cross join lateral generate_series(0, kind.count, case when kind.seconds = 60 then %(every)s else 1 end) n
cross join generate_series(1, %(queues)s) q cross join generate_series(1, %(names)s) k
"""
SUMS = """
insert into {schema}.rate_sums
select kind.seconds, q = 0, date_bin(kind.seconds * interval '1 second', now() - kind.settled, timestamptz '2000-01-01 00:00+00')
    - n * kind.seconds * interval '1 second', case when q > 0 then 'queue_' || q else '' end, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, zeros, zeros
from (values (60, interval '12 min', 110), (300, '20 min', 570), (3600, '2 h', 82), (43200, '61 h', 58)) kind (seconds, settled, count)
cross join lateral generate_series(0, kind.count) n cross join generate_series(0, %(queues)s) q cross join array_fill(0::bigint, array[24]) zeros
"""
ACTIONS = """
insert into {schema}.audit_log (at, actor, origin, action, outcome)
select now() - n * interval '25 s', 'ann', 'web', case when mod(n, 9000) = 0 then 'pause' else 'cancel' end, 'done' from generate_series(1, 100000) n
"""


def sum_all(db: StoreHarness) -> int:
    db.run(series.sum_minutes())
    steps = 0
    while db.run(series.sum_rates()):
        steps += 1
    return steps


def summed(db: StoreHarness, seconds: int) -> list[tuple[bool, str, int]]:
    query = "select is_total, queue, started from {schema}.rate_sums where seconds = %s order by at, is_total, queue"
    return list(db.connection.execute(db.plain(query), [seconds]).fetchall())


def events(db: StoreHarness) -> list[tuple[bool, str, int]]:
    """Return the sums of the minutes in which something happened."""
    return [each for each in summed(db, 60) if each[2]]


def write(db: StoreHarness, *rows: Any, ago: str) -> None:
    db.run(series.write_rates(rows, supervisor="s1"))
    shift(db, ago)


def test_a_minute_is_summed_once_by_queue_and_of_all_queues(db: StoreHarness) -> None:
    at = minute(db)
    write(
        db,
        counts(at, "mail", "a", started=3),
        counts(at, "mail", "b", started=4),
        counts(at, "film", "a", started=5),
        ago="12 minutes",
    )
    sum_all(db)
    first = [(False, "film", 5), (False, "mail", 7), (True, "", 12)]
    assert summed(db, 60)[:3] == first
    assert sum_all(db) < len(SUMS_KEPT_S), "only spans that ended meanwhile"
    assert summed(db, 60)[:3] == first


def test_a_span_that_is_still_written_is_not_summed(db: StoreHarness) -> None:
    write(db, counts(minute(db), started=3), ago="9 minutes")
    assert sum_all(db) == 0
    assert not summed(db, 300)


def test_a_minute_that_is_written_after_its_end_is_summed_again(db: StoreHarness) -> None:
    write(db, counts(minute(db), started=3), ago="2 minutes")
    sum_all(db)
    assert events(db) == [(False, "default", 3), (True, "", 3)]
    at = db.connection.execute(db.plain("select at from {schema}.rates")).fetchone()
    assert at is not None
    db.run(series.write_rates([counts(at[0], started=5)], supervisor="s1"))
    db.run(series.write_rates([counts(at[0], "mail", started=4)], supervisor="s2"))
    assert shown(db) == 3, "until the next sums"
    sum_all(db)
    assert events(db) == [(False, "default", 5), (False, "mail", 4), (True, "", 9)]
    assert shown(db) == 9


def test_an_older_look_does_not_replace_a_later_sum(db: StoreHarness) -> None:
    write(db, counts(minute(db), started=3), ago="2 minutes")
    sum_all(db)
    db.connection.execute(
        db.plain("update {schema}.rates set started = 2, waits = array_fill(7::bigint, array[24])")
    )
    sum_all(db)
    assert events(db) == [(False, "default", 3), (True, "", 3)]


def test_minutes_of_a_time_without_sums_are_summed_later(db: StoreHarness) -> None:
    """So charts find no gap after an hour in which no tree of this version took a sample."""
    write(db, counts(minute(db), started=3), ago="70 minutes")
    sum_all(db)
    db.connection.execute(
        db.plain("delete from {schema}.rate_sums where seconds = 60 and at > now() - interval '60 minutes'")
    )
    write(db, counts(minute(db), started=4), ago="30 minutes")
    began = minute(db)
    sum_all(db)
    found = db.connection.execute(
        db.plain("select distinct at from {schema}.rate_sums where seconds = 60 and is_total order by at")
    ).fetchall()
    assert found[0][0] < now(db) - timedelta(minutes=60)
    assert found[-1][0] >= began - timedelta(minutes=1)
    assert {after - before for (before,), (after,) in itertools.pairwise(found)} == {timedelta(minutes=1)}


def shown(db: StoreHarness) -> int:
    since, until = bounds(RANGES[0], now(db))
    found = db.run(charts.total_rates(RANGES[0], since=since, until=until, queue=None))
    return sum(each.started for each in found)


def test_an_installation_without_rates_has_nothing_to_sum(db: StoreHarness) -> None:
    assert not db.run(series.sum_rates())


def test_a_span_in_which_nothing_happened_has_a_total_of_zero(db: StoreHarness) -> None:
    write(db, counts(minute(db), started=3), ago="30 minutes")
    sum_all(db)
    started = [count for is_total, _, count in summed(db, 60) if is_total]
    assert started[0] == 3
    assert set(started[1:]) == {0}
    assert len(started) >= 29


def test_two_sessions_that_sum_the_same_span_write_it_once(db: StoreHarness) -> None:
    write(db, counts(minute(db), started=3), ago="12 minutes")
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: sum_all(db), range(4)))
    assert summed(db, 60)[:2] == [(False, "default", 3), (True, "", 3)]
    assert {count for _, _, count in summed(db, 60)[2:]} <= {0}


def test_charts_of_sums_equal_those_of_rates_now_and_in_the_past(db: StoreHarness) -> None:
    """Summed spans, older ones whose sums are deleted, and minutes that are not summed yet are each counted once."""
    db.connection.execute(db.plain(FILL), {"queues": 2, "names": 1, "every": 7})
    assert sum_all(db) > 500
    for chosen, days, queue in itertools.product(RANGES, (0, 1, 9), (None, "queue_1")):
        since, until = bounds(chosen, now(db) - timedelta(days=days))
        every = series.rates(since=since, until=until, bucket_s=chosen.bucket_s, queue=queue)
        found = charts.total_rates(chosen, since=since, until=until, queue=queue)
        case = (chosen.name, days, queue)
        assert numbers(db.run(found)) == numbers(db.run(every)) != {}, case
        by_queue = db.run(series.rates(since=since, until=until, bucket_s=86_400 * 90, by_queue=True))
        busiest = db.run(charts.busiest_queues(chosen, since=since, until=until, limit=9))
        assert sum(each.started for each in busiest) == sum(each.started for each in by_queue), case
        ends = db.run(charts.queue_ends(chosen, ["queue_1", "queue_2"], since=since, until=until))
        assert sum(each.count for each in ends) == sum(each.completed for each in by_queue), case


def test_rates_that_other_code_has_not_summed_are_counted(db: StoreHarness) -> None:
    """Trees of an earlier version write rates and sum none."""
    write(db, counts(minute(db), started=3), ago="40 minutes")
    sum_all(db)
    db.run(series.write_rates([counts(minute(db), started=5)], supervisor="s2"))
    assert shown(db) == 8


def set_back(db: StoreHarness, by: str) -> None:
    """Set the clock of the server back: all that is stored is then later by as much."""
    for table in ("rates", "rate_sums", "depths", "depth_peaks"):
        for step in (f"100 years {by}", "-100 years"):  # so that no row meets another one on the way
            db.connection.execute(db.plain(f"update {{schema}}.{table} set at = at + %s::interval"), [step])


def test_charts_show_counts_after_the_clock_was_set_back(db: StoreHarness) -> None:
    write(db, counts(minute(db), started=3), ago="3 hours")
    sum_all(db)
    set_back(db, "1 hour")
    db.run(series.delete_early())
    set_back(db, "-25 minutes")  # time passes
    for number, ago in enumerate((0, 2, 15)):
        db.run(series.write_rates([counts(minute(db), started=5)], supervisor=f"s{number}"))
        aged = db.plain("update {schema}.rates set at = at - %s where supervisor = %s")
        db.connection.execute(aged, [timedelta(minutes=ago), f"s{number}"])
    assert shown(db) == 15
    sum_all(db)
    assert shown(db) == 15
    assert sum(started for is_total, _, started in summed(db, 60) if is_total) == 10


def test_only_sums_of_spans_that_are_not_over_are_early(db: StoreHarness) -> None:
    db.connection.execute(db.plain(FILL), {"queues": 1, "names": 1, "every": 50})
    sum_all(db)
    before = {seconds: len(summed(db, seconds)) for seconds in SUMS_KEPT_S}
    db.run(series.delete_early())
    assert {seconds: len(summed(db, seconds)) for seconds in SUMS_KEPT_S} == before
    set_back(db, "1 hour")
    db.run(series.delete_early())
    ends = db.connection.execute(
        db.plain(
            "select seconds, max(at + seconds * interval '1 s') - now() from {schema}.rate_sums group by 1"
        )
    )
    late = {seconds: end.total_seconds() for seconds, end in ends.fetchall()}
    assert -120 < late[60] <= 0
    assert -1_200 < late[300] <= -600
    assert -2 * 3_600 < late[3_600] <= -600


def test_old_sums_are_deleted_and_younger_ones_are_kept(db: StoreHarness) -> None:
    db.connection.execute(db.plain(FILL), {"queues": 1, "names": 1, "every": 50})
    sum_all(db)
    check_retention(db, "rate_sums", retention.prune_rate_sums)


def check_retention(db: StoreHarness, table: str, prune: Callable[..., Statement[Any]]) -> None:
    """Make half of the rows of each length too old, and check that only the younger ones are left after a walk of the pruner."""

    def one(statement: str, *values: object) -> Any:
        row = db.connection.execute(db.plain(statement.replace("_table_", table)), values).fetchone()
        assert row is not None
        return row[0]

    began = now(db)
    for seconds, kept_s in SUMS_KEPT_S.items():
        before = one("select count(*) from {schema}._table_ where seconds = %s", seconds)
        aged = db.plain(
            "update {schema}._table_ set at = at - %s where seconds = %s".replace("_table_", table)
        )
        db.connection.execute(aged, [timedelta(seconds=kept_s // 2), seconds])
        for is_total in (False, True):
            step = prune(seconds, is_total=is_total, limit=10_000, after=LONG_AGO)
            assert db.run(step).next_after is None
        assert 0 < one("select count(*) from {schema}._table_ where seconds = %s", seconds) < before
        oldest = one("select min(at) from {schema}._table_ where seconds = %s", seconds)
        assert oldest >= began - timedelta(seconds=kept_s)


def test_charts_of_100_000_rates_and_actions_read_few_pages(database_url: str) -> None:  # O2
    target = Target.parse(database_url, schema=f"test_sums_{uuid4().hex[:8]}")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        # VACUUM marks a page as visible to all only if the commits of its rows are in the WAL on disk.
        connection.execute("set synchronous_commit = on")
        connection.execute(db.plain(FILL), {"queues": 5, "names": 7, "every": 1})
        connection.execute(db.plain(SUMS), {"queues": 100})
        connection.execute(db.plain(ACTIONS))
        for table in ("rates", "rate_sums", "audit_log"):
            connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
        most = {}
        for chosen in RANGES:
            since, until = bounds(chosen, now(db))
            for statement in (
                charts.total_rates(chosen, since=since, until=until, queue=None),
                charts.total_rates(chosen, since=since, until=until, queue="queue_1"),
                charts.busiest_queues(chosen, since=since, until=until, limit=5),
                charts.queue_ends(chosen, ["queue_1", "queue_2"], since=since, until=until),
            ):
                most[statement.name, chosen.name] = touched(db, statement)
        marks = touched(db, charts.marks(since=since, until=until))
        most["series/sum_rates", ""] = touched(db, series.sum_rates())
        most["series/sum_minutes", ""] = touched(db, series.sum_minutes())
        most["series/delete_early", ""] = touched(db, series.delete_early())
        connection.execute(db.plain("drop schema {schema} cascade"))
        db.database.close()
    print(most, marks)
    assert marks <= 100
    assert {each: pages for each, pages in most.items() if pages > 5_000} == {}


def bounds(chosen: ChartRange, at: datetime) -> tuple[datetime, datetime]:
    """Return the beginning and the end of a range whose last span contains a moment."""
    spans = spans_of(chosen, now=at)
    return spans[0], spans[-1] + timedelta(seconds=chosen.bucket_s)


def numbers(found: list[RateBucket]) -> dict[Any, Any]:
    return {
        each.at: (each.started, each.completed, each.wait_s, each.waits) for each in found if each.started
    }


def touched(db: StoreHarness, statement: Statement[Any]) -> int:
    return pages_of(plan(db, statement), statement, tables=["rates", "rate_sums", "audit_log"])
