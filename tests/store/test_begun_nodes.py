"""Workflows whose tasks have recorded steps, wait for events or have sent children: the effects of a pause, a cancel and a signal."""

from __future__ import annotations

from everbeat.domain.task.context_backend import NewChild
from everbeat.store import steps
from everbeat.store import workflow_control as control
from everbeat.store.claims import Claimed
from everbeat.store.statement import Statement
from everbeat.store.steps import record_checkpoint
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing
from tests.store.test_signals import ask_twice, overlapping, send, suspension
from tests.store.test_steps import again, loaded, record, send_child, sleep


def begun(flow: Flow) -> Claimed:
    """Return the task of the first node, which has recorded a step and waits for an event."""
    flow.settle_down()
    (held,) = flow.claim(1)
    assert record(flow.db, held)
    assert ask_twice(flow.db, held).state == "OPEN"
    flow.db.run(suspension(held, flow.db))
    return held


def test_a_pause_of_a_workflow_keeps_a_task_that_has_recorded_a_step(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("first"), task("next")], after(1, 0))
    held = begun(flow)
    flow.pause()
    assert db.row(held.id, "state, waits_for") == ("PENDING", "approved")
    assert flow.nodes() == {"first": "ENQUEUED", "next": "PENDING"}
    assert send(db, flow.id).verdict == "stored"
    resumed = again(db)
    assert resumed.id == held.id, "its steps are those of its task"
    assert [each.name for each in loaded(db, resumed) or ()] == ["approved", "charge"]
    flow.end([resumed], str)
    flow.settle_down()
    assert (flow.state, flow.nodes()) == ("PAUSED", {"first": "COMPLETED", "next": "READY"})
    flow.resume()
    flow.play()
    assert flow.state == "COMPLETED"


def test_a_retry_of_a_workflow_keeps_the_recorded_steps_of_its_tasks(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("pays")])
    flow.settle_down()
    (held,) = flow.claim(1)
    assert record(db, held, digest="d")
    assert db.run(record_checkpoint(held.id, held.claim_id, b'{"row": 7}', number=1, progress=None))
    flow.end([held], failing("pays"))
    flow.play()
    flow.retry()
    resumed = again(db)
    assert resumed.id != held.id
    assert [(each.name, each.digest) for each in loaded(db, resumed) or ()] == [("charge", "d")]
    assert resumed.checkpoint == '{"row": 7}'
    flow.end([resumed], failing("pays"))
    flow.settle_down()
    flow.retry()
    assert [each.name for each in loaded(db, again(db)) or ()] == ["charge"], (
        "of the one before, however often"
    )


def test_a_retry_of_a_workflow_repeats_the_wait_that_failed_the_node(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("first")])
    flow.settle_down()
    (held,) = flow.claim(1)
    for name in ("early", "late"):
        assert (
            db.run(steps.wait_for_signal(held.id, held.claim_id, name=name, event=name, timeout_ms=0))
            is not None
        )
        db.run(steps.wait_for_signal(held.id, held.claim_id, name=name, event=name, timeout_ms=0))
    assert {each.state for each in loaded(db, held) or ()} == {"TIMED_OUT"}
    error = b'{"code": "EVENT_TIMEOUT", "message": "late"}'
    db.settle(held, "FAILED", error=error)
    flow.settle_down()
    flow.retry()
    assert [each.name for each in loaded(db, again(db)) or ()] == ["early"], "that one was caught by the code"


def test_a_node_whose_task_sleeps_or_waits_is_not_stuck(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("first"), task("other")])
    begun(flow)
    (other,) = flow.claim(1)
    sleep(db, other)
    db.run(suspension(other, db))
    assert flow.stuck() == []
    first, second = db.run(control.nodes(flow.id))
    assert {first.waits_for, second.waits_for} == {"approved", None}
    assert first.wake_at is not None
    assert second.wake_at is not None


def test_a_cancel_of_a_workflow_cancels_suspended_tasks_and_children(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("suspended"), task("running"), task("stranger")])
    suspended = begun(flow)
    (running, _) = flow.claim()
    sent = send_child(db, running)
    assert sent is not None
    (child,) = flow.claim()
    assert child.id == sent.id
    grandchild = send_child(db, child)
    assert grandchild is not None
    alone = db.send()
    flow.cancel()
    assert db.row(suspended.id, "state, error ->> 'code'") == ("CANCELLED", "WORKFLOW_CANCELLED")
    assert db.row(child.id, "state, cancel_requested_at is not null") == ("RUNNING", True)
    assert db.row(grandchild.id, "state, error ->> 'code'") == ("CANCELLED", "TASK_CANCELLED")
    assert db.row(alone, "state") == "PENDING"


def test_a_cancel_of_a_workflow_also_cancels_a_child_that_is_sent_meanwhile(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    overlapping(db, child_of(db, parent), flow.cancel)
    found = db.connection.execute(
        db.plain("select state from {schema}.tasks where parent_id = %s"), [parent.id]
    ).fetchall()
    assert found == [("CANCELLED",)]


def test_a_pause_of_a_workflow_does_not_affect_children_of_its_tasks(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    sent = send_child(db, parent)
    assert sent is not None
    assert sent.id is not None
    flow.pause()
    assert db.row(sent.id, "state") == "PENDING"


def child_of(db: StoreHarness, held: Claimed) -> Statement[steps.ChildVerdict | None]:
    child = NewChild(name="work", queue="default", priority=0, args="{}", key=None)
    return steps.send_child(held.id, held.claim_id, step="work", child=child, channel=db.target.channel)
