"""Test that a task marked with needs behaves like any PENDING task until it ends and is pruned."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from everbeat import App, TaskState
from everbeat.store import expiry, retention, tasks
from everbeat.store.claims import suspects_wait
from tests.client.test_explaining import change, codes, end_workers, join
from tests.client.test_explaining_needs import NEW, OLD, mark, marked, registers
from tests.store.conftest import StoreHarness
from tests.store.flows import task as node
from tests.workflows.sent import sent


def the_state(app: App, task: UUID) -> TaskState:
    return app.info(task).state


def test_ordinary_claims_skip_a_marked_task(db: StoreHarness) -> None:  # J2
    task, behind = marked(db, "locale"), db.send()
    assert [each.id for each in db.claim()] == [behind]
    assert db.claim() == []
    assert db.row(task, "state, attempt, fence") == ("PENDING", 0, 0)


def test_a_marked_task_is_cancelled_at_once(app: App, db: StoreHarness) -> None:  # J2
    task = marked(db, "locale")
    assert app.cancel(task).state is TaskState.CANCELLED
    info = app.info(task)
    assert (info.state, info.attempts) == (TaskState.CANCELLED, ())
    assert info.needs is not None, "the task still shows what it needed"
    assert codes(app, task) == ["CANCELLED"]


def test_a_marked_task_expires_when_its_good_until_passes(app: App, db: StoreHarness) -> None:  # J2
    soon = datetime.now(UTC) + timedelta(hours=1)
    task, in_line = (
        marked(db, "locale", good_until=soon),
        marked(db, "x", good_until=soon, serial="key:a"),
    )
    assert db.run(expiry.expire(channel=db.target.channel, limit=10)) == []
    change(db, "tasks", "good_until = statement_timestamp()")
    assert len(db.run(expiry.expire(channel=db.target.channel, limit=10))) == 2
    assert {the_state(app, each) for each in (task, in_line)} == {TaskState.EXPIRED}
    assert codes(app, task) == ["EXPIRED"]


def test_a_send_with_the_key_of_a_marked_task_returns_that_task(app: App, db: StoreHarness) -> None:  # J2
    task = marked(db, "locale", key="order-1")
    again = app.send_by_name("work", {"locale": "en"}, key="order-1")
    assert again.id == task
    assert app.cancel(task).state is TaskState.CANCELLED
    assert app.send_by_name("work", {"locale": "en"}, key="order-1").id != task


def test_marked_tasks_are_counted_and_listed(app: App, db: StoreHarness) -> None:  # J2
    due, in_line, later = (
        marked(db, "a"),
        marked(db, "a", serial="key:a"),
        marked(db, "a", delay_ms=60_000),
    )
    (queue,) = [each for each in app.queues() if each.name == "default"]
    assert (queue.pending, queue.scheduled) == (2, 1)
    assert queue.oldest_due_s is not None
    assert {each.id for each in app.list_tasks(state="PENDING")} == {due, in_line, later}
    assert "work" in db.run(tasks.known_names("task"))


def test_a_marked_task_at_the_head_of_a_serial_line_blocks_the_line(app: App, db: StoreHarness) -> None:  # J2
    head, behind = marked(db, "locale", serial="key:a"), db.send(serial="key:a")
    assert db.claim() == []
    assert codes(app, behind) == ["SERIAL_LINE"]
    app.cancel(head)
    assert [each.id for each in db.claim()] == [behind]


def test_a_marked_task_whose_function_is_paused_has_both_reasons(app: App, db: StoreHarness) -> None:  # J2
    end_workers(db, "w1", "w2")
    join(db, "v1", metadata=registers(OLD))
    task = marked(db, "locale", "user_id")
    app.pause_task("work", reason="deploy")
    assert codes(app, task) == ["NEEDS_OTHER_CODE", "TASK_PAUSED"]
    join(db, "v2", metadata=registers(NEW))
    assert codes(app, task) == ["TASK_PAUSED"]
    app.resume_task("work")
    assert codes(app, task) == ["IN_LINE"]


def test_a_retry_of_an_ended_marked_task_removes_its_mark(app: App, db: StoreHarness) -> None:  # J2
    task = marked(db, "locale")
    app.cancel(task)
    app.retry(task)
    assert app.info(task).needs is None
    assert [each.id for each in db.claim()] == [task]


def test_a_marked_suspect_does_not_make_workers_query_for_suspects(app: App, db: StoreHarness) -> None:  # J2
    task = marked(db, "locale")
    change(db, "tasks", "suspect = true")
    assert not db.run(suspects_wait(names=["work"], queues=None))
    app.cancel(task)


def test_an_ended_marked_task_is_pruned(app: App, db: StoreHarness) -> None:  # J2
    task, waiting = marked(db, "locale"), marked(db, "locale")
    app.cancel(task)
    change(
        db,
        "tasks",
        "cancelled_at = cancelled_at - interval '800 hours', sent_at = sent_at - interval '800 hours'",
    )
    first, last = UUID(int=0), UUID(int=2**128 - 1)
    db.run(retention.prune_tasks(hours=720, limit=10, after=first, until=last))
    assert {each.id for each in app.list_tasks()} == {waiting}


def test_a_paused_or_cancelled_workflow_cancels_its_marked_task(app: App, db: StoreHarness) -> None:  # J2
    handle, flow = sent(app, db, [node("a")])
    (first,) = [each.id for each in app.list_tasks()]
    mark(db, first, {"arguments": ["name"]})
    flow.pause()
    assert the_state(app, first) is TaskState.CANCELLED
    flow.resume()
    flow.settle_down()
    (second,) = [each.id for each in app.list_tasks(state="PENDING")]
    assert app.info(second).needs is None, "it is a new task"
    mark(db, second, {"arguments": ["name"]})
    handle.cancel()
    flow.settle_down()
    assert the_state(app, second) is TaskState.CANCELLED
    assert str(handle.info().state) == "CANCELLED"
