"""Lists with a filter that matches few tasks: a call examines a limited number of tasks, and says where to continue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from everbeat import App
from everbeat.inspection import TaskPage
from everbeat.store import history
from everbeat.store.inspection import MOST_EXAMINED, MOST_RECOVERED
from tests.cli.conftest import Command, everbeat, forks
from tests.store.conftest import StoreHarness, db
from tests.store.test_history_plans import FILL

__all__ = ["db", "everbeat", "forks"]

MORE = 200
"""How many tasks are older than the last task that a list examines."""

RECOVERED = """
update {schema}.history h set recoveries = array[jsonb_populate_record(null::{schema}.history_recovery, jsonb_build_object(
    'id', x.number, 'task_id', h.id, 'name', h.name, 'queue', h.queue, 'fence', 1, 'claim_id', h.id, 'attempt', 1, 'worker_id', 'w1',
    'was', 'RUNNING', 'cause', case when x.number = 1 then 'rare' else 'vanished' end, 'noticed_by', 'age', 'suspect', false,
    'noticed_at', h.ended_at - interval '1 s', 'action', 'requeue'))]
from (select h.id, h.ended_at, row_number() over (order by h.ended_at) as number from {schema}.history h) x
where h.id = x.id and h.ended_at = x.ended_at
"""


@pytest.fixture
def app(db: StoreHarness) -> Iterator[App]:
    own = App(db.target.url, schema=db.target.schema)
    yield own
    own.close()


@pytest.fixture
def rare(db: StoreHarness) -> UUID:
    """Fill `history` with more tasks than a list examines, and return the oldest failed task, whose name and queue are rare."""
    since = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=3)
    db.run(history.add_part(since, unit="day"))
    db.connection.execute(db.plain(FILL), {"rows": MOST_EXAMINED + MORE, "since": since})
    (row,) = db.connection.execute(
        db.plain(
            "update {schema}.history set name = 'rare', queue = 'rare'"
            " where (id, ended_at) in (select h.id, h.ended_at from {schema}.history h where h.state = 'FAILED' order by h.id limit 1) returning id"
        )
    ).fetchall()
    found: UUID = row[0]
    return found


def ids(page: TaskPage) -> list[UUID]:
    return [task.id for task in page]


@pytest.mark.long  # it inserts 50,200 tasks
def test_a_list_that_stopped_early_says_where_to_continue(app: App, db: StoreHarness, rare: UUID) -> None:
    for page in (app.list_tasks(queue="rare"), asyncio.run(app.alist_tasks(queue="rare"))):
        assert page == []
        assert page.examined == MOST_EXAMINED
        assert page.continue_before is not None
        older = app.list_tasks(queue="rare", before=page.continue_before)
        assert (ids(older), older.examined, older.continue_before) == ([rare], None, None)
    rest = app.list_tasks(before=page.continue_before, limit=1_000)
    assert len(rest) == MORE, "the page before ended exactly there"


@pytest.mark.long  # it inserts 50,200 tasks
def test_a_rare_failure_is_found_by_the_index_of_failures(app: App, rare: UUID) -> None:
    page = app.list_tasks(name="rare", state="FAILED", order="happened")
    assert (ids(page), page.continue_before) == ([rare], None)


@pytest.mark.long  # it inserts 50,200 tasks
def test_a_full_page_and_a_list_of_live_tasks_do_not_stop_early(
    app: App, db: StoreHarness, rare: UUID
) -> None:
    waiting = [db.send() for _ in range(3)]
    full = app.list_tasks(limit=10)
    assert (len(full), full.continue_before) == (10, None)
    for order in ("sent", "happened"):
        live = app.list_tasks(state=["PENDING", "RUNNING"], order=order)
        assert (set(ids(live)), live.continue_before) == (set(waiting), None)
    whole = app.list_tasks(limit=MOST_EXAMINED + MORE + 4)
    assert (len(whole), whole.continue_before) == (MOST_EXAMINED + MORE + 3, None)


def test_the_command_says_where_to_continue(db: StoreHarness, everbeat: Command, rare: UUID) -> None:
    options = ("tasks", "list", "--queue", "rare", "--url", db.target.url, "--schema", db.target.schema)
    stopped = everbeat(*options, "--order", "sent", "--json").assert_code(0).document
    assert (stopped["tasks"], stopped["examined"]) == ([], MOST_EXAMINED)
    shown = everbeat(*options, "--order", "sent").assert_code(0)
    assert shown.err.endswith(
        f"The search stopped after the 50,000 newest tasks. Continue with older tasks: --order sent --before {stopped['continue_before']}\n"
    )
    more = everbeat(*options, *shown.err.split(": ")[-1].split(), "--json").assert_code(0).document
    assert [task["id"] for task in more["tasks"]] == [str(rare)]
    assert (more["examined"], more["continue_before"]) == (None, None)
    everbeat(*options, "--order", "ended").assert_code(2)


def test_a_list_of_recoveries_that_stopped_early_says_where_to_continue(
    app: App, db: StoreHarness, everbeat: Command
) -> None:
    since = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=3)
    db.run(history.add_part(since, unit="day"))
    db.connection.execute(db.plain(FILL), {"rows": MOST_RECOVERED + 5, "since": since})
    db.connection.execute(db.plain(RECOVERED))
    page = app.recoveries(cause="rare")
    assert (page, page.examined) == ([], MOST_RECOVERED)
    assert page.continue_before is not None
    older = app.recoveries(ended_before=page.continue_before)
    assert [each.id for each in older] == [5, 4, 3, 2, 1], "the page before ended exactly there"
    assert (older.examined, older.continue_before) == (None, None)
    full = app.recoveries(limit=3)
    assert ([each.id for each in full], full.continue_before) == (
        [MOST_RECOVERED + 5, MOST_RECOVERED + 4, MOST_RECOVERED + 3], None,
    )  # fmt: skip
    assert [each.cause for each in app.recoveries(number=1, limit=1)] == ["rare"]
    assert app.recoveries(number=MOST_RECOVERED + 6, limit=1) == []
    options = ("recoveries", "list", "--cause", "rare", "--url", db.target.url, "--schema", db.target.schema)
    shown = everbeat(*options).assert_code(0)
    assert "The search stopped after the 10,000 recovered tasks that ended last." in shown.err
    again = shown.err.split("older tasks: ")[-1].split()
    document = everbeat(*options, *again, "--json").assert_code(0).document
    assert [each["id"] for each in document["recoveries"]] == [1]
    assert (document["examined"], document["continue_before"]) == (None, None)
