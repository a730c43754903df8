"""Statements about streams and questions use their indexes among many tasks, items and questions: few pages, no table scan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.domain.task.context_backend import EmittedItem
from everbeat.store import questions, retention, streams
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import check_plans, filled, held, vacuum

pytestmark = pytest.mark.timeout(900)  # filling a million rows takes minutes

TABLES = {"tasks", "steps", "signals", "stream_items", "history"}
LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
ITEMS = 100_000

# One task has 100,000 items in three streams; many others have one. A fifth of the waiting tasks wait for an answer, a fifth for an event.
FILL = (
    """insert into {schema}.stream_items (task_id, name, number, attempt, value)
       select %(busy)s, (array['a', 'b', 'c'])[1 + n %% 3], 1 + n / 3, 1, '"token"' from generate_series(0, %(items)s - 1) n""",
    """insert into {schema}.stream_items (task_id, name, number, attempt, value)
       select t.id, 'a', 1, 1, '1' from (select id from {schema}.tasks where id <> %(busy)s limit %(items)s) t""",
    """insert into {schema}.steps (task_id, kind, name, state, result, attempt)
       select t.id, 'event', case when n %% 2 = 0 then 'answer/ask' else 'approved' end, 'OPEN', '{{"question": "Refund?"}}', 1
       from (select id, row_number() over () as n from {schema}.tasks where state = 'PENDING' limit %(rows)s / 5 * 2) t""",
    """update {schema}.tasks t set waits_for = s.name, wake_at = 'infinity'
       from {schema}.steps s where s.task_id = t.id and t.state = 'PENDING'""",
    "vacuum analyze {schema}.tasks",
    "vacuum analyze {schema}.steps",
    "vacuum analyze {schema}.stream_items",
)


class Loaded:
    """The harness, and a running task with many items."""

    def __init__(self, db: StoreHarness, rows: int) -> None:
        self.db = db
        self.task_id, self.claim_id = held(db, 1)[0]
        given = {"rows": rows, "busy": self.task_id, "items": ITEMS}
        for text in FILL:
            used = {name: value for name, value in given.items() if f"%({name})s" in text}
            query = sql.SQL(text).format(schema=sql.Identifier(db.target.schema))  # type: ignore[arg-type]
            db.connection.execute(query, used or None)


@pytest.fixture(scope="module", params=[100_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def loaded(database_url: str, request: pytest.FixtureRequest) -> Iterator[Loaded]:
    with filled(database_url, rows=request.param, in_flight=500) as db:
        yield Loaded(db, request.param)


@pytest.fixture(autouse=True)
def vacuumed(loaded: Loaded) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(loaded.db, "tasks", "steps", "stream_items")


def check_plan(loaded: Loaded, statement: Statement[Any], *, pages: int) -> None:
    check_plans(loaded.db, statement, pages=pages, tables=TABLES)


def test_a_portion_of_items_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    db = loaded.db
    portion = [EmittedItem("a", number, "1") for number in range(50_001, 50_101)]
    one = streams.insert_items(
        [((loaded.task_id, loaded.claim_id), portion)], channel=db.target.items_channel
    )
    check_plan(loaded, one, pages=1_000)
    leases = held(db, 100)
    many = [(lease, [EmittedItem("d", 1, "1")]) for lease in leases]
    check_plan(loaded, streams.insert_items(many, channel=db.target.items_channel), pages=2_000)


def test_reading_a_stream_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    check_plan(loaded, streams.list_streams(loaded.task_id), pages=60)
    for after in (0, 20_000, ITEMS):
        check_plan(loaded, streams.list_items(loaded.task_id, "b", after=after), pages=1_500)


def test_the_inbox_and_answers_read_a_bounded_number_of_pages(loaded: Loaded) -> None:
    db = loaded.db
    asking = db.connection.execute(
        db.plain(
            "select id from {schema}.tasks where waits_for = 'answer/ask' order by id offset 1000 limit 1"
        )
    ).fetchone()
    assert asking is not None
    for after in (LOWEST, asking[0]):
        page = questions.list_open(after=after, limit=100)
        assert len(db.run(page)) == 100
        check_plan(loaded, page, pages=2_000)
    check_plan(loaded, questions.read_question(asking[0]), pages=20)
    check_plan(loaded, questions.hold_task(asking[0]), pages=20)
    check_plan(loaded, questions.list_asked(asking[0], event=None), pages=40)


def test_pruning_items_reads_a_bounded_number_of_pages(loaded: Loaded) -> None:
    db = loaded.db
    check_plan(loaded, retention.prune_stray_items(limit=1_000, after=LOWEST, until=HIGHEST), pages=4_000)
    stray = uuid4()
    query = "insert into {schema}.stream_items (task_id, name, number, attempt, value) select %s, 'a', n, 1, '1' from generate_series(1, 5000) n"
    db.connection.execute(db.plain(query), [stray])
    check_plan(loaded, retention.prune_stray_items(limit=1_000, after=stray, until=HIGHEST), pages=20_000)
