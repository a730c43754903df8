"""Each statement of a portion reads a limited number of pages with 100,000 tasks of each kind, and in a long test with a million."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest

from everbeat.domain.bulk_actions import BulkVerb, Operator
from everbeat.domain.task.states import TaskState
from everbeat.store import audit, bulk
from everbeat.store.inspection import TaskQuery
from everbeat.store.statement import LATEST, Statement
from tests.store.conftest import StoreHarness
from tests.store.plans import HELD, ROWS, check_plan, filled, loaded
from tests.store.plans import plan as explained

__all__ = ["loaded"]

PORTION = 500
ACTIONS = """
insert into {schema}.bulk_actions (id, action, filters, parameters, digest, state, requested_by, origin, ended_at)
select gen_random_uuid(), 'retry', '{{}}', '{{}}', n::text, 'COMPLETED', 'ann', 'cli', now() from generate_series(1, 20000) n
"""
LOG = """
insert into {schema}.audit_log (at, actor, origin, action, outcome)
select now() - n * interval '1 minute', 'ann', 'cli', 'retry', 'done' from generate_series(1, 100000) n
"""


@pytest.fixture(scope="module")
def acted(loaded: StoreHarness) -> StoreHarness:
    for text in (ACTIONS, LOG):
        loaded.connection.execute(loaded.plain(text))
    for table in ("bulk_actions", "audit_log"):
        loaded.connection.execute(loaded.plain(f"vacuum analyze {{schema}}.{table}"))
    return loaded


def ids(db: StoreHarness, state: str) -> list[UUID]:
    """Return the ids of one portion from the middle of the table."""
    query = "select id from {schema}.tasks where state = %s and id > '80000000-0000-0000-0000-000000000000' order by id limit %s"
    return [row[0] for row in db.connection.execute(db.plain(query), [state, PORTION])]


def a_step(verb: BulkVerb, **filters: Any) -> Statement[Any]:
    return bulk.find(
        verb, filters=TaskQuery(**filters).filters(), parameters={}, requested_at=LATEST, after=UUID(int=1 << 127), acted=PORTION,
    )  # fmt: skip


def an_act(db: StoreHarness, verb: BulkVerb, state: str, **parameters: Any) -> Statement[Any]:
    return bulk.act(verb, ids(db, state), call=uuid4(), parameters=parameters, channel=db.target.channel)


def statements(db: StoreHarness) -> Iterator[tuple[Statement[Any], int]]:
    """Yield each statement of a portion, and how many pages it may touch."""
    failed = [TaskState.FAILED]
    yield a_step(BulkVerb.RETRY, states=failed, error="TIMEOUT"), 30_000
    yield a_step(BulkVerb.DELETE, name="work"), 30_000
    yield a_step(BulkVerb.CANCEL, queue="mail"), 30_000
    yield a_step(BulkVerb.RUN_NOW), 30_000
    yield bulk.recall(ids(db, "COMPLETED")), 10_000
    yield an_act(db, BulkVerb.CANCEL, "PENDING"), 60_000
    yield an_act(db, BulkVerb.RUN_NOW, "PENDING"), 60_000
    yield an_act(db, BulkVerb.MOVE, "PENDING", to_queue="big"), 60_000
    yield an_act(db, BulkVerb.DELETE, "COMPLETED"), 60_000
    yield bulk.existing(BulkVerb.RETRY, ids(db, "COMPLETED")), 10_000
    yield bulk.is_due(), 50
    yield bulk.take(), 50
    yield bulk.actions(limit=50), 2_000
    yield bulk.problems(), 2_000
    yield audit.entries(since=None, actor=None, action=None, before=None, limit=50), 50
    yield audit.entries(since=None, actor="nobody", action=None, before=None, limit=50), 5_000
    yield audit.prune(limit=1_000, hours=1_000), 60_000


def test_each_statement_of_a_portion_uses_its_index(acted: StoreHarness) -> None:
    for statement, pages in statements(acted):
        check_plan(acted, statement, pages=pages)


def test_a_retry_of_a_portion_uses_the_primary_key(acted: StoreHarness) -> None:
    with acted.connection.transaction(force_rollback=True):
        acted.connection.execute(
            acted.plain(
                "update {schema}.tasks set state = 'FAILED', failed_at = now(), completed_at = null where id = any(%s)"
            ),
            [ids(acted, "COMPLETED")],
        )
        check_plan(acted, an_act(acted, BulkVerb.RETRY, "FAILED"), pages=60_000)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_statement_of_a_portion_takes_less_than_a_second_with_a_million_tasks(database_url: str) -> None:
    with filled(database_url, rows=1_000_000, in_flight=HELD) as db:
        for statement, _ in statements(db):
            took_ms = explained(db, statement)["Execution Time"]
            print(f"{statement.name}: {took_ms:.1f} ms")
            assert took_ms < 1_000.0, statement.name
        assert ROWS < 1_000_000
        db.run(audit.record(Operator("ann", "cli"), "retry", call=uuid4()))
