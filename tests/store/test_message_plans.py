"""Statements about messages use their indexes with 100,000 rows in the outbox, as many tasks, and full windows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from everbeat.store import messages, tasks
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import filled, held, pages_of, plan

ROWS = 100_000
WINDOW = 1_000

# Every PENDING task has a row, a thousand messages of each of two queues are published, and 20 more queues have a few rows each.
FILL = (
    "select {schema}.use_messages('told')",
    "update {schema}.relay set holder = 'w1', taken_until = now() + interval '1 hour'",
    """insert into {schema}.message_outbox (task_id, queue, fence, due_at)
       select t.id, t.queue, t.fence, t.enqueued_at from {schema}.tasks t where t.state = 'PENDING'""",
    """insert into {schema}.message_outbox (task_id, queue, fence, due_at)
       select t.id, 'rare' || n %% 20, t.fence, t.enqueued_at from {schema}.tasks t, generate_series(1, 200) n where t.id = %(one)s""",
    """update {schema}.message_outbox set place = id, published_at = now() - interval '1 minute' where id in (
           select id from (select id, row_number() over (partition by queue order by due_at, id) as n from {schema}.message_outbox) o
           where n <= %(window)s and id %% 2 = 0)""",
    "vacuum analyze {schema}.message_outbox",
)


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[StoreHarness]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        given = {"window": WINDOW, "one": held(db, 1)[0][0]}
        for text in FILL:
            used = {name: value for name, value in given.items() if f"%({name})s" in text}
            names = {"schema": sql.Identifier(db.target.schema)}
            db.connection.execute(sql.SQL(text).format(**names), used or None)  # type: ignore[arg-type]
        yield db


def touched(db: StoreHarness, statement: Statement[Any]) -> int:
    """Return how many pages the statement touches; fail if it scans a table."""
    return pages_of(plan(db, statement), statement, tables=("tasks", "message_outbox", "recoveries"))


def ids(db: StoreHarness, state: str, count: int) -> list[UUID]:
    query = sql.SQL("select id from {}.tasks where state = {} limit {}")
    found = db.connection.execute(
        query.format(sql.Identifier(db.target.schema), sql.Literal(state), sql.Literal(count))
    ).fetchall()
    return [row[0] for row in found]


def test_due_messages_reads_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    assert touched(loaded, messages.due_messages(portion=250, window=WINDOW)) <= 9_000


def test_statements_that_mark_and_remove_messages_read_a_bounded_number_of_pages(
    loaded: StoreHarness,
) -> None:
    rows = loaded.run(messages.due_messages(portion=250, window=WINDOW)).rows
    assert len(rows) > 100
    assert touched(loaded, messages.mark_published({row.id: row.id for row in rows})) <= 10_000
    place = messages.OutboxPlace("default", datetime(2020, 1, 1, tzinfo=UTC), 0)
    assert (
        touched(loaded, messages.walk_published(messages.BEGINNING, older_ms=1_500, limit=WINDOW)) <= 12_000
    )
    assert touched(loaded, messages.walk_published(place, older_ms=1_500, limit=WINDOW)) <= 12_000
    assert touched(loaded, messages.walk_later(messages.BEGINNING, limit=WINDOW)) <= 12_000
    assert touched(loaded, messages.publish_again({row.id: row.id for row in rows[:100]})) <= 2_000


def test_statements_that_inspect_tasks_and_queues_read_a_bounded_number_of_pages(
    loaded: StoreHarness,
) -> None:
    some = [*ids(loaded, "PENDING", 200), *ids(loaded, "RUNNING", 200), *ids(loaded, "COMPLETED", 100)]
    assert touched(loaded, messages.delivery_facts(some, stale_ms=1_000)) <= 6_000
    assert touched(loaded, messages.queues_told()) <= 800
    assert touched(loaded, messages.messages_lying()) <= 6_000
    assert touched(loaded, messages.queues_unserved({f"rare{n}" for n in range(20)})) <= 1_000


def test_a_send_with_its_outbox_row_touches_a_bounded_number_of_pages(loaded: StoreHarness) -> None:
    new = tasks.NewTask(id=ids(loaded, "PENDING", 1)[0], name="work", queue="default", priority=0, args=b"{}")
    assert touched(loaded, tasks.insert_task(new, channel="told")) <= 60
