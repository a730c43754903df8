"""Workflows that running tasks start: one for each step, only with a valid lease, cancelled with the task."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import pytest
from psycopg import Connection

from everbeat.domain.plan import perform
from everbeat.domain.task.context_backend import NewWorkflow
from everbeat.domain.workflow.graph import Graph, encode
from everbeat.store import tasks
from everbeat.store import workflow_control as control
from everbeat.store.claims import Claimed
from everbeat.store.plan import Plan
from everbeat.store.statement import Statement, compose
from everbeat.store.steps import ChildVerdict, cancel_started, start_by_task
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, task
from tests.store.test_batches import portion, send_children
from tests.store.test_signals import until_blocked
from tests.store.test_steps import send_child


def plan(db: StoreHarness, held: Claimed, step: str = "flow", **more: Any) -> Plan[ChildVerdict | None]:
    graph = Graph(name="flow", nodes=(task("a"), task("b")))
    workflow = NewWorkflow(name="flow", graph=encode(graph).decode(), **more)
    return start_by_task(held.id, held.claim_id, step=step, workflow=workflow, channel=db.target.channel)


def answered(db: StoreHarness, connection: Connection[Any], statement: Statement[Any]) -> Any:
    cursor = connection.execute(compose(statement.name, db.target.schema), statement.parameters)
    return statement.read(cursor.fetchall())


def started_by(db: StoreHarness, held: Claimed, step: str = "flow", **more: Any) -> ChildVerdict | None:
    return db.database.transact(lambda run: perform(plan(db, held, step, **more), run))


def start(db: StoreHarness, held: Claimed, step: str = "flow", **more: Any) -> UUID:
    found = started_by(db, held, step, **more)
    assert found is not None
    assert found.id is not None
    return found.id


def test_a_step_starts_one_workflow_in_all_attempts(db: StoreHarness) -> None:
    held = db.running()
    first = start(db, held)
    assert start(db, held) == first
    other = start(db, held, "flow#2")
    assert other != first
    db.settle(held, "RELEASED")
    again = next(one for one in db.claim("w2") if one.id == held.id)
    db.start(again)
    assert start(db, again) == first
    rows = db.table("workflows", "id, parent_task_id, parent_id")
    assert sorted(rows) == sorted([(first, held.id, None), (other, held.id, None)])
    assert first.bytes[:6] == held.id.bytes[:6], "retention uses the time in an id"
    assert sorted(db.table("steps", "kind, name")) == [("child", "flow"), ("child", "flow#2")]


def test_a_task_that_lost_its_lease_starts_no_workflow(db: StoreHarness) -> None:
    held = db.running()
    db.settle(held, "RELEASED")
    db.start(*db.claim("w2"))
    assert started_by(db, held) is None
    assert db.table("workflows", "id") == []


def test_a_task_with_a_requested_cancel_starts_no_further_workflow(db: StoreHarness) -> None:
    held = db.running()
    first = start(db, held)
    db.cancel(held.id)
    assert started_by(db, held, "flow#2") == ChildVerdict("cancelled", None)
    assert start(db, held) == first


def test_a_start_with_the_key_of_a_live_workflow_returns_that_workflow(db: StoreHarness) -> None:
    known = Flow.start(db, [task("a")], key="k")
    held = db.running()
    assert start(db, held, key="k") == known.id
    assert db.table("workflows", "parent_task_id") == [(None,)]


def test_a_pruned_workflow_is_not_started_again(db: StoreHarness) -> None:
    held = db.running()
    first = start(db, held)
    db.connection.execute(db.plain("delete from {schema}.workflows"))
    assert start(db, held) == first
    assert db.table("workflows", "id") == []


def test_a_cancel_reaches_the_workflows_that_a_task_and_its_children_started(db: StoreHarness) -> None:
    parent = db.running()
    sent = send_child(db, parent)
    (child,) = db.claim("w2")
    assert sent is not None
    assert sent.id == child.id
    db.start(child)
    ids = {start(db, parent), start(db, child)}
    paused = start(db, parent, "flow#2")
    db.run(control.pause(paused, channel=db.target.channel))
    stranger = Flow.start(db, [task("a")])
    channel = db.target.channel
    assert {*db.run(cancel_started(parent.id, channel=channel))} == {*ids, paused}
    assert db.run(cancel_started(parent.id, channel=channel)) == []
    stranger.settle_down()
    states = dict(db.table("workflows", "id, state"))
    assert states == {**dict.fromkeys([*ids, paused], "CANCELLED"), stranger.id: "RUNNING"}


def test_the_code_of_a_task_cancels_its_workflows_only_under_its_lease(db: StoreHarness) -> None:
    parent, channel = db.running(), db.target.channel
    started = start(db, parent)
    assert db.run(cancel_started(parent.id, channel=channel, claim_id=uuid4())) == []
    assert db.table("workflows", "state") == [("RUNNING",)]
    assert db.run(cancel_started(parent.id, channel=channel, claim_id=parent.claim_id)) == [started]
    assert db.run(cancel_started(parent.id, channel=channel, claim_id=parent.claim_id)) == []
    assert db.table("workflows", "state") == [("CANCELLING",)]


@pytest.mark.parametrize("by_child", [False, True])
def test_a_cancelled_workflow_cancels_the_workflows_that_its_tasks_started(
    db: StoreHarness, by_child: bool
) -> None:
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    if by_child:
        send_child(db, parent)
        (parent,) = flow.claim()
    started = start(db, parent)
    flow.settle_down()
    flow.cancel()
    assert Flow(db, started).state == "CANCELLED"


def test_a_workflow_that_is_started_during_the_cancel_of_its_parent_is_cancelled_too(
    db: StoreHarness,
) -> None:
    """The cancel waits for the row of the task, and reads again after the task's cancel was requested."""
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    with db.target.connect("the first") as connection, ThreadPoolExecutor(1) as pool:
        connection.execute("begin")
        verdict = perform(plan(db, parent), partial(answered, db, connection))
        cancelled = pool.submit(flow.cancel)
        until_blocked(db, cancelled)
        connection.execute("commit")
        cancelled.result(timeout=20)
    assert Flow(db, verdict.id).state == "CANCELLED"


@pytest.mark.parametrize("runs", [2, 3])
@pytest.mark.parametrize("by", ["task", "workflow"])
def test_a_retried_node_cancels_the_children_and_workflows_of_its_earlier_task(
    db: StoreHarness, by: str, runs: int
) -> None:  # J7
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (held,) = flow.claim()
    started, sent = start(db, held), send_child(db, held)
    stranger = Flow.start(db, [task("a")], key="k")
    assert start(db, held, "found by its key", key="k") == stranger.id
    assert sent is not None
    for _ in range(1, runs):
        db.settle(held, "FAILED")
        flow.settle_down()
        flow.retry()
        held = next(one for one in flow.claim() if flow.names().get(one.id) == "parent")
        assert start(db, held) == started
    assert db.cancel(held.id) == "REQUESTED" if by == "task" else flow.cancel() is None
    if by == "task":
        channel = db.target.channel
        db.run(tasks.cancel_children(held.id, channel=channel))
        assert db.run(cancel_started(held.id, channel=channel)) == [started]
        flow.settle_down()
    assert db.row(sent.id, "state = 'CANCELLED' or cancel_requested_at is not null")
    assert Flow(db, started).column("cancel_requested_at") is not None
    assert stranger.state == "RUNNING"


@pytest.mark.parametrize("by", ["task", "workflow"])
def test_a_retried_node_cancels_the_gathered_children_of_its_earlier_task(
    db: StoreHarness, by: str
) -> None:  # J7
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (held,) = flow.claim()
    gathered = portion(held.id)
    assert send_children(db, held, gathered) is False
    db.settle(held, "FAILED")
    flow.settle_down()
    flow.retry()
    held = next(one for one in flow.claim() if flow.names().get(one.id) == "parent")
    if by == "task":
        assert db.cancel(held.id) == "REQUESTED"
        db.run(tasks.cancel_children(held.id, channel=db.target.channel))
    else:
        flow.cancel()
    for child in gathered.ids:
        assert db.row(child, "state = 'CANCELLED' or cancel_requested_at is not null")


def test_a_cancel_ignores_a_workflow_that_another_task_started_with_the_same_key(
    db: StoreHarness,
) -> None:  # J7
    other = db.running()
    known = start(db, other, key="k")
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    held = next(one for one in flow.claim() if flow.names().get(one.id) == "parent")
    assert start(db, held, "found by its key", key="k") == known
    db.cancel(held.id)
    assert db.run(cancel_started(held.id, channel=db.target.channel)) == []
    flow.cancel()
    assert Flow(db, known).state == "RUNNING"


@pytest.mark.parametrize("by", ["task", "workflow"])
def test_a_workflow_started_by_the_completed_task_of_a_retried_node_continues(
    db: StoreHarness, by: str
) -> None:  # J7
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (held,) = flow.claim()
    started = start(db, held)
    db.settle(held)
    flow.settle_down()
    flow.retry(from_node="parent")
    again = flow.by_name(flow.claim())["parent"]
    other = start(db, again)
    assert other != started
    if by == "task":
        db.cancel(again.id)
        assert db.run(cancel_started(again.id, channel=db.target.channel)) == [other]
    else:
        flow.cancel()
    assert (Flow(db, started).state, Flow(db, other).column("cancel_requested_at") is not None) == (
        "RUNNING",
        True,
    )


def test_a_pause_does_not_affect_workflows_that_tasks_started(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("parent")])
    flow.settle_down()
    (parent,) = flow.claim()
    started = start(db, parent)
    flow.pause()
    assert Flow(db, started).state == "RUNNING"


def test_a_workflow_started_by_a_task_can_be_retried_separately(db: StoreHarness) -> None:
    held = db.running()
    flow = Flow(db, start(db, held))
    db.settle(held)
    flow.play(lambda name: ValueError("no"))
    assert flow.state == "FAILED"
    flow.retry()
    flow.play()
    assert flow.state == "COMPLETED"
