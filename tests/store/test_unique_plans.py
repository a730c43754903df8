"""Sends and claims of unique tasks use their indexes with 100,000 keys and 400,000 tasks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import pytest
from psycopg import sql

from everbeat.store import claims, tasks
from everbeat.store.statement import Statement
from everbeat.store.unique_tasks import UniqueTask, insert_unique_tasks, task_with_key
from tests.store.conftest import StoreHarness
from tests.store.plans import check_plan, filled, pages_of, plan_of_trees, vacuum

ROWS = 100_000
ANSWERS = ("existing", "replace", "debounce", "reject")

FILL = (
    """insert into {schema}.tasks (id, name, queue, args, unique_key, unique_for, last_send)
       select gen_random_uuid(), 'work', 'unique', '{{}}', 'key-' || n, (array['waiting', 'kept', '3600000 milliseconds'])[n %% 3 + 1],
           case when n %% 10 = 0 then gen_random_uuid() end
       from generate_series(1, %(rows)s) n""",
    """insert into {schema}.unique_keys (name, key, task_id, until)
       select t.name, t.unique_key, t.id, case when t.last_send is not null then '-infinity'::timestamptz end
       from {schema}.tasks t where t.unique_key is not null and %(rows)s > 0""",
    "vacuum analyze {schema}.unique_keys",
    "vacuum analyze {schema}.tasks",
)


pytestmark = pytest.mark.long  # inserting the rows takes longer than most rooms of tests


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[StoreHarness]:
    with filled(database_url, rows=ROWS, in_flight=500) as db:
        for text in FILL:
            given = {"rows": ROWS} if "rows" in text else None
            db.connection.execute(sql.SQL(text).format(schema=sql.Identifier(db.target.schema)), given)  # type: ignore[arg-type]
        yield db


@pytest.fixture(autouse=True)
def vacuumed(loaded: StoreHarness) -> None:
    """Remove the rows that other tests rolled back, so that these tests can run in any order."""
    vacuum(loaded, "tasks", "unique_keys")


def a_send(
    count: int, *, first: int, on_duplicate: Any, unique_for: str | None = "waiting"
) -> Statement[Any]:
    asked = [
        UniqueTask(
            task=tasks.NewTask(
                id=uuid4(), name="work", queue="unique", priority=0, args=b"{}", key=f"key-{first + number}"
            ),
            unique_for=unique_for,
            on_duplicate=on_duplicate,
        )
        for number in range(count)
    ]
    return insert_unique_tasks(asked, channel="c")


@pytest.mark.parametrize("on_duplicate", ANSWERS)
def test_a_send_of_unique_tasks_reads_a_bounded_number_of_pages(
    loaded: StoreHarness, on_duplicate: str
) -> None:
    for first in (1, 2 * ROWS):  # taken keys, and new keys
        check_plan(loaded, a_send(1, first=first, on_duplicate=on_duplicate), pages=150)
        check_plan(loaded, a_send(200, first=first, on_duplicate=on_duplicate), pages=14_000)
        check_plan(loaded, a_send(1, first=first, on_duplicate=on_duplicate, unique_for=None), pages=150)
    check_plan(loaded, task_with_key("work", "key-17"), pages=10)


@pytest.mark.parametrize("rows", [1, 200])
def test_a_send_that_is_planned_before_its_values_are_known_scans_no_table(
    loaded: StoreHarness, rows: int
) -> None:
    statement = a_send(rows, first=1, on_duplicate="replace")
    found = plan_of_trees(loaded, statement, generic=True)
    assert pages_of(found, statement, tables=("tasks", "unique_keys")) <= 150 + 70 * rows


def test_a_claim_of_unique_tasks_reads_their_keys_by_the_primary_key(loaded: StoreHarness) -> None:
    claim = claims.claim(
        worker_id="w2", claim_call=uuid4(), names=["work"], limit=100, queues=["unique"], queue_priorities={}
    )
    with loaded.connection.transaction(force_rollback=True):
        loaded.connection.execute("select pg_stat_force_next_flush()")
        before = _key_scans(loaded)
        text = loaded.text(claim.name)
        assert len(claim.read(loaded.connection.execute(text, claim.parameters).fetchall())) == 100
        sequential, by_index = (after - was for after, was in zip(_key_scans(loaded), before, strict=True))
    print(sequential, by_index)
    assert sequential == 0
    assert 0 < by_index <= 300


def _key_scans(db: StoreHarness) -> tuple[int, int]:
    """Return how often this transaction has scanned the table of keys, and how often by an index."""
    query = sql.SQL(
        "select seq_scan, idx_scan from pg_stat_xact_user_tables where schemaname = {} and relname = 'unique_keys'"
    )
    row = db.connection.execute(query.format(sql.Literal(db.target.schema))).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])
