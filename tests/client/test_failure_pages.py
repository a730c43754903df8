"""A list of failed tasks examines the latest failures, and then the newest tasks, and finds errors however their JSON is written."""

from __future__ import annotations

from uuid import UUID

import pytest

from everbeat import App
from everbeat.client.inspection import task_page
from everbeat.inspection import TaskPage
from everbeat.store.plan import run_plan
from tests.store.conftest import StoreHarness

FAILED = """
insert into {schema}.tasks (id, name, queue, args, state, sent_at, enqueued_at, failed_at, error)
values (%s, %s, 'default', '{{}}', 'FAILED', now() - interval '1 day', now() - interval '1 day', now() - %s * interval '1 minute', %s)
"""


def fail(
    db: StoreHarness, number: int, *, ago: int, name: str = "often", error: str = '{"code": "BROKEN"}'
) -> UUID:
    """Store a failed task. A larger number makes a newer id."""
    task_id = UUID(int=number)
    db.connection.execute("set session_replication_role = replica")
    db.connection.execute(db.plain(FAILED), [task_id, name, ago, error])
    db.connection.execute("reset session_replication_role")
    return task_id


def listed(db: StoreHarness, *, limit: int = 2, before: UUID | None = None) -> TaskPage:
    """List the rare failures, and examine five of each kind."""
    plan = task_page(before=before, order="happened", limit=limit, most=5, state="FAILED", name="rare")
    return run_plan(db.database, plan)


def ids(page: TaskPage) -> list[int]:
    return [task.id.int for task in page]


def test_the_latest_failures_come_first_even_if_they_are_old_tasks(db: StoreHarness) -> None:
    for number in (1, 2, 3):
        fail(db, number, ago=number, name="rare")
    page = listed(db, limit=5)
    assert (ids(page), page.examined, page.continue_before) == ([1, 2, 3], None, None)
    assert ids(listed(db, limit=2)) == [1, 2]
    assert ids(listed(db, limit=2, before=UUID(int=2))) == [3]


def test_a_new_task_that_failed_before_many_others_is_found(db: StoreHarness) -> None:
    for number in range(1, 9):
        fail(db, number, ago=number)
    fail(db, 9, ago=90, name="rare")
    fail(db, 10, ago=2, name="rare")
    page = listed(db, limit=5)
    assert ids(page) == [10, 9]
    assert page.examined == 5
    assert page.continue_before == UUID(int=6)
    assert ids(listed(db, limit=1)) == [10]
    assert ids(listed(db, limit=1, before=UUID(int=10))) == [9]


def test_failures_beyond_those_that_are_examined_are_not_hidden_silently(db: StoreHarness) -> None:
    fail(db, 1, ago=90, name="rare")
    for number in range(2, 9):
        fail(db, number, ago=number)
    page = listed(db)
    assert (ids(page), page.examined, page.continue_before) == ([], 5, UUID(int=4))


@pytest.mark.parametrize("order", ["sent", "happened"])
def test_an_error_is_found_however_its_json_is_written(app: App, db: StoreHarness, order: str) -> None:
    written = (
        '{"code":"BROKEN"}', '{ "code" : "BROKEN" }', r'{"code": "\u0042ROKEN"}', '{"code": "X", "type": "shop.BROKEN"}',
        '{"code": "X", "type": "BROKEN"}',
    )  # fmt: skip
    others = (
        '{"code": "X", "message": "BROKEN"}', '{"code": "BROKENS"}', '{"code": "X", "type": "UNBROKEN"}', r'{"code": "X", "message": "\"BROKEN\""}',
        '{"code": "broken"}', r'{"code": "X\u0000"}', '"BROKEN"',
    )  # fmt: skip
    for number, error in enumerate(written + others, start=1):
        fail(db, number, ago=number, error=error)
    found = app.list_tasks(state="FAILED", error="BROKEN", order=order)  # type: ignore[arg-type]
    assert sorted(ids(found)) == [*range(1, len(written) + 1)]
    spaced = fail(db, 90, ago=1, error=r'{"code": "TOO\u0020BAD"}')
    assert [task.id for task in app.list_tasks(error="TOO BAD", order=order)] == [spaced]  # type: ignore[arg-type]
