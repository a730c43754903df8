"""Test workflows with rows broken by SQL: commands and `doctor` name them, a cancel ends them, and others continue."""

from __future__ import annotations

import logging

import pytest

from everbeat.maintenance.reconciler import Reconciler, WorkflowUnstuck
from tests.cli.conftest import Command, everbeat, forks
from tests.recovering.conftest import ManualObserver, StoreHarness
from tests.store.flows import Flow, after, task

__all__ = ["everbeat", "forks"]

BREAKS_THE_STEP = {
    "a node without a queue": "update {schema}.nodes set queue = null where name = 'b' and workflow_id = %s",
    "a node without a task": "update {schema}.nodes set task = null where name = 'b' and workflow_id = %s",
    "options that are no options": "update {schema}.nodes set options = '{{\"good_until\": \"soon\"}}' where name = 'b' and workflow_id = %s",
    "a queue that no index can hold": "update {schema}.nodes set queue = (select string_agg(md5(n::text), '') from generate_series(1, 300) n)"
    " where name = 'b' and workflow_id = %s",
}


def apply_damage(db: StoreHarness, flow: Flow, damage: str) -> None:
    db.connection.execute(db.plain(damage), [flow.id])


def two_whose_first_task_ended(db: StoreHarness) -> tuple[Flow, Flow]:
    """Start two chains of two nodes whose first tasks have ended, without advancing the workflows."""
    flows = [Flow.start(db, [task("a"), task("b")], after(1, 0)) for _ in range(2)]
    flows[0].settle_down()
    for each in db.claim():
        db.start(each)
        db.settle(each, result=b"1")
    db.connection.execute(db.plain("delete from {schema}.outbox"))
    return flows[0], flows[1]


@pytest.mark.parametrize("damage", BREAKS_THE_STEP.values(), ids=BREAKS_THE_STEP)
def test_a_broken_workflow_is_reported_can_be_cancelled_and_blocks_no_other(
    db: StoreHarness, everbeat: Command, damage: str
) -> None:  # J17
    broken, sound = two_whose_first_task_ended(db)
    apply_damage(db, broken, damage)
    answer = everbeat("workflows", "reconcile", "--json").assert_code(0)
    problems = {each["workflow_id"]: each["problem"] for each in answer.document["stuck"]}
    assert problems[str(sound.id)] is None
    assert problems[str(broken.id)]
    assert sound.nodes() == {"a": "COMPLETED", "b": "ENQUEUED"}
    said = everbeat("workflows", "reconcile").assert_code(0)
    assert f"{broken.id} cannot continue" in said.err
    found = {each["code"]: each for each in everbeat("doctor", "--json").document["checks"]}["STUCK"]
    assert found["verdict"] == "WARN"
    assert str(broken.id) in found["text"]
    assert str(sound.id) not in found["text"]
    everbeat("workflows", "cancel", str(broken.id)).assert_code(0)
    broken.settle_down()
    assert broken.state == "CANCELLED"


async def test_the_reconciler_reports_a_broken_workflow_once_and_never_as_repaired(
    observer: ManualObserver, db: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:  # J17
    broken, sound = two_whose_first_task_ended(db)
    apply_damage(db, broken, BREAKS_THE_STEP["a node without a queue"])
    reconciler = Reconciler(
        observer.environment(check_interval_ms=1_000), transactions=observer.session, grace_ms=0
    )
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        db.connection.execute(db.plain("delete from {schema}.turns"))
        await reconciler.tick()
    assert sound.nodes()["b"] == "ENQUEUED"
    assert broken.nodes() == {"a": "ENQUEUED", "b": "PENDING"}
    unstuck = [each.workflow_ids for each in observer.told(WorkflowUnstuck)]  # type: ignore[attr-defined]
    assert unstuck == [(sound.id,)]
    assert caplog.text.count(f"workflow_cannot_go_on workflow={broken.id}") == 1
    forget(db)


async def test_the_reconciler_logs_an_unchanged_workflow_once_and_not_as_repaired(
    observer: ManualObserver, db: StoreHarness, caplog: pytest.LogCaptureFixture
) -> None:  # W9
    flow = Flow.start(db, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    apply_damage(db, flow, "update {schema}.nodes set state = 'PENDING' where workflow_id = %s")
    apply_damage(db, flow, BREAKS_THE_GRAPH["a cycle"])
    reconciler = Reconciler(
        observer.environment(check_interval_ms=1_000), transactions=observer.session, grace_ms=0
    )
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        db.connection.execute(db.plain("delete from {schema}.turns"))
        await reconciler.tick()
    assert observer.told(WorkflowUnstuck) == []
    assert caplog.text.count(f"workflow_cannot_go_on workflow={flow.id}") == 1
    assert "are waiting for each other" in caplog.text
    forget(db)


async def test_the_reconciler_reports_all_workflows_of_a_pass_in_one_event(
    observer: ManualObserver, db: StoreHarness
) -> None:  # W9
    flows = [Flow.start(db, [task("a"), task("b")], after(1, 0)) for _ in range(8)]
    flows[0].settle_down()
    for each in db.claim(limit=8):
        db.start(each)
        db.settle(each, result=b"1")
    db.connection.execute(db.plain("delete from {schema}.outbox"))
    await Reconciler(observer.environment(), transactions=observer.session, grace_ms=0).tick()
    (told,) = observer.told(WorkflowUnstuck)
    assert told.found == 8  # type: ignore[attr-defined]
    assert len(told.first) == 5  # type: ignore[attr-defined]
    assert all(flow.nodes()["b"] == "ENQUEUED" for flow in flows)


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLING"])
def test_a_workflow_with_an_unreadable_success_policy_ends(db: StoreHarness, state: str) -> None:  # J17
    broken = Flow.start(db, [task("a")])
    sound = Flow.start(db, [task("a")])
    broken.settle_down()
    apply_damage(db, broken, "update {schema}.workflows set success = '7' where id = %s")
    apply_damage(db, broken, f"update {{schema}}.workflows set state = '{state}' where id = %s")
    for each in db.claim():
        db.start(each)
        db.settle(each, result=b"1")
    broken.settle_down()
    assert (broken.state, sound.state) == ("FAILED" if state == "RUNNING" else "CANCELLED", "COMPLETED")
    if state == "RUNNING":
        assert broken.column("error")["code"] == "WORKFLOW_SUCCESS_CASE_NOT_MET"


BREAKS_THE_GRAPH = {
    "an edge from no node": "update {schema}.edges set parent = 99999 where workflow_id = %s",
    "a condition on no node": "update {schema}.edges set parent = 99999, expects = true, path = '{{x}}' where workflow_id = %s",
    "a condition with a NULL in its path": "update {schema}.edges set path = '{{a,NULL}}', expects = true where workflow_id = %s",
    "a condition with a path of lists": "update {schema}.edges set path = '{{{{a,b}},{{c,d}}}}', expects = true where workflow_id = %s",
    "a condition without a path": "update {schema}.edges set path = null, expects = false where workflow_id = %s",
    "a member of no node": "update {schema}.nodes set member_of = 99999 where name = 'b' and workflow_id = %s",
    "a member of itself": "update {schema}.nodes set member_of = number where name = 'b' and workflow_id = %s",
    "another number": "update {schema}.nodes set number = 2147483647 where name = 'a' and workflow_id = %s",
    "a node whose row is gone": "delete from {schema}.nodes where name = 'a' and workflow_id = %s",
    "another kind": "update {schema}.nodes set kind = 'map', members = 2147483647, first_member = 1 where name = 'a' and workflow_id = %s",
    "the same name": "update {schema}.nodes set name = 'b' where workflow_id = %s",
    "a cycle": "insert into {schema}.edges (workflow_id, parent, child, number, joins, tolerates, state)"
    " select workflow_id, child, parent, 7, joins, tolerates, state from {schema}.edges where workflow_id = %s",
    "its own parent": "update {schema}.workflows set parent_id = id, parent_node = 0 where id = %s",
}

GATE = {
    "an edge from no node",
    "a node whose row is gone",
    "a condition with a NULL in its path",
    "another number",
    "its own parent",
}
"""The others are variants of these."""


def test_a_map_node_with_a_damaged_kind_fails_in_its_next_step(db: StoreHarness) -> None:  # J17
    flow = Flow.start(db, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    apply_damage(db, flow, BREAKS_THE_GRAPH["another kind"])
    flow.reconcile()
    assert flow.nodes()["a"] == "FAILED"
    forget(db)


def test_a_workflow_that_is_recorded_as_its_own_child_can_be_retried(db: StoreHarness) -> None:  # J17
    flow = Flow.start(db, [task("a")])
    flow.settle_down()
    apply_damage(
        db,
        flow,
        "update {schema}.nodes set kind = 'workflow', task_id = workflow_id, state = 'FAILED' where workflow_id = %s",
    )
    apply_damage(db, flow, "update {schema}.workflows set state = 'FAILED', ended_at = now() where id = %s")
    flow.retry()
    assert flow.state == "RUNNING"
    forget(db)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in GATE else pytest.mark.long) for each in BREAKS_THE_GRAPH]
)
def test_a_workflow_with_an_invalid_graph_can_be_shown_explained_and_cancelled(
    db: StoreHarness, everbeat: Command, name: str
) -> None:  # J17
    flow = Flow.start(db, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    apply_damage(db, flow, BREAKS_THE_GRAPH[name])
    for words in (
        ("workflows", "show"),
        ("workflows", "show", "--json"),
        ("explain",),
        ("workflows", "cancel"),
    ):
        everbeat(*words, str(flow.id)).assert_code(0)
    assert flow.state in ("CANCELLING", "CANCELLED")
    forget(db)


def forget(db: StoreHarness) -> None:
    """Delete broken rows, which would violate the invariants that are checked after a test."""
    db.connection.execute("set session_replication_role = replica")
    for table in ("nodes", "edges", "outbox", "workflows", "tasks"):
        db.connection.execute(db.plain(f"delete from {{schema}}.{table}"))
    db.connection.execute("reset session_replication_role")
