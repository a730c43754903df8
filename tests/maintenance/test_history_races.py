"""Test that a task moves once, even if another session retries, cancels, signals or moves it at the same time, or is killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat import App
from everbeat.domain.inspection import CancelVerdict
from everbeat.domain.task.states import TaskState
from everbeat.errors import SignalRefused, TaskNotRetryable
from everbeat.store import history, tasks
from everbeat.store.target import Target
from tests.maintenance.moving import ids_in, move, stored
from tests.maintenance.pruning import ended
from tests.store.conftest import StoreHarness, db
from tests.store.flows import Flow, task

__all__ = ["db"]


@pytest.fixture
def app(db: StoreHarness) -> Iterator[App]:
    own = App(db.target.url, schema=db.target.schema)
    yield own
    own.close()


@contextmanager
def other_session(target: Target) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(target.url) as connection:
        yield connection


def waits_for_lock(db: StoreHarness) -> None:
    """Wait until another session of this test waits for a lock."""
    query = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and application_name like 'everbeat%%'"
    for _ in range(1_000):
        if db.connection.execute(query).fetchone() != (0,):
            return
        sleep(0.01)  # no event reports a session that begins to wait
    raise AssertionError("no session waits")


def begin_move(other: psycopg.Connection[Any], db: StoreHarness) -> None:
    """Move all tasks in a transaction that stays open."""
    moved = other.execute(
        db.plain(
            "select m.moved from {schema}.move_to_history('00000000-0000-0000-0000-000000000000',"
            " 'ffffffff-ffff-ffff-ffff-ffffffffffff', 1000, '1 hour', null) m"
        )
    ).fetchone()
    assert moved == (1,)


def while_moving(db: StoreHarness, act: Callable[[], Any], *, commits: bool = True) -> Any:
    """Call `act` while a transaction has moved the task, and end the transaction once `act` waits for it."""
    with ThreadPoolExecutor(1) as pool, other_session(db.target) as other:
        begin_move(other, db)
        future: Future[Any] = pool.submit(act)
        waits_for_lock(db)
        if commits:
            other.commit()
        else:
            other.rollback()
        return future.result(timeout=30)


def prepared(db: StoreHarness, *, state: str = "FAILED") -> UUID:
    """Return a task that can move now, into a partition that exists."""
    task_id = ended(db, hours=1.5, state=state)
    end = db.row(task_id, "greatest(completed_at, failed_at, cancelled_at, expired_at)")
    assert db.run(history.add_part(end, unit="day"))
    return task_id


@pytest.mark.parametrize("commits", [True, False])
def test_a_retry_during_a_move_runs_the_task_again(db: StoreHarness, app: App, commits: bool) -> None:
    task_id = prepared(db)
    while_moving(db, lambda: app.retry(task_id), commits=commits)
    assert db.row(task_id, "state") == "PENDING"
    assert ids_in(db, "history") == set()


def test_a_cancel_during_a_move_says_that_the_task_has_ended(db: StoreHarness, app: App) -> None:
    task_id = prepared(db)
    found = while_moving(db, lambda: app.cancel(task_id))
    assert (found.verdict, found.state) == (CancelVerdict.ALREADY_ENDED, TaskState.FAILED)
    assert ids_in(db, "history") == {task_id}


def test_a_signal_during_a_move_is_refused(db: StoreHarness, app: App) -> None:
    task_id = prepared(db)
    with pytest.raises(SignalRefused, match="FAILED"):
        while_moving(db, lambda: app.signal(task_id, "go", 1))


def test_two_retries_of_a_moved_task_run_it_once(db: StoreHarness, app: App) -> None:
    task_id = prepared(db)
    assert move(db) == 1
    with ThreadPoolExecutor(1) as pool, other_session(db.target) as other:
        recalled = other.execute(
            db.plain("select {schema}.recall_from_history(%s, null)"), [task_id]
        ).fetchone()
        assert recalled == (1,)
        retry = tasks.retry(task_id, channel=db.target.channel, call=uuid4())
        other.execute(db.text(retry.name), retry.parameters)
        second = pool.submit(app.retry, task_id)
        waits_for_lock(db)
        other.commit()
        with pytest.raises(TaskNotRetryable, match="PENDING"):
            second.result(timeout=30)
    assert len(stored(db, task_id)["tasks"]) == 1
    assert ids_in(db, "history") == set()


def test_two_caretakers_move_each_task_once(db: StoreHarness) -> None:
    prepared(db)
    others = {ended(db, hours=1.5) for _ in range(20)}
    with ThreadPoolExecutor(4) as pool:
        moved = [each.result() for each in [pool.submit(move, db, step_rows=3) for _ in range(4)]]
    assert sum(moved) == 21
    assert ids_in(db, "history") >= others
    assert ids_in(db, "tasks") == set()


def test_a_move_that_is_killed_has_moved_nothing(db: StoreHarness) -> None:
    task_id = prepared(db)
    before = stored(db, task_id)
    with other_session(db.target) as other:
        begin_move(other, db)
        db.connection.execute("select pg_terminate_backend(%s)", [other.info.backend_pid])
        with pytest.raises(psycopg.OperationalError):
            other.execute("select 1")
    assert stored(db, task_id) == before
    assert move(db) == 1


def test_a_retried_workflow_gets_all_its_tasks_back(db: StoreHarness) -> None:
    """The rows of its other tasks are needed, too: a node that runs again reads their results."""
    flow = Flow.start(db, [task("a"), task("b")], on_error="fail")
    flow.play(lambda name: ValueError("no") if name == "b" else 1)
    db.connection.execute(
        db.plain(
            "update {schema}.tasks set completed_at = completed_at - interval '2 h', failed_at = failed_at - interval '2 h'"
        )
    )
    assert move(db) == 2
    assert ids_in(db, "tasks") == set()
    before = ids_in(db, "history")
    flow.retry()
    assert ids_in(db, "history") == set()
    assert ids_in(db, "tasks") > before
    flow.play(lambda name: 1)
    assert flow.state == "COMPLETED"


def test_cancelling_a_task_reaches_a_child_below_a_moved_one(db: StoreHarness, app: App) -> None:
    middle = ended(db, hours=2)
    top, leaf = db.send(), db.send()
    update = db.plain("update {schema}.tasks set parent_id = %s where id = %s")
    assert move(db) == 1
    db.connection.execute(db.plain("update {schema}.history set parent_id = %s where id = %s"), [top, middle])
    db.connection.execute(update, [middle, leaf])
    app.cancel(top)
    assert db.row(leaf, "state") == "CANCELLED"


def test_a_role_with_rights_on_rows_alone_moves_retries_and_drops(db: StoreHarness) -> None:
    task_id, role = ended(db, hours=2, state="FAILED"), f"role_{uuid4().hex[:8]}"
    names = {"schema": sql.Identifier(db.target.schema), "role": sql.Identifier(role)}
    for text in (
        "create role {role}",
        "grant usage on schema {schema} to {role}",
        "grant select, insert, update, delete on all tables in schema {schema} to {role}",
        "grant usage on sequence {schema}.audit_seq_seq to {role}",  # of the audit, which only tests install
    ):
        db.connection.execute(sql.SQL(text).format(**names))
    try:
        with psycopg.connect(db.target.url, autocommit=True) as worker:
            worker.execute(sql.SQL("set role {role}").format(**names))
            ((end,),) = worker.execute(db.plain("select failed_at from {schema}.tasks")).fetchall()
            assert worker.execute(db.plain("select {schema}.add_history_part(%s, 'day')"), [end]).fetchone()
            begin_move(worker, db)
            recall = db.plain("select {schema}.recall_from_history(%s, null)")
            assert worker.execute(recall, [task_id]).fetchone() == (1,)
            begin_move(worker, db)
            drop = db.plain(
                "select {schema}.drop_history_part(p.name, 'infinity') from {schema}.history_parts p"
            )
            assert worker.execute(drop).fetchone() == ("dropped",)
            worker.execute("reset role")
            db.connection.execute(sql.SQL("revoke delete on {schema}.history from {role}").format(**names))
            worker.execute(sql.SQL("set role {role}").format(**names))
            with pytest.raises(
                psycopg.errors.InsufficientPrivilege, match="needs DELETE on the table history"
            ):
                worker.execute(db.plain("select {schema}.drop_history_part('x', 'infinity')"))
    finally:
        db.connection.execute(sql.SQL("drop owned by {role}").format(**names))
        db.connection.execute(sql.SQL("drop role {role}").format(**names))


def test_a_task_that_is_retried_before_the_lock_stays(db: StoreHarness) -> None:
    """The move reads the newest row, and not that of its snapshot, if the row was changed in between."""
    task_id = prepared(db)
    with ThreadPoolExecutor(1) as pool, other_session(db.target) as other:
        # A lock of the workflows makes the move wait after it has chosen the tasks.
        other.execute(db.plain("lock table {schema}.workflows in access exclusive mode"))
        future = pool.submit(move, db)
        waits_for_lock(db)
        assert db.run(tasks.retry(task_id, channel=db.target.channel, call=uuid4()))
        other.commit()
        assert future.result(timeout=30) == 0
    assert db.row(task_id, "state") == "PENDING"


def test_a_retry_of_a_workflow_waits_for_a_move_of_its_tasks(db: StoreHarness) -> None:
    """Otherwise, it would not find the tasks of a nested workflow, which it has not locked before."""
    task_id, flow = prepared(db), uuid4()
    db.connection.execute(
        db.plain(
            "insert into {schema}.workflows (id, name, state, on_error, node_count, ended_at) values (%s, 'w', 'FAILED', 'fail', 1, now())"
        ),
        [flow],
    )
    db.connection.execute(
        db.plain("update {schema}.tasks set workflow_id = %s, node = 0 where id = %s"), [flow, task_id]
    )
    assert while_moving(db, lambda: db.run(history.recall_workflows([flow]))) == 1
    assert len(stored(db, task_id)["tasks"]) == 1
