"""A marked task is a PENDING task like any other: it is cancelled, expires, is counted, keeps its key and its place, and is pruned at last."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from uuid import UUID

from everbeat import App, TaskState
from everbeat.store import pauses, retention, tasks
from everbeat.store.suspects import suspects_wait
from tests.client.test_explaining import change, codes, dismiss, join
from tests.client.test_explaining_needs import NEW, OLD, mark, marked, registers
from tests.store.conftest import Hands
from tests.store.flows import task as node
from tests.workflows.sent import sent


def the_state(app: App, task: UUID) -> TaskState:
    return app.info(task).state


def test_ordinary_claims_pass_over_a_marked_task(hands: Hands) -> None:  # J2
    task, behind = marked(hands, "locale"), hands.send()
    assert [each.id for each in hands.claim()] == [behind]
    assert hands.claim() == []
    assert hands.row(task, "state, attempt, fence") == ("PENDING", 0, 0)


def test_a_marked_task_is_cancelled_at_once(app: App, hands: Hands) -> None:  # J2
    task = marked(hands, "locale")
    assert app.cancel(task).state is TaskState.CANCELLED
    info = app.info(task)
    assert (info.state, info.attempts) == (TaskState.CANCELLED, ())
    assert info.needs is not None, "the page still says what it needed"
    assert codes(app, task) == ["CANCELLED"]


def test_a_marked_task_expires_when_its_good_until_passes(app: App, hands: Hands) -> None:  # J2
    soon = datetime.now(UTC) + timedelta(hours=1)
    task, in_line = (
        marked(hands, "locale", good_until=soon),
        marked(hands, "x", good_until=soon, serial="key:a"),
    )
    assert hands.run(tasks.expire(channel=hands.target.channel, limit=10)) == []
    change(hands, "tasks", "good_until = statement_timestamp()")
    assert len(hands.run(tasks.expire(channel=hands.target.channel, limit=10))) == 2
    assert {the_state(app, each) for each in (task, in_line)} == {TaskState.EXPIRED}
    assert codes(app, task) == ["EXPIRED"]


def test_a_send_with_the_key_of_a_marked_task_gives_that_task(app: App, hands: Hands) -> None:  # J2
    task = marked(hands, "locale", key="order-1")
    again = app.send_by_name("work", {"locale": "en"}, key="order-1")
    assert again.id == task
    assert app.cancel(task).state is TaskState.CANCELLED
    assert app.send_by_name("work", {"locale": "en"}, key="order-1").id != task


def test_marked_tasks_are_counted_and_listed(app: App, hands: Hands) -> None:  # J2
    due, in_line, later = (
        marked(hands, "a"),
        marked(hands, "a", serial="key:a"),
        marked(hands, "a", delay_ms=60_000),
    )
    (queue,) = [each for each in app.queues() if each.name == "default"]
    assert (queue.pending, queue.scheduled) == (2, 1)
    assert queue.oldest_due_s is not None
    assert {each.id for each in app.list_tasks(state="PENDING")} == {due, in_line, later}
    assert "work" in hands.run(pauses.known_names("task"))


def test_a_marked_task_at_the_head_of_a_serial_line_holds_the_line(app: App, hands: Hands) -> None:  # J2
    head, behind = marked(hands, "locale", serial="key:a"), hands.send(serial="key:a")
    assert hands.claim() == []
    assert codes(app, behind) == ["SERIAL_LINE"]
    app.cancel(head)
    assert [each.id for each in hands.claim()] == [behind]


def test_a_paused_task_function_is_a_reason_beside_the_mark(app: App, hands: Hands) -> None:  # J2
    dismiss(hands, "w1", "w2")
    join(hands, "v1", metadata=registers(OLD))
    task = marked(hands, "locale", "user_id")
    app.pause_task("work", reason="deploy")
    assert codes(app, task) == ["NEEDS_OTHER_CODE", "TASK_PAUSED"]
    join(hands, "v2", metadata=registers(NEW))
    assert codes(app, task) == ["TASK_PAUSED"]
    app.resume_task("work")
    assert codes(app, task) == ["IN_LINE"]


def test_an_operator_who_retries_an_ended_marked_task_lets_workers_judge_it_anew(
    app: App, hands: Hands
) -> None:  # J2
    task = marked(hands, "locale")
    app.cancel(task)
    app.retry(task)
    assert app.info(task).needs is None
    assert [each.id for each in hands.claim()] == [task]


def test_a_suspect_that_is_marked_does_not_make_workers_look_for_suspects(
    app: App, hands: Hands
) -> None:  # J2
    task = marked(hands, "locale")
    change(hands, "tasks", "suspect = true")
    assert not hands.run(suspects_wait(names=["work"], queues=None))
    app.cancel(task)


def test_an_ended_marked_task_is_pruned(app: App, hands: Hands) -> None:  # J2
    task, waiting = marked(hands, "locale"), marked(hands, "locale")
    app.cancel(task)
    change(
        hands,
        "tasks",
        "cancelled_at = cancelled_at - interval '800 hours', sent_at = sent_at - interval '800 hours'",
    )
    first, last = UUID(int=0), UUID(int=2**128 - 1)
    hands.run(retention.prune_tasks(hours=720, limit=10, after=first, until=last))
    assert {each.id for each in app.list_tasks()} == {waiting}


def test_a_paused_or_cancelled_workflow_takes_its_marked_task_back(app: App, hands: Hands) -> None:  # J2
    handle, flow = sent(app, hands, [node("a")])
    (first,) = [each.id for each in app.list_tasks()]
    mark(hands, first, {"arguments": ["name"]})
    flow.pause()
    assert the_state(app, first) is TaskState.CANCELLED
    flow.resume()
    flow.settle_down()
    (second,) = [each.id for each in app.list_tasks(state="PENDING")]
    assert app.info(second).needs is None, "it is a new task"
    mark(hands, second, {"arguments": ["name"]})
    handle.cancel()
    flow.settle_down()
    assert the_state(app, second) is TaskState.CANCELLED
    assert str(handle.info().state) == "CANCELLED"
