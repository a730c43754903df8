"""Each step of retention uses its index among 500,000 old and new rows: no table is scanned, few pages are touched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import sql

from everbeat.store import migrating, retention
from everbeat.store.retention import TaskIdBounds
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.aged import Aged
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes, pages_of, plan

ROWS = 100_000
LIMIT = 1_000
PAGES_PER_ROW = 8
"""To find, lock, find again and delete a row; two of them are visibility maps, for pages that a vacuum found all-visible.

The number depends on other open transactions: 5 and 6.1 pages per beat were measured.
"""
MOST_PAGES = PAGES_PER_ROW * LIMIT
LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
LONG_AGO = datetime(1, 1, 1, tzinfo=UTC)
TABLES = {
    "tasks",
    "attempts",
    "recoveries",
    "steps",
    "signals",
    "beats",
    "worker_states",
    "workers",
    "supervisors",
}


pytestmark = pytest.mark.long  # inserting the old rows takes longer than most rooms of tests


@pytest.fixture(scope="module")
def aged(database_url: str) -> Iterator[StoreHarness]:
    schema = f"test_aged_{uuid4().hex[:8]}"
    target = Target.parse(database_url, schema=schema)
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    rows = Aged(connection, schema)
    for days in (60, 1):
        rows.ended(ROWS, days=days)
        rows.beats(ROWS, days=days)
        rows.states(ROWS, days=days + 7)
        rows.holders(ROWS // 10, days=days + 7)
    rows.pending(ROWS, days=45)
    rows.analyze()
    db = StoreHarness(target, connection)
    yield db
    connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(schema)))
    db.database.close()
    connection.close()


def touched(db: StoreHarness, statement: Statement[Any]) -> int:
    return pages_of(plan(db, statement), statement, tables=TABLES)


def check_plan(db: StoreHarness, statement: Statement[Any], *, pages: int) -> dict[str, Any]:
    found = plan(db, statement)
    assert pages_of(found, statement, tables=TABLES) <= pages, statement.name
    return found


@pytest.fixture(scope="module")
def bounds(aged: StoreHarness) -> TaskIdBounds:
    return aged.run(retention.task_id_bounds(hours=720))


def test_pruning_tasks_and_attempts_reads_a_bounded_number_of_pages(
    aged: StoreHarness, bounds: TaskIdBounds
) -> None:  # H2
    step = partial(retention.prune_tasks, hours=720, limit=LIMIT, until=bounds.old)
    check_plan(aged, step(after=LOWEST), pages=30_000)
    check_plan(aged, retention.prune_tasks(hours=720, limit=LIMIT, after=bounds.now, until=HIGHEST), pages=50)
    strays = partial(retention.prune_stray_attempts, hours=720, limit=LIMIT, until=bounds.old)
    check_plan(aged, strays(after=LOWEST), pages=MOST_PAGES)
    for stray in (retention.prune_stray_steps, retention.prune_stray_signals):
        check_plan(aged, stray(hours=720, limit=LIMIT, after=LOWEST, until=bounds.old), pages=MOST_PAGES)


def test_a_pruning_step_over_live_tasks_reads_at_most_its_limit(
    aged: StoreHarness, bounds: TaskIdBounds
) -> None:
    (after,) = aged.connection.execute(
        sql.SQL("select id from {}.tasks where state = 'PENDING' order by id limit 1").format(
            sql.Identifier(aged.target.schema)
        )
    ).fetchone()  # type: ignore[misc]
    found = check_plan(
        aged, retention.prune_tasks(hours=720, limit=LIMIT, after=after, until=bounds.old), pages=3_000
    )
    seen = [
        node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
        for node in nodes(found["Plan"])
        if node.get("Relation Name") == "tasks"
    ]
    assert max(seen) <= LIMIT


def test_pruning_the_other_tables_reads_a_bounded_number_of_pages(aged: StoreHarness) -> None:  # H2
    check_plan(aged, retention.prune_stray_recoveries(hours=720, limit=LIMIT, after=0), pages=MOST_PAGES)
    check_plan(aged, retention.prune_beats(hours=24, limit=LIMIT, after=LONG_AGO), pages=MOST_PAGES)
    check_plan(aged, retention.prune_worker_states(hours=168, limit=LIMIT, after=LONG_AGO), pages=MOST_PAGES)
    check_plan(aged, retention.prune_workers(hours=168, limit=LIMIT, after=""), pages=12_000)
    check_plan(aged, retention.prune_supervisors(hours=168, limit=LIMIT, after=""), pages=12_000)


def test_a_later_pruning_step_skips_rows_that_earlier_steps_deleted(
    aged: StoreHarness, bounds: TaskIdBounds
) -> None:
    # Within one transaction, deleted rows stay in the index, as under an old snapshot.
    walks: list[tuple[Any, Any]] = [
        (LOWEST, partial(retention.prune_tasks, hours=720, limit=LIMIT, until=bounds.old)),
        (LONG_AGO, partial(retention.prune_beats, hours=24, limit=LIMIT)),
        (LONG_AGO, partial(retention.prune_worker_states, hours=168, limit=LIMIT)),
    ]
    for start, walk in walks:
        with aged.connection.transaction(force_rollback=True):
            first, key = touched(aged, walk(after=start)), start
            for _ in range(20):
                statement = walk(after=key)
                found = aged.connection.execute(aged.text(statement.name), statement.parameters).fetchall()
                key = statement.read(found).next_after
                assert key is not None
            late, from_the_start = touched(aged, walk(after=key)), touched(aged, walk(after=start))
        assert late <= 1.5 * first, statement.name
        assert from_the_start > late, "otherwise this test proves nothing"


def test_check_plan_fails_for_a_plan_of_retention_with_a_sequential_scan(aged: StoreHarness) -> None:
    with aged.connection.transaction(force_rollback=True):
        index = sql.Identifier(aged.target.schema, "beats_by_time")
        aged.connection.execute(sql.SQL("drop index {}").format(index))
        with pytest.raises(AssertionError, match="Seq Scan"):
            check_plan(aged, retention.prune_beats(hours=24, limit=LIMIT, after=LONG_AGO), pages=MOST_PAGES)


def test_removing_results_reads_only_the_results_whose_time_has_passed(aged: StoreHarness) -> None:
    schema = sql.Identifier(aged.target.schema)
    # 3,000 tasks of two functions keep their results for an hour or for ten years, among the 200,000 ended tasks.
    for keep_ms, rows in (("3600000", 2_000), ("315360000000", 1_000)):
        aged.connection.execute(
            sql.SQL(
                "update {0}.tasks set policy = json_build_object('keep_result_ms', %s::bigint), result = '1'"
                " where id = any(array(select id from {0}.tasks where state = 'COMPLETED' and policy is null limit %s))"
            ).format(schema),
            [keep_ms, rows],
        )
    aged.connection.execute(sql.SQL("vacuum analyze {}.tasks").format(schema))
    step = retention.prune_results(limit=LIMIT, after=True)
    assert "tasks_kept_results" in json.dumps(check_plan(aged, step, pages=30_000))
    removed = [aged.run(step).deleted["results"] for _ in range(2)]
    assert sum(removed) in (1_000, 2_000)  # the plan above has removed the others if it was not rolled back
    # Nothing is left to remove: the step reads neither the results that are kept nor the other tasks.
    aged.connection.execute(sql.SQL("vacuum {}.tasks").format(schema))
    check_plan(aged, step, pages=100)
