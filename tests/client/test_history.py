"""Test that the calls of a client find tasks and workflows in `history` as if they had not moved."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from everbeat import App, Schedule
from everbeat.errors import SignalRefused, TaskFailed, TaskNotRetryable
from everbeat.store import schedules
from tests.cli.conftest import Command, everbeat, forks
from tests.maintenance.moving import ids_in, move
from tests.store.conftest import StoreHarness, db
from tests.store.flows import Flow, task

__all__ = ["db", "everbeat", "forks"]


@pytest.fixture
def app(db: StoreHarness) -> Iterator[App]:
    own = App(db.target.url, schema=db.target.schema)
    yield own
    own.close()


def moved(db: StoreHarness, count: int) -> None:
    """Date all ends back by two hours, and move the tasks."""
    columns = ("completed_at", "failed_at", "cancelled_at", "expired_at")
    changes = ", ".join(f"{column} = {column} - interval '2 h'" for column in columns)
    db.connection.execute(
        db.plain(
            f"update {{schema}}.tasks set {changes} where state not in ('PENDING', 'CLAIMED', 'RUNNING')"
        )
    )
    assert move(db) == count
    assert len(ids_in(db, "history")) == count


def test_a_handle_returns_the_result_and_the_details_of_a_moved_task(db: StoreHarness, app: App) -> None:
    done, failed = db.running(), db.running()
    assert db.complete(done, result=b'{"total": 5}')
    db.settle(failed, "FAILED", error=b'{"code": "BROKEN", "message": "no"}')
    explained = app.explain(failed.id)
    moved(db, 2)
    assert app.handle(done.id).result(timeout=30) == {"total": 5}
    with pytest.raises(TaskFailed, match="BROKEN"):
        app.handle(failed.id).result(timeout=30)
    info = app.info(failed.id)
    assert (info.state, info.attempt, [each.outcome for each in info.attempts]) == ("FAILED", 1, ["FAILED"])
    assert app.explain(failed.id).reasons[0].text == explained.reasons[0].text
    assert {each.id for each in app.list_tasks()} == {done.id, failed.id}
    with pytest.raises(SignalRefused, match="COMPLETED"):
        app.signal(done.id, "go", 1)
    with pytest.raises(TaskNotRetryable, match="COMPLETED"):
        app.retry(done.id)
    assert len(ids_in(db, "history")) == 2
    app.retry(failed.id)
    assert app.info(failed.id).state == "PENDING"
    (again,) = db.claim()
    assert (again.id, db.start(again)) == (failed.id, ["started"])
    assert db.settle(again) == "COMPLETED"
    assert [each.outcome for each in app.info(failed.id).attempts] == ["FAILED", "COMPLETED"]


def test_the_nodes_of_a_finished_workflow_keep_their_results_and_errors(db: StoreHarness, app: App) -> None:
    flow = Flow.start(db, [task("a"), task("b")], on_error="fail")
    flow.play(lambda name: ValueError("no") if name == "b" else 7)
    handle = app.workflow_handle(flow.id)
    nodes = handle.nodes()
    moved(db, 2)
    assert handle.nodes() == nodes
    assert handle.result_of("a") == 7
    assert handle.explain().state == "FAILED"
    with pytest.raises(TaskNotRetryable):
        app.retry(nodes[1].task_id or "")


def test_a_schedule_counts_the_failures_of_moved_runs(db: StoreHarness, app: App) -> None:
    """The row of a due schedule counts failed runs in a row, to pause the schedule."""
    running = db.running()
    db.settle(running, "FAILED", error=b'{"code": "BROKEN", "message": "no"}')

    @app.task
    async def work() -> None: ...

    app.put_schedule(Schedule("s", work.call(), every="1h", pause_after_failures=3))
    db.connection.execute(
        db.plain(
            "insert into {schema}.ticks (schedule, at, outcome, task_id) values ('s', now() - interval '2 h', 'SENT', %s)"
        ),
        [running.id],
    )
    db.connection.execute(
        db.plain("update {schema}.schedules set next_at = now() - interval '1 s', decided_to = next_at")
    )
    moved(db, 1)
    (due,) = db.run(schedules.list_due(limit=10)).due
    assert due.failures == 1
    (tick,) = db.run(schedules.list_ticks("s", limit=10))
    assert str(tick.state) == "FAILED"


def test_the_commands_show_and_list_moved_tasks(db: StoreHarness, everbeat: Command) -> None:
    failed = db.running()
    db.settle(failed, "FAILED", error=json.dumps({"code": "BROKEN", "message": "no"}).encode())
    moved(db, 1)
    options = ("--url", db.target.url, "--schema", db.target.schema)
    shown = everbeat("tasks", "show", str(failed.id)[:18], *options, "--json").assert_code(0).document
    assert str(failed.id) in json.dumps(shown)
    for more in ((), ("--state", "FAILED"), ("--worker", "w1"), ("--error", "BROKEN")):
        listed = everbeat("tasks", "list", *more, *options, "--json").assert_code(0).document["tasks"]
        assert [each["id"] for each in listed] == [str(failed.id)], more
    everbeat("tasks", "retry", str(failed.id), *options).assert_code(0)
    assert db.row(failed.id, "state") == "PENDING"
