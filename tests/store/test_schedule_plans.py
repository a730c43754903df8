"""Statements about schedules use their indexes with 100,000 schedules and 100,000 ticks, and the scheduler reads no more than with 100."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from psycopg import sql

from everbeat.domain.schedule.model import DueSchedule
from everbeat.store import schedules
from everbeat.store.schedules import apply_declared, decide_ticks, list_due
from everbeat.store.statement import Statement, compose
from tests.store.conftest import StoreHarness
from tests.store.plans import filled, pages_of, plan, plan_of_trees, scans_of, vacuum
from tests.store.scheduling import STALE_MS, decision, due, put, sent, start_worker, version

ROWS = 100_000
TABLES = ("tasks", "schedules", "ticks")
MOST_OVER = {"list_due": 1.25, "decide_ticks": 1.6}
"""`decide_ticks` reads each schedule and each tick by its key, and an index of 100,000 rows is two pages deeper than one of 100."""

FILL = (
    """insert into {schema}.schedules (name, task, args, queue, priority, timing, timezone, missed, most, catchup_ms, overlap, jitter_ms, next_at)
       select 'user-' || n, 'work', '{{}}', 'default', 0, '{{"every_ms":3600000}}', 'UTC', 'latest', 100, 86400000, 'allow', 0,
           now() + n * interval '1 second' + interval '1 hour'
       from generate_series(1, %(rows)s) n""",
    """insert into {schema}.ticks (schedule, at, outcome, task_id)
       select 'user-' || n %% 100, now() - n * interval '1 second', 'SENT', gen_random_uuid() from generate_series(1, %(rows)s) n""",
    """update {schema}.tasks set schedule = 'user-' || right(id::text, 1)
       where state <> 'PENDING' and id in (select id from {schema}.tasks limit %(rows)s)""",
    "vacuum analyze {schema}.schedules",
    "vacuum analyze {schema}.ticks",
    "vacuum analyze {schema}.tasks",
)
DUE = tuple(f"due-{number:02}" for number in range(20))


class Loaded:
    """A harness, some due schedules among others, and a declared schedule."""

    def __init__(self, db: StoreHarness, *, rows: int) -> None:
        self.db = db
        for number, name in enumerate(DUE):
            put(
                db,
                name,
                overlap=("skip", "buffer_one", "cancel_other")[number % 3],
                pause_after_failures=3 if number == 0 else None,
            )
        start_worker(db, "declaring", version(1, "declared"))
        db.run(apply_declared(after_ms=STALE_MS))
        for text in FILL:
            given = {"rows": rows} if "rows" in text else None
            db.connection.execute(sql.SQL(text).format(schema=sql.Identifier(db.target.schema)), given)  # type: ignore[arg-type]
        self.due: tuple[DueSchedule, ...] = tuple(each for each in due(db).due if each.name in DUE)
        assert len(self.due) == len(DUE)


@pytest.fixture(scope="module")
def many(database_url: str) -> Iterator[Loaded]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        yield Loaded(db, rows=ROWS)


@pytest.fixture(scope="module")
def few(database_url: str) -> Iterator[Loaded]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        yield Loaded(db, rows=100)


@pytest.fixture(autouse=True)
def vacuumed(many: Loaded) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(many.db, *TABLES)


def buffers(loaded: Loaded, statement: Statement[Any]) -> int:
    """Return the pages that the statement touches. Fail if it scans a large table."""
    found = plan(loaded.db, statement)
    scans = [node for node in scans_of(found, TABLES) if node["Plan Rows"] > 1_000]
    assert scans == [], json.dumps(scans, indent=1)[:2000]
    return pages_of(found, statement, tables=())


def decided(loaded: Loaded) -> Statement[Any]:
    found = [decision(each, sent(each, cancels=each.rule.overlap == "cancel_other")) for each in loaded.due]
    return decide_ticks(found, channel=loaded.db.target.channel)


@pytest.mark.parametrize("name", MOST_OVER)
def test_a_pass_of_the_scheduler_reads_as_much_with_100_000_schedules_as_with_100(
    few: Loaded, many: Loaded, name: str
) -> None:  # S7
    def make(loaded: Loaded) -> Statement[Any]:
        return list_due(limit=200) if name == "list_due" else decided(loaded)

    least, most = (min(buffers(each, make(each)) for _ in range(3)) for each in (few, many))
    print(f"{least} and {most} pages")
    assert most <= MOST_OVER[name] * least


@pytest.mark.parametrize("name", MOST_OVER)
def test_a_supervisor_that_plans_before_it_knows_the_values_scans_no_table(many: Loaded, name: str) -> None:
    statement = list_due(limit=200) if name == "list_due" else decided(many)
    found = plan_of_trees(many.db, statement, generic=True)
    assert pages_of(found, statement, tables=TABLES) <= (100 if name == "list_due" else 1_500)


def test_a_pass_without_due_schedules_reads_a_few_pages(many: Loaded) -> None:
    found = buffers(many, list_due(limit=200, skipped=[*DUE, "declared"]))
    print(found)
    assert found <= 60


def test_statements_about_one_schedule_read_a_bounded_number_of_pages(many: Loaded) -> None:
    channel = many.db.target.channel
    tick = sent(many.due[0])
    for statement, most in (
        (schedules.read_schedule("user-7"), 60),
        (schedules.list_ticks("user-7", limit=10), 120),
        (schedules.list_sent_ticks("user-7", since=many.due[0].decided_to, until=many.due[0].now), 120),
        (schedules.list_live_runs("user-7"), 120),
        (schedules.pause_schedule("user-7", paused_by="ann"), 60),
        (schedules.resume_schedule("user-7"), 60),
        (schedules.delete_schedule("user-7"), 60),
        (schedules.run_schedule("user-7", task_id=uuid4(), channel=channel), 120),
        (schedules.backfill_ticks("due-00", [tick], channel=channel), 120),
        (schedules.list_schedules(limit=20), 400),
    ):
        found = buffers(many, statement)
        print(statement.name, found)
        assert found <= most, statement.name


def test_the_last_runs_of_many_schedules_are_found_by_their_keys(many: Loaded) -> None:
    """100 of the schedules have 1,000 ticks each, and the others none. Ten of the 100 had no run: their ticks were skipped."""
    statement = schedules.list_earlier_runs({f"user-{number}": many.due[0].now for number in range(500)})
    connection = many.db.connection
    with connection.transaction(force_rollback=True):
        skip = "update {schema}.ticks set outcome = 'SKIPPED', task_id = null where schedule = any(%s)"
        connection.execute(many.db.plain(skip), [[f"user-{number}" for number in range(10)]])
        listed = connection.execute(compose(statement.name, many.db.target.schema), statement.parameters)
        assert {row[0] for row in listed} == {f"user-{number}" for number in range(10, 100)}
        found = buffers(many, statement)
    print(found)
    assert found <= 4_000


def test_declarations_are_applied_without_reading_the_schedules_that_were_made_at_run_time(
    many: Loaded,
) -> None:
    found = buffers(many, apply_declared(after_ms=STALE_MS))
    print(found)
    assert found <= 120
