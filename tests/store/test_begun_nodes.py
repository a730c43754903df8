"""Workflows whose tasks have recorded steps, wait for events or have sent children: what a pause, a cancel and a signal do to them."""

from __future__ import annotations

from everbeat.domain.recorded import NewChild
from everbeat.store import steps
from everbeat.store.leases import Claimed
from everbeat.store.statement import Statement
from tests.store.conftest import Hands
from tests.store.flows import Flow, after, task
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


def test_a_node_that_sleeps_or_waits_is_not_stuck(hands: Hands) -> None:
    flow = Flow.start(hands, [task("first"), task("other")])
    begun(flow)
    (other,) = flow.claim(1)
    sleep(hands, other)
    hands.run(suspension(other, hands))
    assert flow.stuck() == []


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
