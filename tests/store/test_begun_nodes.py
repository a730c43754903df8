"""Workflows whose tasks have recorded steps, wait for events or have sent children: what a pause, a cancel and a signal do to them."""

from __future__ import annotations

from everbeat.domain.recorded import NewChild
from everbeat.store import steps
from everbeat.store import workflow_control as control
from everbeat.store.leases import Claimed
from everbeat.store.partial_work import record_checkpoint
from everbeat.store.statement import Statement
from tests.store.conftest import Hands
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing
from tests.store.test_signals import ask_twice, overlapping, send, suspension
from tests.store.test_steps import again, loaded, record, send_child, sleep


def begun(flow: Flow) -> Claimed:
    """The task of the first node, which has recorded what it paid for and waits for an event."""
    flow.settle_down()
    (held,) = flow.claim(1)
    assert record(flow.hands, held)
    assert ask_twice(flow.hands, held).state == "OPEN"
    flow.hands.run(suspension(held, flow.hands))
    return held


def test_a_pause_takes_back_no_task_that_has_recorded_a_step(hands: Hands) -> None:
    flow = Flow.start(hands, [task("first"), task("next")], after(1, 0))
    held = begun(flow)
    flow.pause()
    assert hands.row(held.id, "state, waits_for") == ("PENDING", "approved")
    assert flow.nodes() == {"first": "ENQUEUED", "next": "PENDING"}
    assert send(hands, flow.id).verdict == "stored"
    resumed = again(hands)
    assert resumed.id == held.id, "its steps are those of its task"
    assert [each.name for each in loaded(hands, resumed) or ()] == ["approved", "charge"]
    flow.end([resumed], str)
    flow.settle_down()
    assert (flow.state, flow.nodes()) == ("PAUSED", {"first": "COMPLETED", "next": "READY"})
    flow.resume()
    flow.play()
    assert flow.state == "COMPLETED"


def test_a_retry_of_a_workflow_does_no_recorded_step_again(hands: Hands) -> None:
    flow = Flow.start(hands, [task("pays")])
    flow.settle_down()
    (held,) = flow.claim(1)
    assert record(hands, held)
    assert hands.run(record_checkpoint(held.id, held.claim_id, b'{"row": 7}', number=1, progress=None))
    flow.end([held], failing("pays"))
    flow.play()
    flow.retry()
    resumed = again(hands)
    assert resumed.id != held.id
    assert [each.name for each in loaded(hands, resumed) or ()] == ["charge"]
    assert resumed.checkpoint == '{"row": 7}'
    flow.end([resumed], failing("pays"))
    flow.settle_down()
    flow.retry()
    assert [each.name for each in loaded(hands, again(hands)) or ()] == ["charge"], (
        "of the one before, however often"
    )


def test_a_wait_that_failed_a_node_begins_anew_when_the_workflow_is_retried(hands: Hands) -> None:
    flow = Flow.start(hands, [task("first")])
    flow.settle_down()
    (held,) = flow.claim(1)
    for name in ("early", "late"):
        assert (
            hands.run(steps.wait_for_signal(held.id, held.claim_id, name=name, event=name, timeout_ms=0))
            is not None
        )
        hands.run(steps.wait_for_signal(held.id, held.claim_id, name=name, event=name, timeout_ms=0))
    assert {each.state for each in loaded(hands, held) or ()} == {"TIMED_OUT"}
    error = b'{"code": "EVENT_TIMEOUT", "message": "late"}'
    hands.settle(held, "FAILED", error=error)
    flow.settle_down()
    flow.retry()
    assert [each.name for each in loaded(hands, again(hands)) or ()] == ["early"], (
        "that one was caught by the code"
    )


def test_a_node_that_sleeps_or_waits_is_not_stuck(hands: Hands) -> None:
    flow = Flow.start(hands, [task("first"), task("other")])
    begun(flow)
    (other,) = flow.claim(1)
    sleep(hands, other)
    hands.run(suspension(other, hands))
    assert flow.stuck() == []
    first, second = hands.run(control.nodes(flow.id))
    assert {first.waits_for, second.waits_for} == {"approved", None}
    assert first.wake_at is not None
    assert second.wake_at is not None


def test_a_cancel_takes_back_what_is_suspended_and_what_was_sent(hands: Hands) -> None:
    flow = Flow.start(hands, [task("suspended"), task("running"), task("stranger")])
    suspended = begun(flow)
    (running, _) = flow.claim()
    sent = send_child(hands, running)
    assert sent is not None
    (child,) = flow.claim()
    assert child.id == sent.id
    grandchild = send_child(hands, child)
    assert grandchild is not None
    alone = hands.send()
    flow.cancel()
    assert hands.row(suspended.id, "state, error ->> 'code'") == ("CANCELLED", "WORKFLOW_CANCELLED")
    assert hands.row(child.id, "state, cancel_requested_at is not null") == ("RUNNING", True)
    assert hands.row(grandchild.id, "state, error ->> 'code'") == ("CANCELLED", "TASK_CANCELLED")
    assert hands.row(alone, "state") == "PENDING"


def test_a_child_that_is_sent_while_its_workflow_is_cancelled_is_cancelled_too(hands: Hands) -> None:
    flow = Flow.start(hands, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    overlapping(hands, child_of(hands, parent), flow.cancel)
    found = hands.connection.execute(
        hands.plain("select state from {schema}.tasks where parent_id = %s"), [parent.id]
    ).fetchall()
    assert found == [("CANCELLED",)]


def test_a_pause_leaves_children_alone(hands: Hands) -> None:
    flow = Flow.start(hands, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    sent = send_child(hands, parent)
    assert sent is not None
    assert sent.id is not None
    flow.pause()
    assert hands.row(sent.id, "state") == "PENDING"


def child_of(hands: Hands, held: Claimed) -> Statement[steps.ChildVerdict | None]:
    child = NewChild(name="work", queue="default", priority=0, args="{}", key=None)
    return steps.send_child(held.id, held.claim_id, step="work", child=child, channel=hands.target.channel)
