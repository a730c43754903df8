"""Signals, children and their cancel, as a program sees them through its app."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from everbeat import (
    App,
    CancelVerdict,
    ConfigurationError,
    PayloadError,
    ReasonCode,
    SignalRefused,
    TaskNotFound,
    TaskState,
)
from everbeat.domain.recorded import NewChild
from everbeat.store import steps
from everbeat.store.leases import Claimed
from tests.store.conftest import Hands


def begin_to_wait(hands: Hands, *, timeout_ms: int | None = None, suspended: bool = True) -> Claimed:
    held = hands.running()
    hands.run(
        steps.wait_for_signal(
            held.id, held.claim_id, name="approved", event="approved", timeout_ms=timeout_ms
        )
    )
    if suspended:
        hands.settle(held, "SUSPENDED")
    return held


def child_of(hands: Hands, parent: Claimed, step: str = "work") -> Any:
    child = NewChild(name="work", queue="default", priority=0, args="{}")
    sent = hands.run(
        steps.send_child(parent.id, parent.claim_id, step=step, child=child, channel=hands.target.channel)
    )
    assert sent is not None
    return sent.id


def test_a_signal_is_stored_for_a_handle_an_id_and_its_text(app: App, hands: Hands) -> None:
    held = hands.running()
    for target in (app.handle(held.id), held.id, str(held.id)):
        app.signal(target, "approved", {"by": ["ann", 1, None]})
    app.signal(held.id, "approved")
    found = hands.table("signals", "target, name, value")
    assert found == [(held.id, "approved", {"by": ["ann", 1, None]})] * 3 + [(held.id, "approved", None)]


def test_the_twin_does_the_same(app: App, hands: Hands) -> None:
    held = hands.running()

    async def tell() -> None:
        await app.asignal(held.id, "approved", 1)
        await app.aclose()

    asyncio.run(tell())
    assert hands.table("signals", "value") == [(1,)]


def test_what_has_ended_is_refused_by_its_id_and_state(app: App, hands: Hands) -> None:
    held = hands.running()
    hands.settle(held)
    with pytest.raises(
        SignalRefused, match=f"'approved' was not stored: task {held.id} is COMPLETED"
    ) as refusal:
        app.signal(held.id, "approved")
    assert (refusal.value.target, refusal.value.state) == (held.id, "COMPLETED")
    nobody = uuid4()
    with pytest.raises(TaskNotFound, match=str(nobody)):
        app.signal(nobody, "approved")
    assert hands.table("signals") == []


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
def test_what_cannot_arrive_is_refused(
    app: App, hands: Hands, name: str, value: object, message: str
) -> None:
    held = hands.running()
    with pytest.raises(PayloadError, match=message):
        app.signal(held.id, name, value)
    assert hands.table("signals") == []


def test_a_target_is_a_handle_or_an_id(app: App, hands: Hands) -> None:
    with pytest.raises(ConfigurationError, match="task_id = 7"):
        app.signal(7, "approved")  # type: ignore[arg-type]


def test_info_and_explain_say_what_it_waits_for(app: App, hands: Hands) -> None:
    endless, timed = begin_to_wait(hands), begin_to_wait(hands, timeout_ms=3_600_000)
    (reason,) = [one for one in app.explain(endless.id).reasons if one.code is ReasonCode.WAITING_FOR_EVENT]
    assert (reason.text, reason.until) == ("it waits for event 'approved'", None)
    assert reason.command == f"everbeat tasks signal {endless.id} approved"
    info = app.info(timed.id)
    (reason,) = [one for one in app.explain(timed.id).reasons if one.code is ReasonCode.WAITING_FOR_EVENT]
    assert (info.waits_for, info.wake_at) == ("approved", reason.until)
    assert reason.text.startswith("it waits for event 'approved' until 2")
    assert info.waiting_because is not None
    assert "it waits for event 'approved'" in info.waiting_because
    (again,) = app.explain(timed.id).second_runs
    assert (again.code, again.text) == (
        ReasonCode.SUSPENDED,
        "attempt 1 gave its slot back, at no cost, to sleep or to wait for an event",
    )


def test_explain_says_until_when_it_sleeps(app: App, hands: Hands) -> None:
    held = hands.running()
    hands.run(steps.begin_sleep(held.id, held.claim_id, name="sleep", duration_ms=3_600_000))
    assert app.info(held.id).wake_at is None, "it runs, and does not sleep yet"
    hands.settle(held, "SUSPENDED")
    (reason,) = [one for one in app.explain(held.id).reasons if one.code is ReasonCode.SLEEPING]
    assert reason.text == f"it sleeps until {reason.until.isoformat(timespec='milliseconds')}"  # type: ignore[union-attr]


def test_a_child_shows_its_parent_and_is_listed(app: App, hands: Hands) -> None:
    parent = hands.running()
    ids = {child_of(hands, parent), child_of(hands, parent, "work#2")}
    hands.send()
    assert {task.id for task in app.list_tasks(parent=parent.id)} == ids
    assert {app.info(each).parent_id for each in ids} == {parent.id}
    assert app.info(parent.id).parent_id is None


def test_a_cancel_takes_the_children_with_it(app: App, hands: Hands) -> None:
    parent = hands.running()
    child = child_of(hands, parent)
    (held,) = hands.claim("w2")
    hands.start(held)
    grandchild = child_of(hands, held)
    assert app.cancel(parent.id).verdict is CancelVerdict.REQUESTED
    assert app.info(child).cancel_requested_at is not None
    assert app.info(grandchild).state is TaskState.CANCELLED


def test_a_cancel_that_was_cut_off_is_finished_by_the_next(app: App, hands: Hands) -> None:
    parent = hands.running()
    child = child_of(hands, parent)
    hands.cancel(parent.id)  # the children come next, and the program ended before
    hands.settle(parent, "CANCELLED")
    assert app.info(child).state is TaskState.PENDING
    assert app.cancel(parent.id).verdict is CancelVerdict.ALREADY_ENDED
    assert app.info(child).state is TaskState.CANCELLED


def test_children_of_what_completed_go_on(app: App, hands: Hands) -> None:
    parent = hands.running()
    child = child_of(hands, parent)
    hands.settle(parent)
    assert app.cancel(parent.id).verdict is CancelVerdict.ALREADY_ENDED
    assert app.info(child).state is TaskState.PENDING
