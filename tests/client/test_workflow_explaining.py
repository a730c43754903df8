"""Test each reason why a workflow has not ended: it appears in its situation and disappears when that is repaired."""

from __future__ import annotations

import asyncio
from uuid import UUID, uuid4

import msgspec
import pytest

from everbeat import App
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.workflow.graph import Edge, GraphNode, TaskSpec
from everbeat.domain.workflow.states import WorkflowState
from everbeat.errors import ConfigurationError, WorkflowNotFound
from everbeat.inspection import Reason, ReasonCode, WorkflowExplanation
from tests.client.test_explaining import change, pause
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.workflows.sent import child, mapped, sent

CHAIN = [task("a"), task("b"), task("c")]
IN_A_ROW = [Edge(0, 1), Edge(1, 2)]


def told(handle: WorkflowHandle[object]) -> list[tuple[str, str | None]]:
    return [(reason.code, reason.node) for reason in handle.explain().reasons]


def about(handle: WorkflowHandle[object], code: ReasonCode, node: str | None = None) -> Reason:
    (found,) = (each for each in handle.explain().reasons if (each.code, each.node) == (code, node))
    return found


def test_explain_lists_open_nodes_with_the_deepest_cause_first(app: App, db: StoreHarness) -> None:
    nodes = [task("last"), *CHAIN, task("free")]
    handle, _flow = sent(app, db, nodes, [*after(0, 3), Edge(1, 2), Edge(2, 3)])
    assert [node for _, node in told(handle)] == ["a", "b", "c", "last"], (
        "node free has the same reason as a and is grouped with it"
    )
    first, second = handle.explain().reasons[:2]
    assert first.code is ReasonCode.IN_LINE
    assert first.text.startswith("node a and 1 like it are ENQUEUED: the task of a waits because it is due")
    assert second == Reason(
        code=ReasonCode.WAITS_FOR_NODES, text="node b is PENDING and waits for a (ENQUEUED)", node="b"
    )


def test_explain_gives_a_node_the_reason_of_its_task(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, CHAIN, IN_A_ROW)
    pause(db, "task", "work", reason="bad deploy")
    reason = about(handle, ReasonCode.TASK_PAUSED, "a")
    assert (
        reason.text == "node a is ENQUEUED: its task waits because task 'work' was paused by ann: bad deploy"
    )
    assert reason.command == "everbeat tasks resume work"
    change(db, "pauses", "name = 'other'")
    assert about(handle, ReasonCode.IN_LINE, "a")
    (claimed,) = flow.claim()
    running = about(handle, ReasonCode.RUNNING, "a")
    assert running.text.startswith("node a is RUNNING ")
    assert "worker w1 (pid 2 on host) runs attempt 1" in running.text
    assert running.command == f"everbeat explain {claimed.id}"
    flow.play()
    flow.end([claimed], lambda _: 1)
    flow.play()
    assert handle.status() is WorkflowState.COMPLETED


def test_explain_names_a_missing_worker_that_could_advance_the_workflow(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, CHAIN, IN_A_ROW, advanced=False)
    assert told(handle) == [("NOT_ADVANCED", "a"), ("WAITS_FOR_NODES", "b"), ("WAITS_FOR_NODES", "c")]
    change(db, "supervisors", "last_beat_at = last_beat_at - interval '1 hour'")
    assert told(handle)[:3] == [("NO_WORKER", None), ("NOT_ADVANCED", None), ("NOT_ADVANCED", "a")]
    nobody = about(handle, ReasonCode.NO_WORKER)
    assert nobody.command == "everbeat worker MODULE:APP"
    assert nobody.since == handle.info().sent_at, "the workflow was sent after the last worker had died"
    assert about(handle, ReasonCode.NOT_ADVANCED, "a").text.startswith("node a is READY, ")
    change(db, "workflows", "sent_at = sent_at - interval '2 hours'")
    assert about(handle, ReasonCode.NO_WORKER).since == max(
        each.last_heartbeat_at for each in app.list_workers()
    )
    change(db, "supervisors", "last_beat_at = statement_timestamp(), processes = 2")
    change(db, "workers", "ended_at = statement_timestamp(), ended_how = 'test'")
    coming = about(handle, ReasonCode.NO_WORKER)
    assert coming.text.endswith("; live supervisor s1 (pid 1) on host restarts its worker processes")
    assert coming.command == "everbeat workers"
    change(db, "workers", "ended_at = null, ended_how = null")
    flow.settle_down()
    assert told(handle)[0] == ("IN_LINE", "a")


def test_explain_names_old_outbox_entries_that_no_worker_processed(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, CHAIN, IN_A_ROW)
    flow.end(flow.claim(), lambda _: 1)
    change(db, "outbox", "at = at - interval '1 minute'")
    reason = about(handle, ReasonCode.NOT_ADVANCED)
    assert reason.text == "no worker has processed its outbox (1 entry)"
    assert reason.command == "everbeat workflows reconcile"
    assert about(handle, ReasonCode.NOT_ADVANCED, "a").text.endswith(
        "its task has ended COMPLETED, but the node has not yet"
    )
    flow.settle_down()
    assert ("NOT_ADVANCED", None) not in told(handle)


def test_explain_names_a_stuck_node_and_the_command_that_helps(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, CHAIN, IN_A_ROW)
    flow.end(flow.claim(), lambda _: 1)
    db.connection.execute(db.plain("delete from {schema}.outbox"))
    reason = about(handle, ReasonCode.STUCK)
    assert reason.text.startswith("node a is stuck: its task has ended or was deleted")
    assert reason.command == "everbeat workflows reconcile"
    app.recover_stuck_workflows()
    assert ("STUCK", None) not in told(handle)
    db.connection.execute(db.plain("delete from {schema}.tasks where node = 1"))
    assert about(handle, ReasonCode.STUCK).text.startswith("node b is stuck")
    assert (
        about(handle, ReasonCode.WAITS_FOR_NODES, "b").text == "node b is ENQUEUED: its task is in progress"
    )


def test_explain_says_since_when_a_workflow_is_paused_and_how_to_resume_it(
    app: App, db: StoreHarness
) -> None:
    handle, _flow = sent(app, db, CHAIN, IN_A_ROW)
    handle.pause()
    reason = about(handle, ReasonCode.WORKFLOW_PAUSED)
    assert reason.since == handle.info().paused_at
    assert reason.command == f"everbeat workflows resume {handle.id}"
    assert about(handle, ReasonCode.NOT_ADVANCED, "a").text == (
        "node a is READY, to be enqueued when the workflow is resumed"
    )
    handle.resume()
    assert told(handle)[0] == ("IN_LINE", "a")


def test_explain_names_the_failure_that_paused_a_workflow(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, [*CHAIN, task("d")], IN_A_ROW, on_error="pause")
    flow.play(lambda name: RuntimeError("no paper") if name == "a" else 1)
    assert told(handle)[:2] == [("WORKFLOW_PAUSED", None), ("FAILED", "a")]
    assert about(handle, ReasonCode.WORKFLOW_PAUSED).command == f"everbeat workflows retry {handle.id}"
    failed = about(handle, ReasonCode.FAILED, "a")
    assert failed.text == "node a ended FAILED: BROKEN: no paper"
    assert failed.command == f"everbeat explain {failed.blocked_by}"


def test_explain_counts_the_running_nodes_of_a_workflow_that_is_being_cancelled(
    app: App, db: StoreHarness
) -> None:
    handle, flow = sent(app, db, CHAIN, IN_A_ROW)
    claimed = flow.claim()
    handle.cancel()
    whole = about(handle, ReasonCode.WORKFLOW_CANCELLING)
    assert whole.text == "it is being cancelled: 1 running node asked to stop"
    assert whole.since == handle.info().cancel_requested_at
    assert "a cancel was requested" in about(handle, ReasonCode.RUNNING, "a").text
    db.settle(claimed[0], "CANCELLED")
    flow.settle_down()
    assert told(handle) == [("CANCELLED", None)]
    assert about(handle, ReasonCode.CANCELLED).command == f"everbeat workflows retry {handle.id}"


def test_explain_finds_a_cause_in_a_nested_child_workflow(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, [child("ship", child("box", task("fold"))), task("end")], [Edge(0, 1)])
    (reason, _) = handle.explain().reasons
    assert (reason.code, reason.node) == (ReasonCode.IN_LINE, "ship")
    inner = handle.nodes()[0].task_id
    assert reason.text.startswith(
        f"node ship is workflow {inner} (ship child), RUNNING; there node box is workflow "
    )
    assert "there node fold is ENQUEUED: its task waits because it is due" in reason.text
    assert reason.command == f"everbeat explain {inner}"
    (claimed,) = flow.claim()
    assert about(handle, ReasonCode.RUNNING, "ship")
    flow.end([claimed], lambda _: RuntimeError("torn"))
    flow.play()
    failed = about(handle, ReasonCode.FAILED, "ship")
    assert failed.blocked_by == str(inner)
    assert app.workflow_handle(str(inner)).explain().reasons[0].command is None, (
        "a child is retried with its parent"
    )


def test_explain_groups_members_of_a_map_that_share_a_reason(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, [*mapped("measure", 0, 40), task("sum")], [Edge(0, 41)])
    flow.claim(10)
    waiting, running, last = handle.explain().reasons
    assert (waiting.code, running.code, last.code) == ("IN_LINE", "RUNNING", "WAITS_FOR_NODES")
    assert waiting.text.startswith(
        f"{waiting.node} and 29 more members of measure are ENQUEUED: the task of {waiting.node} waits because it is due"
    )
    assert running.text.startswith(f"{running.node} and 9 more members of measure are RUNNING ")
    assert last.text.startswith("node sum is PENDING and waits for measure (ENQUEUED ")


def test_explain_lists_only_the_first_of_very_many_reasons(app: App, db: StoreHarness) -> None:
    nodes = [
        GraphNode(name=f"n{n}", task=TaskSpec(name=f"t{n}", queue="default"), args="{}") for n in range(60)
    ]
    handle, _flow = sent(app, db, nodes)
    found = handle.explain()
    assert (len(found.reasons), found.left_out) == (40, 20)
    explained = [reason for reason in found.reasons if reason.code is ReasonCode.IN_LINE]
    assert len(explained) == 16, "the tasks of the other nodes were not queried"


def test_explain_says_how_many_dependencies_a_quorum_still_needs(app: App, db: StoreHarness) -> None:
    joined = task("any", quorum=1, template=("{}",))
    handle, _flow = sent(app, db, [task("a"), task("b"), joined], after(2, 0, 1, joins=True))
    assert about(handle, ReasonCode.WAITS_FOR_NODES, "any").text == (
        "node any is PENDING and waits for a (ENQUEUED), b (ENQUEUED); 1 of its dependencies must complete"
    )


def test_explain_says_how_a_workflow_ended(app: App, db: StoreHarness) -> None:
    good, flow = sent(app, db, CHAIN, IN_A_ROW)
    flow.play()
    (reason,) = good.explain().reasons
    assert (reason.code, reason.since, reason.command) == (ReasonCode.COMPLETED, good.info().ended_at, None)
    bad, flow = sent(app, db, [task(f"n{n}") for n in range(20)])
    flow.play(lambda _: RuntimeError("down"))
    whole, *nodes, more = bad.explain().reasons
    assert (whole.code, whole.command) == (ReasonCode.FAILED, f"everbeat workflows retry {bad.id}")
    assert [reason.node for reason in nodes] == [f"n{n}" for n in range(12)]
    assert more.text == "8 more nodes ended FAILED or EXPIRED"


def test_a_task_names_its_workflow_and_its_node(app: App, db: StoreHarness) -> None:
    handle, _flow = sent(app, db, CHAIN, IN_A_ROW)
    alone = db.send()
    (task_id,) = (node.task_id for node in handle.nodes() if node.name == "a")
    assert task_id is not None
    explained = app.explain(task_id)
    assert (explained.workflow_id, explained.workflow, explained.node) == (handle.id, "order", "a")
    info = app.info(task_id)
    assert (info.workflow_id, info.node) == (handle.id, "a")
    assert (app.info(alone).workflow_id, app.info(alone).node) == (None, None)
    assert app.explain(alone).workflow is None


def test_list_tasks_of_a_workflow_includes_tasks_of_earlier_runs(app: App, db: StoreHarness) -> None:
    handle, flow = sent(app, db, CHAIN, IN_A_ROW)
    other, _ = sent(app, db, [task("a")])
    db.send()
    flow.play(lambda name: RuntimeError("down") if name == "b" else 1)
    handle.retry()
    flow.play()
    of_it = app.list_tasks(workflow=handle.id)
    assert sorted(each.node or "" for each in of_it) == ["a", "b", "b", "c"]
    assert [each.id for each in of_it] == sorted((each.id for each in of_it), reverse=True)
    assert [each.node for each in app.list_tasks(workflow=str(handle.id), state="FAILED")] == ["b"]
    assert [each.node for each in app.list_tasks(workflow=other.id)] == ["a"]
    assert app.list_tasks(workflow=handle.id, before=of_it[2].id) == of_it[3:]
    with pytest.raises(ConfigurationError, match="workflow = "):
        app.list_tasks(workflow="first")


def test_list_tasks_of_a_workflow_excludes_a_workflow_started_in_the_same_millisecond(
    app: App, db: StoreHarness
) -> None:
    moment = uuid4().int >> 80 << 80
    one, other = (Flow.start(db, [task("a")], id=UUID(int=moment + number)) for number in (1, 2))
    one.settle_down()
    assert len(app.list_tasks()) == 2
    assert [each.workflow_id for each in app.list_tasks(workflow=one.id)] == [one.id]
    assert [each.workflow_id for each in app.list_tasks(workflow=other.id)] == [other.id]


def test_aexplain_of_a_workflow_equals_explain_and_refuses_an_unknown_id(app: App, db: StoreHarness) -> None:
    handle, _flow = sent(app, db, CHAIN, IN_A_ROW)

    async def ask() -> WorkflowExplanation:
        try:
            return await handle.aexplain()
        finally:
            await app.aclose()

    twin, found = asyncio.run(ask()), handle.explain()
    assert (twin.name, twin.state, twin.reasons) == (found.name, found.state, found.reasons)
    assert msgspec.json.decode(msgspec.json.encode(found))["workflow_id"] == str(handle.id)
    with pytest.raises(WorkflowNotFound):
        app.workflow_handle(uuid4()).explain()
