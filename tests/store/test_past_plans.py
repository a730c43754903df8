"""The statements of the as-of view and of charts read a bounded part of their tables: with 300,000 tasks and 200,000 attempts of 30 days."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.domain.charts import RANGES
from everbeat.store import charts, past, series
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import ROWS, filled, nodes, pages_of, plan
from tests.store.test_series_plans import SAMPLES

pytestmark = pytest.mark.long  # inserting the rows takes longer than most rooms of tests

ATTEMPTS = """
insert into {schema}.attempts (task_id, attempt, claim_id, fence, worker_id, claimed_at, started_at, ended_at, outcome, will_retry)
select gen_random_uuid(), 1, gen_random_uuid(), 1, 'w1', a.ended_at - a.ran, a.ended_at - a.ran, a.ended_at, 'COMPLETED', false
from (
    select now() - %(since)s::interval + n * (%(since)s::interval - %(until)s::interval) / 100000 as ended_at,
        case when n %% 250 = 0 then interval '20 minutes' else interval '300 ms' end as ran
    from generate_series(1, 100000) n
) a
"""
RECOVERIES = """
insert into {schema}.recoveries (task_id, name, queue, fence, claim_id, attempt, worker_id, was, cause, noticed_by, noticed_at, action)
select gen_random_uuid(), 'work', 'default', 1, gen_random_uuid(), 1, 'w1', 'RUNNING', 'SIGKILL', 'child_exit',
    now() - n * interval '20 seconds', 'retry'
from generate_series(1, 100000) n
"""
BEATS = """
insert into {schema}.beats (supervisor_id, seq, sent_at, held)
select 's' || s, n, now() - interval '24 hours' + n * interval '10 seconds', 1 from generate_series(1, 8640) n cross join generate_series(1, 12) s
"""
ACTIONS = """
insert into {schema}.audit_log (at, actor, origin, action, target, outcome)
select now() - n * interval '1 minute', 'ann', 'web', case when mod(n, 50) = 0 then 'pause' else 'retry' end, 'queue q' || mod(n, 7), 'done'
from generate_series(1, 100000) n
"""
RATES = """
insert into {schema}.rates (seconds, at, queue, name, supervisor, started, completed)
select kind.seconds, date_bin('1 hour', now(), timestamptz '2000-01-01 00:00+00') - kind.since - n * kind.seconds * interval '1 second',
    'queue_' || q, 'task_' || k, '', 1, 1
from (values (60, 2820, interval '0'), (3600, 650, interval '48 hours')) kind (seconds, count, since)
cross join lateral generate_series(1, kind.count) n cross join generate_series(1, 5) q cross join generate_series(1, 7) k
"""
TABLES = (
    "attempts",
    "recoveries",
    "beats",
    "audit_log",
    "rates",
    "rate_sums",
    "depths",
    "supervisors",
    "workers",
)
LARGE = {"tasks", *TABLES} - {"rate_sums", "supervisors", "workers"}


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[StoreHarness]:
    """Yield a schema whose attempts fill pages that retention has emptied, as after some months."""
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        connection = db.connection
        connection.execute(db.plain(ATTEMPTS), {"since": "45 days", "until": "15 days"})
        connection.execute(db.plain("vacuum {schema}.attempts"))  # summarises the pages
        connection.execute(
            db.plain("delete from {schema}.attempts where ended_at < now() - interval '30 days'")
        )
        connection.execute(db.plain("vacuum {schema}.attempts"))
        connection.execute(db.plain(ATTEMPTS), {"since": "15 days", "until": "0 days"})
        for text in (RECOVERIES, BEATS, ACTIONS, RATES, SAMPLES):
            connection.execute(db.plain(text))
        while db.run(series.sum_rates()):
            pass
        for table in TABLES:
            connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
        yield db


def pages(db: StoreHarness, statement: Statement[Any]) -> int:
    return pages_of(plan(db, statement), statement, tables=LARGE)


@pytest.mark.parametrize("days", [0.01, 5, 20])
def test_the_attempts_of_a_moment_are_found_by_two_indexes(loaded: StoreHarness, days: float) -> None:
    statement = past.runs(datetime.now(UTC) - timedelta(days=days), limit=1_001)
    found = plan(loaded, statement)
    used = {node.get("Index Name") for node in nodes(found["Plan"])}
    assert {"attempts_long", "attempts_by_end"} <= used
    assert pages(loaded, statement) <= 300


def test_the_long_attempts_of_a_moment_are_exactly_those_that_cover_it(loaded: StoreHarness) -> None:
    at = datetime.now(UTC) - timedelta(days=5)
    text = "select count(*) from {schema}.attempts where started_at <= %(at)s and ended_at > %(at)s"
    row = loaded.connection.execute(loaded.plain(text), {"at": at}).fetchone()
    assert row is not None
    ended = [run for run in loaded.run(past.runs(at, limit=1_000)) if run.ended_at is not None]
    assert len(ended) == row[0] >= 1


def test_the_other_records_of_a_moment_are_found_by_their_time(loaded: StoreHarness) -> None:
    at = datetime.now(UTC) - timedelta(hours=12)
    assert pages(loaded, past.sample_trees(at, window_ms=900_000)) <= 3_000
    assert pages(loaded, past.beats(at, window_ms=90_000)) <= 300
    assert pages(loaded, past.recoveries(at, window_ms=86_400_000, limit=1_000)) <= 15_000
    assert pages(loaded, past.depths(at)) <= 300
    assert pages(loaded, past.settings(at)) <= 1_500


@pytest.mark.parametrize("chosen", RANGES, ids=lambda chosen: chosen.name)
def test_charts_read_the_rows_of_their_range(loaded: StoreHarness, chosen: Any) -> None:
    until = datetime.now(UTC)
    since = until - timedelta(seconds=chosen.seconds)
    assert pages(loaded, charts.total_depths(chosen, since=since, until=until, queue=None)) <= 1_500
    assert pages(loaded, charts.total_depths(chosen, since=since, until=until, queue="queue_1")) <= 1_500
    assert pages(loaded, charts.queue_depths(chosen, ["queue_1"], since=since, until=until)) <= 1_500
    assert pages(loaded, charts.busiest_queues(chosen, since=since, until=until, limit=8)) <= 3_000
    assert pages(loaded, charts.queue_ends(chosen, ["queue_1"], since=since, until=until)) <= 3_000
    assert pages(loaded, charts.marks(since=since, until=until)) <= 10_000
