"""Searches by label among 1,000,000 labels: the primary key of `labels` finds the tasks, and no table is scanned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from msgspec import structs
from psycopg import sql

from everbeat.store import inspection, migrating, retention
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes, pages_of, plan

pytestmark = pytest.mark.long  # inserting the rows takes longer than most rooms of tests

TASKS, TENANTS = 500_000, 1_000
LOWEST, HIGHEST = UUID(int=0), UUID(int=(1 << 128) - 1)
FILL = """
insert into {schema}.tasks (id, name, queue, args, state, completed_at, sent_at, enqueued_at, labels)
select (lpad(to_hex((extract(epoch from x.at) * 1000)::bigint), 12, '0') || '7' || substr(md5(n::text), 1, 3) || '8'
        || substr(md5(n::text), 4, 15))::uuid,
    'work', 'default', '{{}}', case when n %% 100 = 0 then 'PENDING' else 'COMPLETED' end, case when n %% 100 > 0 then x.at end, x.at, x.at,
    jsonb_build_object('env', 'prod', 'tenant', (n %% %(tenants)s)::text)
from generate_series(1, %(tasks)s) n
cross join lateral (select now() - interval '20 days' + n * interval '3 s' as at) x
"""


@pytest.fixture(scope="module")
def labelled(database_url: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=f"test_labels_{uuid4().hex[:8]}")
    connection = target.connect("everbeat test")
    migrating.migrate(connection, target)
    db = StoreHarness(target, connection)
    trigger = "alter table {schema}.tasks %s trigger tasks_labelled"
    connection.execute(db.plain(trigger % "disable"))
    connection.execute(db.plain(FILL), {"tasks": TASKS, "tenants": TENANTS})
    connection.execute(db.plain(trigger % "enable"))
    connection.execute(
        db.plain(
            "insert into {schema}.labels (key, value, id)"
            " select l.key, l.value, t.id from {schema}.tasks t cross join lateral jsonb_each_text(t.labels) l"
        )
    )
    for table in ("tasks", "labels"):
        connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
    yield db
    connection.execute(sql.SQL("drop schema {} cascade").format(sql.Identifier(target.schema)))
    db.database.close()
    connection.close()


def touched(db: StoreHarness, statement: Statement[Any], *, index: str = "labels_pkey") -> int:
    """Return how many pages the statement touches. No table may be scanned, and the index must be used."""
    found = plan(db, statement)
    assert index in {node.get("Index Name") for node in nodes(found["Plan"])}, statement.name
    return pages_of(found, statement, tables=("tasks", "labels"))


def searched(db: StoreHarness, labels: dict[str, str], **filters: Any) -> inspection.TaskQuery:
    rarest = inspection.rarest_label(labels)
    assert touched(db, rarest) <= 2_500
    return inspection.TaskQuery(labels=labels, rarest=db.run(rarest), **filters)


@pytest.mark.parametrize(
    "labels", [{"env": "prod"}, {"tenant": "7"}, {"env": "prod", "tenant": "7"}, {"tenant": "none"}]
)
def test_a_search_by_label_reads_the_newest_matches_alone(
    labelled: StoreHarness, labels: dict[str, str]
) -> None:
    query = searched(labelled, labels)
    assert query.rarest == ("tenant", labels["tenant"]) if "tenant" in labels else ("env", "prod")
    step = inspection.list_tasks(query, limit=50, most=2 * inspection.STEP_OF_LABEL)
    assert touched(labelled, step) <= 1_000
    last = inspection.last_examined(query, most=inspection.STEP_OF_LABEL)
    assert touched(labelled, last) <= 2 * inspection.STEP_OF_LABEL
    found = labelled.run(step)
    assert [task.id for task in found] == sorted((task.id for task in found), reverse=True)
    assert len(found) == (0 if labels == {"tenant": "none"} else 50)


def test_the_next_page_of_a_search_by_label_begins_where_the_last_one_ended(labelled: StoreHarness) -> None:
    query = searched(labelled, {"env": "prod"})
    first = labelled.run(inspection.list_tasks(query, limit=50))
    after = inspection.list_tasks(structs.replace(query, before=first[-1].id), limit=50, most=2_000)
    assert touched(labelled, after) <= 1_000
    assert labelled.run(after)[0].id < first[-1].id


@pytest.mark.parametrize("labels", [{"tenant": "7"}, {"env": "prod", "tenant": "7"}])
def test_a_search_by_label_in_the_order_of_events_sorts_only_the_labelled_tasks(
    labelled: StoreHarness, labels: dict[str, str]
) -> None:
    query = searched(labelled, labels, latest=True)
    assert touched(labelled, inspection.list_tasks(query, limit=50)) <= 15 * TASKS // TENANTS


def test_a_frequent_label_in_the_order_of_events_reads_a_limited_number(labelled: StoreHarness) -> None:
    query = searched(labelled, {"env": "prod"}, latest=True, name="none")
    assert touched(labelled, inspection.list_tasks(query, limit=50)) <= 8 * inspection.MOST_EXAMINED


def test_a_step_that_deletes_stray_labels_reads_the_oldest_labels_alone(labelled: StoreHarness) -> None:
    bounds = labelled.run(retention.task_id_bounds(hours=24 * 15))
    step = retention.prune_stray_labels(limit=1_000, after=LOWEST, until=bounds.old)
    assert touched(labelled, step, index="labels_by_id") <= 10_000
    none = retention.prune_stray_labels(limit=1_000, after=bounds.now, until=HIGHEST)
    assert touched(labelled, none, index="labels_by_id") <= 50


def test_a_plan_without_the_primary_key_of_labels_fails_the_test(labelled: StoreHarness) -> None:
    with labelled.connection.transaction(force_rollback=True):
        labelled.connection.execute(labelled.plain("alter table {schema}.labels drop constraint labels_pkey"))
        with pytest.raises(AssertionError):
            searched(labelled, {"env": "prod"})
