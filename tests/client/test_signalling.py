"""Test signals, child tasks and their cancellation through the app."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from enum import Enum
from typing import Any
from uuid import uuid4

import pytest

from everbeat import App, TaskState
from everbeat.domain.task.context_backend import NewChild
from everbeat.errors import ConfigurationError, PayloadError, SignalRefused, TaskNotFound
from everbeat.inspection import CancelVerdict, ReasonCode
from everbeat.store import steps
from everbeat.store.claims import Claimed
from tests.store.conftest import StoreHarness


def begin_to_wait(db: StoreHarness, *, timeout_ms: int | None = None, suspended: bool = True) -> Claimed:
    held = db.running()
    db.run(
        steps.wait_for_signal(
            held.id, held.claim_id, name="approved", event="approved", timeout_ms=timeout_ms
        )
    )
    if suspended:
        db.settle(held, "SUSPENDED")
    return held


def child_of(db: StoreHarness, parent: Claimed, step: str = "work") -> Any:
    child = NewChild(name="work", queue="default", priority=0, args="{}")
    sent = db.run(
        steps.send_child(parent.id, parent.claim_id, step=step, child=child, channel=db.target.channel)
    )
    assert sent is not None
    return sent.id


class Fruit(Enum):
    PEAR = "pear"


def test_signal_accepts_a_handle_an_id_and_the_text_of_an_id(app: App, db: StoreHarness) -> None:
    held = db.running()
    for target in (app.handle(held.id), held.id, str(held.id)):
        app.signal(target, "approved", {"by": ["ann", 1, None]})
    app.signal(held.id, "approved")
    found = db.table("signals", "target, name, value")
    assert found == [(held.id, "approved", {"by": ["ann", 1, None]})] * 3 + [(held.id, "approved", None)]


def test_asignal_stores_a_signal(app: App, db: StoreHarness) -> None:
    held = db.running()

    async def tell() -> None:
        await app.asignal(held.id, "approved", 1)
        await app.aclose()

    asyncio.run(tell())
    assert db.table("signals", "value") == [(1,)]


def test_a_signal_to_an_ended_task_is_refused_with_its_id_and_state(app: App, db: StoreHarness) -> None:
    held = db.running()
    db.settle(held)
    with pytest.raises(
        SignalRefused, match=f"'approved' was not stored: task {held.id} is COMPLETED"
    ) as refusal:
        app.signal(held.id, "approved")
    assert (refusal.value.target, refusal.value.state) == (held.id, "COMPLETED")
    nobody = uuid4()
    with pytest.raises(TaskNotFound, match=str(nobody)):
        app.signal(nobody, "approved")
    assert db.table("signals") == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a#2", 1, "The name 'a#2' of a signal"),
        ("", 1, "The name '' of a signal"),
        ("a", {1, 2}, "The value of signal 'a' .*set"),
        ("a", {"at": datetime(2030, 1, 1, tzinfo=UTC)}, "The value of signal 'a'"),
        ("a", [float("nan")], "The value of signal 'a'"),
        ("a", "x" * 1_048_577, "takes 1,048,579 bytes"),
    ],
)
def test_a_signal_with_an_invalid_name_or_value_is_refused(
    app: App, db: StoreHarness, name: str, value: object, message: str
) -> None:
    held = db.running()
    with pytest.raises(PayloadError, match=message):
        app.signal(held.id, name, value)
    assert db.table("signals") == []


def test_an_answer_that_json_cannot_represent_is_refused_in_the_words_of_answers(
    app: App, db: StoreHarness
) -> None:
    held = db.running()
    with pytest.raises(PayloadError, match="The answer is of type") as refused:
        app.answer(held.id, Fruit.PEAR)
    assert "member.value" in str(refused.value)
    assert "signal" not in str(refused.value)


def test_the_fix_of_a_wrong_stream_name_is_about_streams(app: App, db: StoreHarness) -> None:
    held = db.running()
    with pytest.raises(PayloadError, match=r"of a stream of task .*Fix: use a short text such as 'tokens'"):
        app.handle(held.id).stream("x" * 201)


def test_signal_refuses_a_target_that_is_not_a_handle_or_an_id(app: App, db: StoreHarness) -> None:
    with pytest.raises(ConfigurationError, match="task_id = 7"):
        app.signal(7, "approved")  # type: ignore[arg-type]


def test_info_and_explain_name_the_event_that_a_task_waits_for(app: App, db: StoreHarness) -> None:
    endless, timed = begin_to_wait(db), begin_to_wait(db, timeout_ms=3_600_000)
    (reason,) = [one for one in app.explain(endless.id).reasons if one.code is ReasonCode.WAITING_FOR_EVENT]
    assert (reason.text, reason.until) == ("it is waiting for event 'approved'", None)
    assert reason.command == f"everbeat tasks signal {endless.id} approved"
    info = app.info(timed.id)
    (reason,) = [one for one in app.explain(timed.id).reasons if one.code is ReasonCode.WAITING_FOR_EVENT]
    assert (info.waits_for, info.wake_at) == ("approved", reason.until)
    assert reason.text.startswith("it is waiting for event 'approved' until 2")
    assert info.waiting_because is not None
    assert "it is waiting for event 'approved'" in info.waiting_because
    (again,) = app.explain(timed.id).second_runs
    assert (again.code, again.text) == (
        ReasonCode.SUSPENDED,
        "attempt 1 released its slot to sleep or to wait for an event, which is not charged",
    )


def test_explain_says_until_when_a_task_sleeps(app: App, db: StoreHarness) -> None:
    held = db.running()
    db.run(steps.begin_sleep(held.id, held.claim_id, name="sleep", duration_ms=3_600_000))
    assert app.info(held.id).wake_at is None, "it runs, and does not sleep yet"
    db.settle(held, "SUSPENDED")
    (reason,) = [one for one in app.explain(held.id).reasons if one.code is ReasonCode.SLEEPING]
    assert reason.text == f"it sleeps until {reason.until.isoformat(' ', 'milliseconds')}"  # type: ignore[union-attr]


def test_a_child_task_names_its_parent_and_is_listed_by_it(app: App, db: StoreHarness) -> None:
    parent = db.running()
    ids = {child_of(db, parent), child_of(db, parent, "work#2")}
    db.send()
    assert {task.id for task in app.list_tasks(parent=parent.id)} == ids
    assert {app.info(each).parent_id for each in ids} == {parent.id}
    assert app.info(parent.id).parent_id is None


def test_a_cancel_also_cancels_child_tasks(app: App, db: StoreHarness) -> None:
    parent = db.running()
    child = child_of(db, parent)
    (held,) = db.claim("w2")
    db.start(held)
    grandchild = child_of(db, held)
    assert app.cancel(parent.id).verdict is CancelVerdict.REQUESTED
    assert app.info(child).cancel_requested_at is not None
    assert app.info(grandchild).state is TaskState.CANCELLED


def test_a_second_cancel_finishes_one_that_did_not_reach_the_children(app: App, db: StoreHarness) -> None:
    parent = db.running()
    child = child_of(db, parent)
    db.cancel(parent.id)  # the children come next, and the program ended before
    db.settle(parent, "CANCELLED")
    assert app.info(child).state is TaskState.PENDING
    assert app.cancel(parent.id).verdict is CancelVerdict.ALREADY_ENDED
    assert app.info(child).state is TaskState.CANCELLED


def test_a_cancel_of_a_completed_task_leaves_its_children_alone(app: App, db: StoreHarness) -> None:
    parent = db.running()
    child = child_of(db, parent)
    db.settle(parent)
    assert app.cancel(parent.id).verdict is CancelVerdict.ALREADY_ENDED
    assert app.info(child).state is TaskState.PENDING
