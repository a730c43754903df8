"""Statements about messages keep using their indexes beside 100,000 rows of the outbox, as many tasks, and full windows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql

from everbeat.store import messages, tasks
from everbeat.store.statement import Statement
from tests.store.conftest import Hands
from tests.store.test_plans import filled, held, nodes, plan

ROWS = 100_000
WINDOW = 1_000

# Every PENDING task has a row, a thousand of each of two queues are out, and 20 further queues have a few rows each.
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
def loaded(database_url: str) -> Iterator[Hands]:
    with filled(database_url, rows=ROWS, in_flight=500) as hands:
        given = {"window": WINDOW, "one": held(hands, 1)[0][0]}
        for text in FILL:
            used = {name: value for name, value in given.items() if f"%({name})s" in text}
            names = {"schema": sql.Identifier(hands.target.schema)}
            hands.connection.execute(sql.SQL(text).format(**names), used or None)  # type: ignore[arg-type]
        yield hands


def touched(hands: Hands, statement: Statement[Any]) -> int:
    """How many pages it touches; fails where it scans a table."""
    found = plan(hands, statement)
    scans = [
        node["Relation Name"]
        for node in nodes(found["Plan"])
        if node["Node Type"] == "Seq Scan"
        and node.get("Relation Name") in ("tasks", "message_outbox", "recoveries")
    ]
    assert scans == []
    pages = int(found["Plan"]["Shared Hit Blocks"] + found["Plan"]["Shared Read Blocks"])
    print(f"{statement.name}: {pages} pages, {found['Execution Time']:.2f} ms")
    return pages


def ids(hands: Hands, state: str, count: int) -> list[UUID]:
    query = sql.SQL("select id from {}.tasks where state = {} limit {}")
    found = hands.connection.execute(
        query.format(sql.Identifier(hands.target.schema), sql.Literal(state), sql.Literal(count))
    ).fetchall()
    return [row[0] for row in found]


def test_what_is_due(loaded: Hands) -> None:
    assert touched(loaded, messages.due_messages(portion=250, window=WINDOW)) <= 9_000


def test_marking_cleaning_and_doubting(loaded: Hands) -> None:
    rows = loaded.run(messages.due_messages(portion=250, window=WINDOW)).rows
    assert len(rows) > 100
    assert touched(loaded, messages.mark_published({row.id: row.id for row in rows})) <= 10_000
    place = messages.Place("default", datetime(2020, 1, 1, tzinfo=UTC), 0)
    assert (
        touched(loaded, messages.walk_published(messages.BEGINNING, older_ms=1_500, limit=WINDOW)) <= 12_000
    )
    assert touched(loaded, messages.walk_published(place, older_ms=1_500, limit=WINDOW)) <= 12_000
    assert touched(loaded, messages.walk_later(messages.BEGINNING, limit=WINDOW)) <= 12_000
    assert touched(loaded, messages.publish_again({row.id: row.id for row in rows[:100]})) <= 2_000


def test_looking_at_tasks_and_queues(loaded: Hands) -> None:
    some = [*ids(loaded, "PENDING", 200), *ids(loaded, "RUNNING", 200), *ids(loaded, "COMPLETED", 100)]
    assert touched(loaded, messages.look_at(some, stale_ms=1_000)) <= 6_000
    assert touched(loaded, messages.queues_told()) <= 800
    assert touched(loaded, messages.messages_lying()) <= 6_000


def test_a_send_with_its_row(loaded: Hands) -> None:
    new = tasks.NewTask(id=ids(loaded, "PENDING", 1)[0], name="work", queue="default", priority=0, args=b"{}")
    assert touched(loaded, tasks.insert_task(new, channel="told")) <= 60
