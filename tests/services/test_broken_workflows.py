"""A workflow with a row that somebody broke with SQL: the others go on, commands and `doctor` name it, and a cancel ends it."""

from __future__ import annotations

import logging

import pytest

from everbeat.config import RecoveryConfig
from everbeat.services.reconciler import Reconciler, WorkflowUnstuck
from tests.cli.conftest import Command, everbeat, forks
from tests.services.conftest import Hands, Onlooker
from tests.store.flows import Flow, after, task

__all__ = ["everbeat", "forks"]

BREAKS_THE_STEP = {
    "a node without a queue": "update {schema}.nodes set queue = null where name = 'b' and workflow_id = %s",
    "a node without a task": "update {schema}.nodes set task = null where name = 'b' and workflow_id = %s",
    "options that are no options": "update {schema}.nodes set options = '{{\"good_until\": \"soon\"}}' where name = 'b' and workflow_id = %s",
    "a queue that no index can hold": "update {schema}.nodes set queue = (select string_agg(md5(n::text), '') from generate_series(1, 300) n)"
    " where name = 'b' and workflow_id = %s",
}


def hurt(hands: Hands, flow: Flow, damage: str) -> None:
    hands.connection.execute(hands.plain(damage), [flow.id])


def two_whose_first_task_ended(hands: Hands) -> tuple[Flow, Flow]:
    """Two chains of two nodes. Nobody has acted on the end of the first task of either."""
    flows = [Flow.start(hands, [task("a"), task("b")], after(1, 0)) for _ in range(2)]
    flows[0].settle_down()
    for each in hands.claim():
        hands.start(each)
        hands.settle(each, result=b"1")
    hands.connection.execute(hands.plain("delete from {schema}.outbox"))
    return flows[0], flows[1]


@pytest.mark.parametrize("damage", BREAKS_THE_STEP.values(), ids=BREAKS_THE_STEP)
def test_a_workflow_that_cannot_go_on_is_named_and_cancelled_and_stops_no_other(
    hands: Hands, everbeat: Command, damage: str
) -> None:  # J17
    broken, sound = two_whose_first_task_ended(hands)
    hurt(hands, broken, damage)
    answer = everbeat("workflows", "reconcile", "--json").assert_code(0)
    problems = {each["workflow_id"]: each["problem"] for each in answer.document["stuck"]}
    assert problems[str(sound.id)] is None
    assert problems[str(broken.id)]
    assert sound.nodes() == {"a": "COMPLETED", "b": "ENQUEUED"}
    said = everbeat("workflows", "reconcile").assert_code(0)
    assert f"{broken.id} cannot go on" in said.err
    found = {each["code"]: each for each in everbeat("doctor", "--json").document["checks"]}["STUCK"]
    assert found["verdict"] == "WARN"
    assert str(broken.id) in found["text"]
    assert str(sound.id) not in found["text"]
    everbeat("workflows", "cancel", str(broken.id)).assert_code(0)
    broken.settle_down()
    assert broken.state == "CANCELLED"


async def test_the_reconciler_tells_of_a_workflow_that_cannot_go_on_once_and_never_that_it_does(
    onlooker: Onlooker, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:  # J17
    broken, sound = two_whose_first_task_ended(hands)
    hurt(hands, broken, BREAKS_THE_STEP["a node without a queue"])
    reconciler = Reconciler(
        onlooker.session, RecoveryConfig(check_interval_ms=1_000), channel=hands.target.channel, observer=onlooker,
        events=onlooker.events, grace_ms=0,
    )  # fmt: skip
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        hands.connection.execute(hands.plain("delete from {schema}.turns"))
        await reconciler.tick()
    assert sound.nodes()["b"] == "ENQUEUED"
    assert broken.nodes() == {"a": "ENQUEUED", "b": "PENDING"}
    unstuck = [each.workflow_ids for each in onlooker.told(WorkflowUnstuck)]  # type: ignore[attr-defined]
    assert unstuck == [(sound.id,)]
    assert caplog.text.count(f"workflow_cannot_go_on workflow={broken.id}") == 1
    forget(hands)


async def test_what_a_pass_does_not_change_is_logged_once_and_not_told_as_put_right(
    onlooker: Onlooker, hands: Hands, caplog: pytest.LogCaptureFixture
) -> None:  # W9
    flow = Flow.start(hands, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    hurt(hands, flow, "update {schema}.nodes set state = 'PENDING' where workflow_id = %s")
    hurt(hands, flow, BREAKS_THE_GRAPH["a cycle"])
    reconciler = Reconciler(
        onlooker.session, RecoveryConfig(check_interval_ms=1_000), channel=hands.target.channel, observer=onlooker,
        events=onlooker.events, grace_ms=0,
    )  # fmt: skip
    caplog.set_level(logging.ERROR)
    for _ in range(3):
        hands.connection.execute(hands.plain("delete from {schema}.turns"))
        await reconciler.tick()
    assert onlooker.told(WorkflowUnstuck) == []
    assert caplog.text.count(f"workflow_cannot_go_on workflow={flow.id}") == 1
    assert "wait for each other" in caplog.text
    forget(hands)


async def test_one_line_tells_of_all_that_a_pass_found_after_a_time_without_workers(
    onlooker: Onlooker, hands: Hands
) -> None:  # W9
    flows = [Flow.start(hands, [task("a"), task("b")], after(1, 0)) for _ in range(8)]
    flows[0].settle_down()
    for each in hands.claim(limit=8):
        hands.start(each)
        hands.settle(each, result=b"1")
    hands.connection.execute(hands.plain("delete from {schema}.outbox"))
    await Reconciler(
        onlooker.session, RecoveryConfig(), channel=hands.target.channel, observer=onlooker, events=onlooker.events, grace_ms=0
    ).tick()  # fmt: skip
    (told,) = onlooker.told(WorkflowUnstuck)
    assert told.found == 8  # type: ignore[attr-defined]
    assert len(told.first) == 5  # type: ignore[attr-defined]
    assert all(flow.nodes()["b"] == "ENQUEUED" for flow in flows)


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLING"])
def test_a_workflow_whose_success_policy_cannot_be_read_ends(hands: Hands, state: str) -> None:  # J17
    broken = Flow.start(hands, [task("a")])
    sound = Flow.start(hands, [task("a")])
    broken.settle_down()
    hurt(hands, broken, "update {schema}.workflows set success = '7' where id = %s")
    hurt(hands, broken, f"update {{schema}}.workflows set state = '{state}' where id = %s")
    for each in hands.claim():
        hands.start(each)
        hands.settle(each, result=b"1")
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


def test_a_map_whose_members_have_no_last_number_takes_its_step(hands: Hands) -> None:  # J17
    flow = Flow.start(hands, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    hurt(hands, flow, BREAKS_THE_GRAPH["another kind"])
    flow.reconcile()
    assert flow.nodes()["a"] == "FAILED"
    forget(hands)


def test_a_workflow_that_is_its_own_child_is_retried(hands: Hands) -> None:  # J17
    flow = Flow.start(hands, [task("a")])
    flow.settle_down()
    hurt(
        hands,
        flow,
        "update {schema}.nodes set kind = 'workflow', task_id = workflow_id, state = 'FAILED' where workflow_id = %s",
    )
    hurt(hands, flow, "update {schema}.workflows set state = 'FAILED', ended_at = now() where id = %s")
    flow.retry()
    assert flow.state == "RUNNING"
    forget(hands)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in GATE else pytest.mark.long) for each in BREAKS_THE_GRAPH]
)
def test_a_graph_that_makes_no_sense_is_shown_explained_and_cancelled(
    hands: Hands, everbeat: Command, name: str
) -> None:  # J17
    flow = Flow.start(hands, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    hurt(hands, flow, BREAKS_THE_GRAPH[name])
    for words in (
        ("workflows", "show"),
        ("workflows", "show", "--json"),
        ("explain",),
        ("workflows", "cancel"),
    ):
        everbeat(*words, str(flow.id)).assert_code(0)
    assert flow.state in ("CANCELLING", "CANCELLED")
    forget(hands)


def forget(hands: Hands) -> None:
    """Broken rows breach the invariants that are checked after a test."""
    hands.connection.execute("set session_replication_role = replica")
    for table in ("nodes", "edges", "outbox", "workflows", "tasks"):
        hands.connection.execute(hands.plain(f"delete from {{schema}}.{table}"))
    hands.connection.execute("reset session_replication_role")
