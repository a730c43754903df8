"""Workflows that are paused, resumed, cancelled, retried and reconciled, at the level of statements."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from uuid import UUID, uuid4

import psycopg
import pytest

from everbeat.domain.plan import perform
from everbeat.domain.workflow.graph import Edge, Graph, GraphNode, Hole
from everbeat.domain.workflow.states import WorkflowRetryPlan
from everbeat.store import workflow_control as control
from everbeat.store import workflows
from everbeat.store.statement import Statement
from everbeat.store.workflow_control import find_stuck
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing, spread

T = TypeVar("T")


def test_a_resumed_workflow_continues(db: StoreHarness) -> None:  # W2
    nodes = [task("bad"), task("running"), task("waiting"), task("next")]
    flow = Flow.start(db, nodes, after(3, 1), on_error="pause")
    flow.settle_down()
    claimed = flow.by_name(db.claim())
    db.start(claimed["bad"], claimed["running"])
    flow.end([claimed["bad"]], failing("bad"))
    flow.settle_down()
    flow.end([claimed["running"]], str)
    flow.settle_down()
    assert flow.nodes()["next"] == "READY"
    flow.resume()
    flow.play()
    assert flow.nodes() == {
        "bad": "FAILED",
        "running": "COMPLETED",
        "waiting": "COMPLETED",
        "next": "COMPLETED",
    }
    assert flow.state == "FAILED"


def test_a_claimed_task_of_a_paused_workflow_cannot_start(db: StoreHarness) -> None:  # W2
    flow = Flow.start(db, [task("a")])
    flow.settle_down()
    (claimed,) = db.claim()
    flow.pause()
    assert db.start(claimed) == ["lost"]
    flow.resume()
    flow.play()
    assert flow.state == "COMPLETED"
    assert sorted(db.table("tasks", "state")) == [("CANCELLED",), ("COMPLETED",)]


def nested() -> list[GraphNode]:
    child = Graph(name="child", nodes=(task("inner"), task("inner next")), edges=(Edge(0, 1),))
    return [task("a"), GraphNode(name="child", kind="workflow", graph=child), task("b")]


def test_nested_workflows_pause_resume_and_cancel_with_their_parent(db: StoreHarness) -> None:  # W3
    flow = Flow.start(db, nested(), after(2, 1))
    flow.settle_down()
    flow.pause()
    assert {state for (state,) in db.table("workflows", "state")} == {"PAUSED"}
    assert flow.claim() == []
    flow.resume()
    assert {state for (state,) in db.table("workflows", "state")} == {"RUNNING"}
    flow.settle_down()
    flow.cancel()
    assert {state for (state,) in db.table("workflows", "state")} == {"CANCELLED"}
    assert flow.claim() == []


def test_a_cancel_skips_pending_nodes_and_asks_running_tasks_to_stop(
    db: StoreHarness,
) -> None:  # W3
    nodes = [task("running"), task("queued"), task("next")]
    flow = Flow.start(db, nodes, after(2, 0))
    flow.settle_down()
    claimed = flow.by_name(db.claim())
    db.start(claimed["running"])
    flow.cancel()
    assert flow.nodes() == {"running": "ENQUEUED", "queued": "CANCELLED", "next": "SKIPPED"}
    assert flow.state == "CANCELLING"
    assert db.row(claimed["running"].id, "cancel_requested_at") is not None
    flow.cancel()
    flow.end([claimed["running"]], str)
    flow.settle_down()
    assert flow.nodes()["running"] == "COMPLETED", "a success that happened is never hidden"
    assert flow.state == "CANCELLED"
    flow.cancel()
    flow.resume()
    assert flow.state == "CANCELLED"


def test_a_retry_of_a_workflow_repeats_failed_nodes_and_keeps_completed_ones(db: StoreHarness) -> None:
    nodes = [
        task("good"),
        task("bad"),
        task("next"),
        *[each for each in nested() if each.name == "child"],
        task("last"),
    ]
    flow = Flow.start(db, nodes, [*after(2, 0, 1), *after(4, 2, 3)])
    flow.play(failing("bad", "inner"))
    assert flow.state == "FAILED"
    assert flow.nodes() == {
        "good": "COMPLETED",
        "bad": "FAILED",
        "next": "SKIPPED",
        "child": "FAILED",
        "last": "SKIPPED",
    }
    played: list[str] = []
    flow.retry()
    assert flow.state == "RUNNING"
    flow.play(played.append)
    assert set(flow.nodes().values()) == {"COMPLETED"}
    assert flow.state == "COMPLETED"
    assert sorted(played) == ["bad", "inner", "inner next", "last", "next"]


def test_a_repeated_retry_of_a_workflow_is_not_applied_twice(db: StoreHarness) -> None:
    flow, call = Flow.start(db, [task("bad")]), uuid4()
    flow.play(failing("bad"))
    plan = WorkflowRetryPlan(
        states={0: "PENDING"}, emptied=frozenset(), children={}, again=(0,), completed=(), kept=()
    )
    db.run(control.retry(flow.id, {flow.id: plan}, call=call, channel=db.target.channel))
    flow.play(failing("bad"))
    for repeated, is_done in ((call, True), (uuid4(), False)):
        found = db.run(control.retry_hold(flow.id, call=repeated, from_node=None))
        assert found is not None
        assert (found.state, found.is_done) == ("FAILED", is_done)


def test_a_retry_of_a_workflow_repeats_failed_map_members(db: StoreHarness) -> None:
    flow = Flow.start(db, spread(3), output=0)
    flow.play(failing("all[1]"))
    flow.retry()
    flow.play(lambda name: name)
    assert (flow.state, flow.column("result")) == ("COMPLETED", ["all[0]", "all[1]", "all[2]"])


def chain(db: StoreHarness) -> Flow:
    flow = Flow.start(db, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    flow.end(flow.claim(), str)
    return flow


def hurt(db: StoreHarness, text: str) -> None:
    db.connection.execute(db.plain(text))


def test_the_reconciler_detects_a_task_that_ended_without_an_event(db: StoreHarness) -> None:  # W9
    flow = chain(db)
    hurt(db, "delete from {schema}.outbox")
    assert flow.stuck() == [("a", "TASK_ENDED")]
    flow.reconcile()
    assert flow.nodes() == {"a": "COMPLETED", "b": "ENQUEUED"}
    assert flow.stuck() == []


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("update {schema}.tasks set result = null", "RESULT_NOT_AVAILABLE"),
        ("delete from {schema}.tasks", "RESULT_NOT_AVAILABLE"),
        (
            "with a as (update {schema}.attempts set outcome = 'FAILED') update {schema}.tasks set state = 'FAILED', result = null, error = null",
            "WORKER_CRASHED",
        ),
        (
            "with a as (update {schema}.attempts set outcome = 'CANCELLED') update {schema}.tasks set state = 'CANCELLED', result = null",
            "TASK_CANCELLED",
        ),
    ],
)
def test_a_damaged_task_fails_its_dependants_instead_of_blocking_them(
    db: StoreHarness, damage: str, code: str
) -> None:  # W9
    flow = chain(db)
    db.connection.execute("set session_replication_role = replica")  # the damage must not create history
    hurt(db, damage)
    db.connection.execute("reset session_replication_role")
    hurt(db, "delete from {schema}.outbox")
    flow.reconcile()
    assert (flow.nodes()["b"], flow.state, flow.column("error")["code"]) == ("SKIPPED", "FAILED", code)
    assert flow.stuck() == []


def test_the_reconciler_detects_a_node_whose_parents_have_ended(db: StoreHarness) -> None:  # W9
    flow = chain(db)
    flow.settle_down()
    hurt(db, "delete from {schema}.tasks where node = 1")
    hurt(db, "update {schema}.nodes set state = 'PENDING', task_id = null, iteration = 0 where name = 'b'")
    assert flow.stuck() == [("b", "NOT_RESOLVED")]
    flow.reconcile()
    assert flow.nodes()["b"] == "ENQUEUED"


def test_the_reconciler_detects_open_edges_of_an_ended_node(db: StoreHarness) -> None:  # W9
    flow = chain(db)
    flow.settle_down()
    hurt(db, "delete from {schema}.tasks where node = 1")
    hurt(db, "update {schema}.nodes set state = 'PENDING', task_id = null, iteration = 0 where name = 'b'")
    hurt(db, "update {schema}.edges set state = 'OPEN'")
    assert flow.stuck() == [("b", "NOT_RESOLVED")]
    flow.reconcile()
    assert flow.nodes()["b"] == "ENQUEUED"


def test_the_reconciler_detects_a_ready_node_that_is_not_enqueued(db: StoreHarness) -> None:  # W9
    flow = Flow.start(db, [task("a")])
    hurt(db, "delete from {schema}.outbox")
    assert flow.stuck() == [("a", "NOT_ENQUEUED")]
    flow.reconcile()
    assert flow.nodes() == {"a": "ENQUEUED"}


def test_the_reconciler_detects_a_nested_workflow_whose_end_did_not_reach_its_parent(
    db: StoreHarness,
) -> None:  # W9
    flow = Flow.start(db, nested(), after(2, 1))
    flow.play()
    assert flow.state == "COMPLETED"
    hurt(
        db,
        "with t as (delete from {schema}.tasks where node = 2 returning id) delete from {schema}.attempts a using t where a.task_id = t.id",
    )
    hurt(db, "update {schema}.nodes set state = 'ENQUEUED' where name = 'child'")
    hurt(db, "update {schema}.nodes set state = 'PENDING', task_id = null, iteration = 0 where name = 'b'")
    hurt(db, "update {schema}.edges set state = 'OPEN' where parent = 1")
    hurt(db, "update {schema}.workflows set state = 'RUNNING', ended_at = null where parent_id is null")
    assert flow.stuck() == [("child", "CHILD_ENDED")]
    flow.reconcile()
    assert flow.nodes() == {"a": "COMPLETED", "child": "COMPLETED", "b": "ENQUEUED"}


def test_the_reconciler_detects_a_workflow_without_open_nodes_that_is_not_finished(
    db: StoreHarness,
) -> None:  # W9
    flow = chain(db)
    flow.play()
    hurt(db, "update {schema}.workflows set state = 'RUNNING', ended_at = null")
    assert flow.stuck() == [("", "NOT_FINISHED")]
    flow.reconcile()
    assert flow.state == "COMPLETED"


def test_the_reconciler_ignores_a_workflow_that_makes_progress(db: StoreHarness) -> None:
    chain(db)
    assert perform(find_stuck(grace_ms=60_000), db.run) == []


def test_the_reconciler_completes_a_cancel_that_was_not_carried_out(db: StoreHarness) -> None:  # W9
    child = Graph(name="child", nodes=(task("inner"),))
    nodes = [
        task("running"),
        task("queued"),
        GraphNode(name="child", kind="workflow", graph=child),
        task("next"),
    ]
    flow = Flow.start(db, nodes, after(3, 0))
    flow.settle_down()
    running = flow.by_name(db.claim())["running"]
    db.start(running)
    db.run(control.cancel(flow.id, channel=db.target.channel))
    hurt(db, "delete from {schema}.outbox")
    assert flow.stuck() == [(each, "NOT_CANCELLED") for each in ("child", "next", "queued", "running")]
    flow.reconcile()
    assert flow.stuck() == []
    assert flow.nodes() == {
        "running": "ENQUEUED",
        "queued": "CANCELLED",
        "child": "CANCELLED",
        "next": "SKIPPED",
    }
    flow.end([running], str)
    flow.settle_down()
    assert flow.state == "CANCELLED"


def forget(db: StoreHarness) -> None:
    """Delete the damaged rows, which would breach the invariants that are checked after a test."""
    hurt(db, "set session_replication_role = replica")
    for table in ("nodes", "edges", "outbox", "workflows", "tasks", "attempts"):
        hurt(db, f"delete from {{schema}}.{table}")
    hurt(db, "reset session_replication_role")


def test_a_node_whose_row_was_deleted_fails_and_its_dependants_are_resolved(db: StoreHarness) -> None:  # W9
    nodes = [task("a"), task("b"), task("told", template=('{"of":', Hole(0, "outcome"), "}"))]
    flow = Flow.start(db, nodes, [*after(1, 0), *after(2, 0, tolerates=True)])
    flow.settle_down()
    flow.end(flow.claim(), str)
    hurt(db, "delete from {schema}.nodes where name = 'a'")
    flow.settle_down()
    assert flow.stuck() == [("#0", "NODE_GONE")]
    (found,) = flow.recovered()
    assert (found.what, found.problem) == ("NODE_GONE", None)
    flow.play()
    assert flow.nodes() == {"#0": "FAILED", "b": "SKIPPED", "told": "COMPLETED"}
    assert flow.args("told")["of"]["failed"]["code"] == "RESULT_NOT_AVAILABLE"
    assert (flow.state, flow.column("error")["data"]["node"], flow.stuck()) == ("FAILED", "#0", [])
    flow.retry()
    assert (flow.state, flow.nodes()["#0"]) == ("FAILED", "FAILED"), "it has no task that could run again"
    forget(db)


def test_a_map_fails_if_the_row_of_a_member_was_deleted(db: StoreHarness) -> None:  # W9
    flow = Flow.start(db, spread(3), output=0)
    flow.settle_down()
    flow.end(flow.claim(), str)
    hurt(db, "delete from {schema}.nodes where name = 'all[1]'")
    flow.settle_down()
    flow.reconcile()
    assert (flow.nodes()["all"], flow.state) == ("FAILED", "FAILED")


def test_nodes_that_wait_for_each_other_are_reported_as_not_recovered(
    db: StoreHarness,
) -> None:  # W9
    flow = Flow.start(db, [task("a"), task("b")], after(1, 0))
    hurt(db, "update {schema}.nodes set state = 'PENDING'")
    hurt(
        db,
        "insert into {schema}.edges (workflow_id, parent, child) select workflow_id, 1, 0 from {schema}.edges",
    )
    hurt(db, "delete from {schema}.outbox")
    for dry_run in (True, False):
        (found,) = flow.recovered(dry_run=dry_run)
        assert (found.what, found.node) == ("NOTHING_MOVES", None)
        assert "are waiting for each other" in (found.problem or "")
    flow.cancel()
    assert flow.state == "CANCELLED"


def test_a_stuck_node_that_the_step_did_not_change_is_reported_as_not_recovered(
    db: StoreHarness,
) -> None:  # W9
    flow = chain(db)
    flow.settle_down()
    hurt(db, "delete from {schema}.tasks where node = 1")
    hurt(
        db,
        "update {schema}.nodes set state = 'PENDING', task_id = null, iteration = 0, kind = 'map' where name = 'b'",
    )
    hurt(db, "delete from {schema}.outbox")
    (found,) = flow.recovered()
    assert (found.node, found.what) == ("b", "NOT_RESOLVED")
    assert "should have fixed this changed nothing" in (found.problem or "")
    flow.cancel()


@pytest.mark.parametrize("verb", ["cancel", "pause", "resume"])
def test_two_steps_that_stop_or_resume_each_others_children_do_not_deadlock(
    db: StoreHarness, verb: str
) -> None:
    first, second = (Flow.start(db, nested(), after(2, 1)) for _ in range(2))
    first.settle_down()
    if verb == "resume":
        first.pause()
        second.pause()
    children = [child_of(first), child_of(second)]
    order = {"cancel": control.cancel, "pause": control.pause, "resume": control.resume}[verb]
    for each in (first, second):
        db.run(order(each.id, channel=db.target.channel))
    both_hold = threading.Barrier(2)

    def act(flow: Flow, other_child: UUID) -> None:
        with psycopg.connect(db.target.url) as connection:
            ask(connection, workflows.lock_these([flow.id, other_child]))
            both_hold.wait(timeout=10)
            follow = (
                workflows.let_go([flow.id])
                if verb == "resume"
                else workflows.withdraw([flow.id], channel=db.target.channel)
            )
            assert ask(connection, follow) == {flow.id}
            both_hold.wait(timeout=10)

    def ask(connection: psycopg.Connection[Any], statement: Statement[T]) -> T:
        rows = connection.execute(db.text(statement.name), statement.parameters).fetchall()
        return statement.read(rows)

    with ThreadPoolExecutor(2) as pool:
        running = [
            pool.submit(act, flow, child)
            for flow, child in zip((first, second), reversed(children), strict=True)
        ]
        for each in running:
            each.result(timeout=30)
    hurt(
        db,
        "insert into {schema}.outbox (workflow_id, node) select id, null from {schema}.workflows where parent_id is null",
    )
    first.settle_down()
    expected = {"cancel": "CANCELLED", "pause": "PAUSED", "resume": "RUNNING"}[verb]
    assert {state for (state,) in db.table("workflows", "state")} == {expected}


def child_of(flow: Flow) -> UUID:
    found = flow.db.connection.execute(
        flow.db.plain("select id from {schema}.workflows where parent_id = %s"), [flow.id]
    ).fetchone()
    assert found is not None
    return found[0]  # type: ignore[no-any-return]


def test_a_step_does_not_repeat_at_once_for_a_child_that_another_worker_holds(db: StoreHarness) -> None:
    flow = Flow.start(db, nested(), after(2, 1))
    flow.settle_down()
    db.run(control.cancel(flow.id, channel=db.target.channel))
    with db.connection.transaction():
        db.connection.execute(
            db.plain("select from {schema}.workflows where id = %s for no key update"), [child_of(flow)]
        )
        assert flow.step().workflows == 0
        assert db.run(workflows.happened())
    flow.settle_down()
    assert flow.state == "CANCELLED"
