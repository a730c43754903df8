"""Listings do their costly work once for each row: they read an error once, and count all lanes in one call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from msgspec import structs
from psycopg.types.numeric import Int8

from everbeat.domain.task.states import TaskState
from everbeat.store import history, inspection, migrating
from everbeat.store.failures import failure_groups
from everbeat.store.statement import Statement
from everbeat.store.target import Target
from tests.store.conftest import StoreHarness
from tests.store.plans import nodes, plan
from tests.web.large_rows import HISTORY, LABELS_OF_TASKS

FAILED, QUEUES, OF_A_QUEUE = 4_000, 200, 500
DAYS, OF_A_DAY = 5, 4_000
FAILURES = """
insert into {schema}.tasks (id, name, queue, args, state, failed_at, error)
select gen_random_uuid(), 'work', 'default', '{{}}', 'FAILED', now() - n * interval '1 s',
    '{{"code": "BROKEN", "type": "shop.Refused", "message": "no"}}'
from generate_series(1, %s) n
"""
WAITING = """
insert into {schema}.tasks (id, name, queue, priority, args, enqueued_at)
select gen_random_uuid(), 'work', 'queue-' || q, n %% 3, '{{}}', now() + (n %% 2 * 60 - 30) * interval '1 minute'
from generate_series(1, %s) q cross join generate_series(1, %s) n
"""


@pytest.fixture(scope="module")
def loaded(database_url: str) -> Iterator[StoreHarness]:
    target = Target.parse(database_url, schema=f"test_repeated_{uuid4().hex[:8]}")
    with target.connect("everbeat test") as connection:
        migrating.migrate(connection, target)
        db = StoreHarness(target, connection)
        connection.execute("set session_replication_role = replica")
        connection.execute(db.plain(FAILURES), [FAILED])
        connection.execute(db.plain(WAITING), [QUEUES, OF_A_QUEUE])
        today = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        for day in range(1, DAYS + 1):
            since = today - timedelta(days=day)
            assert db.run(history.add_part(since, unit="day"))
            given = {"since": since, "day": Int8(day), "of_day": Int8(OF_A_DAY), "long": "long"}
            connection.execute(db.plain(HISTORY), given)
        connection.execute(db.plain(LABELS_OF_TASKS))
        connection.execute("reset session_replication_role")
        for table in ("tasks", "labels", "history"):
            connection.execute(db.plain(f"vacuum analyze {{schema}}.{table}"))
        yield db
        connection.execute(db.plain("drop schema {schema} cascade"))
        db.database.close()


def calls(db: StoreHarness, statement: Statement[Any]) -> Counter[str]:
    """Run a statement, and return how often it called each function."""
    query = "select funcname, calls from pg_stat_xact_user_functions"
    with db.connection.transaction(force_rollback=True):
        db.connection.execute("set local track_functions = 'all'")
        before = Counter(dict(db.connection.execute(query).fetchall()))  # earlier calls of the session
        db.connection.execute(db.text(statement.name), statement.parameters)
        return Counter(dict(db.connection.execute(query).fetchall())) - before


@pytest.mark.parametrize(("error", "read"), [("UNKNOWN", 0), ("NOT KNOWN", FAILED), ("no", FAILED)])
def test_a_filter_by_error_reads_each_error_at_most_once(
    loaded: StoreHarness, error: str, read: int
) -> None:  # O2
    """An error whose text cannot contain the code is not read. A code with a space could be written with an escape."""
    query = inspection.TaskQuery(states=[TaskState.FAILED], name="work", error=error)
    latest = structs.replace(query, latest=True)
    for statement, nothing in (
        (inspection.list_tasks(query, limit=50, most=None), []),
        (inspection.latest_failures(latest, limit=50, most=50_000), ([], True)),
    ):
        assert loaded.run(statement) == nothing
        assert calls(loaded, statement).get("object_of", 0) == read
    found = loaded.run(inspection.tasks(limit=50, states=[TaskState.FAILED], error="Refused", latest=True))
    assert len(found) == 50


def test_groups_of_failures_read_each_error_once(loaded: StoreHarness) -> None:  # O2
    statement = failure_groups(name="work", limit=20)
    (group,) = loaded.run(statement)
    assert (group.code, group.count, group.message) == ("BROKEN", FAILED, "no")
    assert calls(loaded, statement)["object_of"] == FAILED


def test_all_queues_are_counted_in_one_call(loaded: StoreHarness) -> None:  # O2
    found = loaded.run(inspection.queues())
    assert {(each.pending, each.scheduled) for each in found} == {(OF_A_QUEUE / 2, OF_A_QUEUE / 2)}
    assert len(found) == QUEUES
    called = calls(loaded, inspection.queues())
    assert called["count_queues"] == 1
    assert not {"count_lane", "count_lanes"} & {*called}


def test_failed_tasks_with_a_label_are_found_by_their_ids(loaded: StoreHarness) -> None:  # O2
    """An index of failures would compare all failures of a partition with all ids of the label."""
    labels = {"env": "prod"}
    query = inspection.TaskQuery(states=[TaskState.FAILED], labels=labels, latest=True)
    statement = inspection.list_tasks(structs.replace(query, rarest=("env", "prod")), limit=50)
    assert len(loaded.run(statement)) == 50
    used = {str(node.get("Index Name")) for node in nodes(plan(loaded, statement)["Plan"])}
    assert [name for name in used if "failed_at" in name] == []
