"""Statements about batches and gathers use their indexes with 100,000 tasks, batches and events: few pages, no table scan."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.task.states import TaskState
from everbeat.store import batches, history, inspection, leases, retention, steps
from everbeat.store.leases import Settlement
from everbeat.store.statement import Statement
from everbeat.store.workflows import happened
from tests.store.conftest import StoreHarness
from tests.store.plans import check_plans, filled, held, nodes, plan, vacuum
from tests.store.test_batches import new_task, portion

ROWS = 100_000

# One batch has 30,000 waiting tasks. 100,000 batches have ended, 1,000 are live, and half of all are gathers.
FILL = (
    "insert into {schema}.batches (id, name) values (%(busy)s, 'busy')",
    """insert into {schema}.batches (id, name, waiter_id, sealed_at, ended_at)
       select gen_random_uuid(), 'w', case when n %% 2 = 0 then gen_random_uuid() end, now(), case when n > 1000 then now() end
       from generate_series(1, %(rows)s) n""",
    """insert into {schema}.batch_events (batch_id, state, number)
       select b.id, 'COMPLETED', 1 from {schema}.batches b cross join generate_series(1, 100) n where b.ended_at is null limit %(rows)s""",
    """update {schema}.tasks set batch_id = %(busy)s
       where id in (select id from {schema}.tasks where state = 'PENDING' limit 30000)""",
    """update {schema}.tasks set batch_id = %(busy)s where state = 'RUNNING'""",
    "update {schema}.batches set total = 30500 where id = %(busy)s",
    "vacuum analyze {schema}.tasks",
    "vacuum analyze {schema}.batches",
    "vacuum analyze {schema}.batch_events",
)
TABLES = ("tasks", "batches", "batch_events", "steps")


class Loaded:
    """The harness, a large batch, and a running task of it."""

    def __init__(self, db: StoreHarness) -> None:
        self.db = db
        self.task_id, self.claim_id = held(db, 1)[0]
        self.busy = uuid4()
        given = {"rows": ROWS, "busy": self.busy}
        for text in FILL:
            used = {name: value for name, value in given.items() if f"%({name})s" in text}
            db.connection.execute(
                sql.SQL(text).format(schema=sql.Identifier(db.target.schema)),  # type: ignore[arg-type]
                used or None,
            )


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[Loaded]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        yield Loaded(db)


@pytest.fixture(autouse=True)
def vacuumed(loaded: Loaded) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(loaded.db, *TABLES)


def check_plan(loaded: Loaded, statement: Statement[Any], *, pages: int) -> None:
    check_plans(loaded.db, statement, pages=pages, tables=TABLES)


def test_statements_of_gathers_read_a_bounded_number_of_pages(loaded: Loaded) -> None:
    lease, channel = (loaded.task_id, loaded.claim_id), loaded.db.target.channel
    check_plan(
        loaded, steps.send_children(*lease, portion(loaded.task_id, 500), channel=channel), pages=20_000
    )
    batch_id = portion(loaded.task_id).batch_id
    check_plan(loaded, steps.join_children(*lease, step="gather", batch_id=batch_id), pages=100)
    found = loaded.db.connection.execute(
        loaded.db.plain("select id from {schema}.tasks limit 500")
    ).fetchall()
    check_plan(loaded, steps.list_children([row[0] for row in found]), pages=4_000)
    check_plan(loaded, steps.list_children([uuid4() for _ in range(500)]), pages=20_000)


def test_statements_that_fill_and_end_batches_read_a_bounded_number_of_pages(loaded: Loaded) -> None:
    channel = loaded.db.target.channel
    check_plan(loaded, batches.open_batch(uuid4(), name="x", on_end=None, on_success=None), pages=60)
    check_plan(loaded, batches.send_to_batch(loaded.busy, [new_task()], channel=channel), pages=120)
    check_plan(loaded, batches.seal_batch(loaded.busy), pages=60)
    check_plan(loaded, happened(), pages=20)
    settlement = Settlement(id=loaded.task_id, claim_id=loaded.claim_id, outcome="COMPLETED", result=b"1")
    check_plan(loaded, leases.complete([settlement], channel=channel), pages=200)
    # 1,000 batches have 100 events each; a call counts those of 20 batches.
    check_plan(loaded, batches.advance_batches(channel=channel), pages=30_000)
    check_plan(loaded, batches.repair_batches(limit=100), pages=12_000)


def test_reads_and_cancels_of_a_large_batch_use_the_index_of_live_tasks(loaded: Loaded) -> None:
    check_plan(loaded, batches.read_batch(loaded.busy), pages=32_000)
    check_plan(loaded, batches.list_batches(limit=50), pages=1_500)
    check_plan(loaded, batches.list_batches(limit=50, live_only=True), pages=30_000)
    check_plan(loaded, batches.batches_between(UUID(int=0), UUID(int=(1 << 128) - 1), limit=6), pages=60)
    cancel = batches.cancel_tasks(loaded.busy, channel=loaded.db.target.channel)
    with loaded.db.connection.transaction(force_rollback=True):
        found = plan(loaded.db, cancel)["Plan"]
    scans = [
        node
        for node in nodes(found)
        if node["Node Type"] == "Seq Scan" and node.get("Relation Name") == "tasks"
    ]
    assert scans == []


def test_the_tasks_of_a_batch_are_listed_by_their_index(loaded: Loaded) -> None:
    for batch, most in ((loaded.busy, 1_500), (uuid4(), 30)):
        for states in (None, [TaskState.PENDING], [TaskState.COMPLETED]):
            query = inspection.TaskQuery(batch=batch, states=states)
            found = plan(loaded.db, inspection.list_tasks(query, limit=50))["Plan"]
            used = {node.get("Index Name") for node in nodes(found)}
            assert used & {"tasks_by_batch", "tasks_of_batch"}, used
            touched = found["Shared Hit Blocks"] + found["Shared Read Blocks"]
            print(f"{states} of a batch: {touched} pages")
            assert touched <= (most if states != [TaskState.COMPLETED] else 40_000)


def test_a_step_of_the_retention_of_batches_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    step = retention.prune_batches(hours=0, limit=1_000, after=UUID(int=0), until=UUID(int=(1 << 128) - 1))
    check_plan(loaded, step, pages=30_000)


def test_a_new_partition_of_the_history_has_the_index_of_batches(loaded: Loaded) -> None:
    later = (datetime.now(UTC) + timedelta(days=40)).replace(hour=0, minute=0, second=0, microsecond=0)
    assert loaded.db.run(history.add_part(later, unit="day"))
    found = loaded.db.connection.execute(
        "select tablename from pg_indexes where schemaname = %s and position('(batch_id, id)' in indexdef) > 0",
        [loaded.db.target.schema],
    ).fetchall()
    assert any(name.startswith("history_2") for (name,) in found)
