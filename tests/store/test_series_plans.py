"""Samples and rates read a limited number of pages: with 300,000 tasks, and with the rates of 30 days."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.store import inspection, reruns, retention, series
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import ROWS, filled, nodes, pages_of, plan

pytestmark = pytest.mark.long  # inserting the rows takes longer than most rooms of tests

LARGEST = 6 * 2 * 10_001 + 5_000
"""Each of six lanes has more than 10,000 due and scheduled tasks at most. Without a vacuum, each count reads the row of the task, too."""
HOUR_ROWS = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed)
select 3600, date_bin('1 hour', now(), timestamptz '2000-01-01 00:00+00') - (48 + n) * interval '1 hour', 'queue_' || q, 'task_' || k, '', 1, 1
from generate_series(1, 650) n cross join generate_series(1, 5) q cross join generate_series(1, 20) k
"""
MINUTE_ROWS = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed)
select 60, date_bin('1 minute', now(), timestamptz '2000-01-01 00:00+00') - n * interval '1 minute', 'queue_' || q, 'task_' || k,
    case when n <= 12 then 's' || s else '' end, 1, 1
from generate_series(0, 2820) n cross join generate_series(1, 5) q cross join generate_series(1, 20) k cross join generate_series(1, 3) s
where s = 1 or n <= 12
"""
SAMPLES = """
insert into {schema}.depths (seconds, at, queue, due, scheduled, suspended, claimed, running)
select kind.seconds, now() - n * kind.seconds * interval '1 second', 'queue_' || q, 1, 1, 1, 1, 1
from (values (10, 720), (60, 2880), (3600, 720)) kind (seconds, samples)
cross join lateral generate_series(1, kind.samples) n cross join generate_series(1, 20) q
"""


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[StoreHarness]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        for text in (HOUR_ROWS, MINUTE_ROWS, SAMPLES):
            db.connection.execute(db.plain(text))
        for table in ("rates", "depths"):
            db.connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
        yield db


def pages(db: StoreHarness, statement: Statement[Any]) -> int:
    return pages_of(plan(db, statement), statement, tables=("tasks", "rates", "depths"))


def test_a_sample_reads_a_limited_part_of_a_backlog(loaded: StoreHarness) -> None:
    """Each of the six lanes has more due and more scheduled tasks than are counted, except those of the smaller queue."""
    assert pages(loaded, series.sample_depths(taken_by="s1")) <= LARGEST
    few, many = (pages(loaded, series.sample_depths(taken_by="s1", most=most)) for most in (10, 100))
    assert few <= 2_500
    assert many - few <= 6 * 2 * 100


def test_a_list_of_queues_reads_a_limited_part_of_a_backlog(loaded: StoreHarness) -> None:
    assert pages(loaded, inspection.queues()) <= LARGEST


def test_a_sample_without_a_turn_reads_no_task(loaded: StoreHarness) -> None:
    assert loaded.run(series.sample_depths(taken_by="s1")) is not None
    assert pages(loaded, series.sample_depths(taken_by="s2")) <= 20
    loaded.connection.execute(loaded.plain("delete from {schema}.turns"))


def test_a_roll_up_reads_only_rows_that_are_not_added_up(loaded: StoreHarness) -> None:
    statement = series.roll_up_rates()
    found = plan(loaded, statement)
    used = {node.get("Index Name") for node in nodes(found["Plan"])}
    assert "rates_by_supervisor" in used
    assert pages(loaded, statement) <= 25_000
    while loaded.run(statement):
        pass
    assert pages(loaded, statement) <= 1_000, "the entries of deleted rows stay in the index until a vacuum"


def test_a_look_for_reruns_reads_only_the_recovered_tasks(loaded: StoreHarness) -> None:
    ids = loaded.connection.execute(loaded.plain("select id from {schema}.tasks limit 100")).fetchall()
    assert pages(loaded, reruns.reruns([(task_id, 1) for (task_id,) in ids])) <= 100 * 20


def test_an_hour_of_rates_reads_no_older_rows(loaded: StoreHarness) -> None:
    now = datetime.now(UTC)
    hour = series.rates(since=now - timedelta(hours=1), until=now, bucket_s=60, by_queue=True)
    assert pages(loaded, hour) <= 3_000
    days = series.rates(since=now - timedelta(days=10), until=now - timedelta(days=7), bucket_s=3_600)
    assert pages(loaded, days) <= 5_000


def test_a_write_of_rates_reads_only_its_own_rows(loaded: StoreHarness) -> None:
    at = datetime.now(UTC).replace(second=0, microsecond=0)
    rows = [
        {
            "at": at, "queue": "queue_1", "name": f"task_{n}", "started": 1, "completed": 0, "failed": 0, "retried": 0, "cancelled": 0,
            "suspended": 0, "released": 0, "crashed": 0, "lost": 0, "expired": 0, "wait_s": 0, "run_s": 0, "waits": [0] * 24, "runs": [0] * 24,
        }
        for n in range(100)
    ]  # fmt: skip
    assert pages(loaded, series.write_rates(rows, supervisor="s1")) <= 3_000


def test_reads_of_samples_and_their_retention_use_the_index(loaded: StoreHarness) -> None:
    now = datetime.now(UTC)
    assert pages(loaded, series.depths(since=now - timedelta(hours=1), until=now, bucket_s=60)) <= 500
    assert pages(loaded, series.latest_depths()) <= 50
    assert pages(loaded, series.sizes(since=now - timedelta(hours=1), until=now, bucket_s=60)) <= 500
    long_ago = datetime(2000, 1, 1, tzinfo=UTC)
    for seconds in (10, 60, 3_600):
        assert pages(loaded, retention.prune_depths(seconds, limit=1_000, after=long_ago)) <= 500
    assert pages(loaded, retention.prune_rates(limit=1_000, after=long_ago)) <= 500


def test_a_count_does_not_read_a_whole_backlog_that_the_statistics_do_not_know(loaded: StoreHarness) -> None:
    insert = (
        "insert into {schema}.tasks (id, name, queue, priority, args, state, sent_at, enqueued_at)"
        " select gen_random_uuid(), 'work', 'default', 1, '{{}}', 'PENDING', now(), now() - interval '1 hour' + n * interval '100 ms'"
        " from generate_series(1, 72000) n"
    )
    fetched = "select pg_stat_get_xact_tuples_fetched('{schema}.tasks'::regclass)"
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute(loaded.plain(insert))
        before = loaded.connection.execute(loaded.plain(fetched)).fetchone()
        count = "select due, later from {schema}.count_lane('default', 1::smallint, null, 10000)"
        assert loaded.connection.execute(loaded.plain(count)).fetchone() == (10_001, 10_001)
        after = loaded.connection.execute(loaded.plain(fetched)).fetchone()
    assert before is not None
    assert after is not None
    print(f"{after[0] - before[0]} rows of tasks read")
    assert after[0] - before[0] <= 2 * 10_001
