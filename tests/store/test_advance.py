"""Workflows step by step, at the level of statements: joins, skips, conditions, maps, children, ends."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from everbeat.client.workflow.operations import nodes
from everbeat.domain.plan import perform
from everbeat.domain.workflow.graph import INPUT, ITEM, Edge, Graph, GraphNode, Hole, TaskSpec
from everbeat.store import advance, expiry, workflows
from everbeat.store.advance import AdvanceResult
from everbeat.store.workflow_control import move_on
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, Script, after, task
from tests.store.test_signals import begun


def failing(*names: str) -> Script:
    return lambda name: ValueError("no") if name in names else name


def test_a_chain_passes_results_to_the_next_node(db: StoreHarness) -> None:
    flow = Flow.start(
        db,
        [task("a"), task("b", template=('{"x":', Hole(0), ',"y":', Hole(0, path=("deep", 1)), "}"))],
        after(1, 0),
        output=1,
    )
    flow.play(lambda name: {"deep": [1, 2.50]} if name == "a" else "done")
    assert flow.args("b") == {"x": {"deep": [1, 2.5]}, "y": 2.5}
    assert flow.nodes() == {"a": "COMPLETED", "b": "COMPLETED"}
    assert (flow.state, flow.column("result")) == ("COMPLETED", "done")


def test_two_workflows_with_one_key_are_one_while_the_first_is_live(db: StoreHarness) -> None:
    first = Flow.start(db, [task("a")], key="k")
    assert Flow.start(db, [task("a")], key="k").id == first.id
    first.play()
    assert Flow.start(db, [task("a")], key="k").id != first.id


@pytest.mark.parametrize(
    ("join", "bad", "expected"),
    [
        ("all", (), "COMPLETED"),
        ("all", ("p1",), "SKIPPED"),
        ("any", ("p0", "p1"), "COMPLETED"),
        ("any", ("p0", "p1", "p2"), "SKIPPED"),
        (2, ("p0",), "COMPLETED"),
        (2, ("p0", "p2"), "SKIPPED"),
    ],
)
def test_a_join_runs_or_is_skipped_by_its_rule_and_its_failed_parents(
    db: StoreHarness, join: Any, bad: tuple[str, ...], expected: str
) -> None:  # W1
    quorum = {"all": None, "any": 1}.get(join, join)
    nodes = [task("p0"), task("p1"), task("p2"), task("joined", quorum=quorum), task("next")]
    edges = [*after(3, 0, 1, 2, joins=join != "all"), *after(4, 3)]
    flow = Flow.start(db, nodes, edges)
    flow.play(failing(*bad))
    assert flow.nodes()["joined"] == flow.nodes()["next"] == expected
    assert flow.state == ("FAILED" if bad else "COMPLETED")


def test_a_quorum_node_is_skipped_as_soon_as_its_quorum_is_impossible(db: StoreHarness) -> None:  # W1
    nodes = [task("p0"), task("p1"), task("p2"), task("joined", quorum=2)]
    flow = Flow.start(db, nodes, after(3, 0, 1, 2, joins=True))
    flow.settle_down()
    claimed = flow.claim()
    flow.end(claimed[:2], failing("p0", "p1", "p2"))
    flow.settle_down()
    assert flow.nodes()["joined"] == "SKIPPED"
    assert sorted(flow.nodes().values()) == ["ENQUEUED", "FAILED", "FAILED", "SKIPPED"]


def test_an_any_join_runs_once_after_the_first_parent(db: StoreHarness) -> None:
    nodes = [task("p0"), task("p1"), task("joined", quorum=1)]
    flow = Flow.start(db, nodes, after(2, 0, 1, joins=True))
    flow.settle_down()
    first, second = flow.claim()
    flow.end([first], str)
    flow.settle_down()
    assert flow.nodes()["joined"] == "ENQUEUED"
    flow.end([second, *flow.claim()], str)
    flow.settle_down()
    assert flow.state == "COMPLETED"
    assert len(db.table("attempts", "task_id")) == 3


def test_a_node_that_wants_the_outcome_receives_the_error_of_a_failed_or_skipped_parent(
    db: StoreHarness,
) -> None:  # W1
    outcome = ('{"told":', Hole(0, "outcome"), ',"skipped":', Hole(1, "outcome"), "}")
    nodes = [task("bad"), task("never"), task("told", template=outcome)]
    edges = [*after(1, 0), Edge(0, 2, tolerates=True), Edge(1, 2, tolerates=True)]
    flow = Flow.start(db, nodes, edges)
    flow.play(failing("bad"))
    args = flow.args("told")
    assert args["told"]["failed"]["code"] == "BROKEN"
    assert args["skipped"]["failed"]["code"] == "UPSTREAM_SKIPPED"
    assert "needs bad, which ended FAILED" in args["skipped"]["failed"]["message"]
    assert (flow.state, flow.column("error")["data"]["node"]) == ("FAILED", "bad")


@pytest.mark.parametrize(
    ("value", "yes", "no"), [(True, "COMPLETED", "SKIPPED"), (False, "SKIPPED", "COMPLETED")]
)
def test_a_condition_selects_the_branch_that_runs(db: StoreHarness, value: bool, yes: str, no: str) -> None:
    nodes = [task("is_big"), task("yes"), task("no"), task("after yes")]
    edges = [
        Edge(0, 1, path=("big",), expects=True),
        Edge(0, 2, path=("big",), expects=False),
        *after(3, 1),
    ]
    flow = Flow.start(db, nodes, edges)
    flow.play(lambda name: {"big": value} if name == "is_big" else None)
    assert (flow.nodes()["yes"], flow.nodes()["no"], flow.nodes()["after yes"]) == (yes, no, yes)
    assert flow.state == "COMPLETED"


def spread(count: int, *more: GraphNode) -> list[GraphNode]:
    return [
        GraphNode(name="all", kind="map", first_member=1, members=count),
        *(task(f"all[{n}]", member_of=0) for n in range(count)),
        *more,
    ]


def test_a_map_returns_the_list_of_its_members_results(db: StoreHarness) -> None:
    nodes = spread(3, task("sum", template=('{"all":', Hole(0), "}")))
    flow = Flow.start(db, nodes, after(4, 0), output=0)
    flow.play(lambda name: int(name[4]) if "[" in name else None)
    assert flow.args("sum") == {"all": [0, 1, 2]}
    assert (flow.state, flow.column("result")) == ("COMPLETED", [0, 1, 2])


def test_a_map_fails_with_a_member_and_passes_all_outcomes(db: StoreHarness) -> None:
    nodes = spread(
        3,
        task("sum", template=('{"all":', Hole(0), "}")),
        task("told", template=('{"all":', Hole(0, "outcome"), "}")),
    )
    flow = Flow.start(db, nodes, [*after(4, 0), *after(5, 0, tolerates=True)])
    flow.play(failing("all[1]"))
    states = flow.nodes()
    assert (states["all"], states["sum"], states["told"]) == ("FAILED", "SKIPPED", "COMPLETED")
    assert [next(iter(each)) for each in flow.args("told")["all"]] == ["completed", "failed", "completed"]
    assert flow.column("error")["data"]["node"] == "all[1]"


def test_an_empty_map_completes_with_an_empty_list(db: StoreHarness) -> None:
    nodes = spread(0, task("sum", template=('{"all":', Hole(0), "}")))
    flow = Flow.start(db, nodes, after(1, 0))
    flow.play()
    assert (flow.args("sum"), flow.state) == ({"all": []}, "COMPLETED")


@pytest.mark.parametrize("items", [[], ["x"], ["x", "y", {"z": 1.50}]])
def test_a_map_over_a_result_creates_one_member_for_each_item(db: StoreHarness, items: list[Any]) -> None:
    spec = TaskSpec(name="work", queue="default")
    nodes = [
        task("list"),
        task("shared"),
        GraphNode(
            name="each", kind="map", task=spec, items=(Hole(0, path=("files",)),),
            template=('{"item":', Hole(ITEM), ',"shared":', Hole(1), "}"),
        ),
        task("sum", template=('{"all":', Hole(2), "}")),
    ]  # fmt: skip
    flow = Flow.start(db, nodes, [*after(2, 0, 1), *after(3, 2)])
    script: Mapping[str, Any] = {"list": {"files": items}, "shared": "s"}
    flow.play(lambda name: script.get(name, name))
    assert [flow.args(f"each[{n}]") for n in range(len(items))] == [
        {"item": item, "shared": "s"} for item in items
    ]
    assert flow.args("sum") == {"all": [f"each[{n}]" for n in range(len(items))]}
    assert flow.state == "COMPLETED"


def test_the_error_of_a_workflow_names_the_first_failed_node_in_the_order_of_addition(
    db: StoreHarness,
) -> None:
    spec = TaskSpec(name="work", queue="default")
    each = GraphNode(
        name="each", kind="map", task=spec, items=(Hole(0),), template=('{"item":', Hole(ITEM), "}")
    )
    flow = Flow.start(db, [task("list"), each, task("later")], after(1, 0))
    failures = failing("each[1]", "each[2]", "later")
    flow.play(lambda name: ["x", "y", "z"] if name == "list" else failures(name))
    assert flow.nodes()["each"] == "FAILED"
    assert flow.column("error")["data"]["node"] == "each[1]"
    seen = [node.name for node in perform(nodes(flow.id), db.run)]
    assert seen == ["list", "each", "each[0]", "each[1]", "each[2]", "later"]


def test_a_map_over_a_result_that_is_not_a_list_fails(db: StoreHarness) -> None:
    spec = TaskSpec(name="work", queue="default")
    nodes = [task("list"), GraphNode(name="each", kind="map", task=spec, items=(Hole(0),), template=("{}",))]
    flow = Flow.start(db, nodes, after(1, 0))
    flow.play(lambda name: "text")
    assert (flow.nodes()["each"], flow.state) == ("FAILED", "FAILED")
    assert "not a list" in flow.column("error")["message"]


def test_a_nested_workflow_receives_its_input_and_returns_its_output(db: StoreHarness) -> None:  # W5
    leaf = Graph(
        name="leaf", nodes=(task("deep", template=('{"n":', Hole(INPUT, path=("n",)), "}")),), output=0
    )
    child = Graph(
        name="child",
        nodes=(
            task("first"),
            GraphNode(
                name="leaf", kind="workflow", graph=leaf, template=('{"n":', Hole(INPUT, path=("m",)), "}")
            ),
        ),
        edges=(Edge(0, 1),),
        output=1,
    )
    nodes = [
        task("a"),
        GraphNode(name="child", kind="workflow", graph=child, template=('{"m":', Hole(0), "}")),
        task("b", template=('{"got":', Hole(1), "}")),
    ]
    flow = Flow.start(db, nodes, [*after(1, 0), *after(2, 1)])
    flow.play(lambda name: {"a": 7, "deep": "from below"}.get(name, name))
    assert (flow.state, flow.args("b")) == ("COMPLETED", {"got": "from below"})
    found = db.connection.execute(
        db.plain(
            "select t.args from {schema}.tasks t join {schema}.nodes n on n.task_id = t.id where n.name = 'deep'"
        )
    ).fetchone()
    assert found == ({"n": 7},)


def test_a_failed_nested_workflow_fails_its_node_and_names_itself(db: StoreHarness) -> None:  # W5
    child = Graph(name="child", nodes=(task("inner"),))
    nodes = [GraphNode(name="child", kind="workflow", graph=child), task("b")]
    flow = Flow.start(db, nodes, after(1, 0))
    flow.play(failing("inner"))
    assert flow.nodes() == {"child": "FAILED", "b": "SKIPPED"}
    error = flow.column("error")
    assert error["code"] == "SUBWORKFLOW_FAILED"
    summary = error["data"]["error"]["data"]
    assert (summary["name"], summary["error"]["code"]) == ("child", "BROKEN")
    assert db.table("workflows", "id, state").count((flow.id, "FAILED")) == 1


def test_a_workflow_with_on_error_pause_pauses_at_a_failure_and_lets_running_tasks_end(
    db: StoreHarness,
) -> None:  # W2
    nodes = [task("bad"), task("running"), task("waiting"), task("next")]
    flow = Flow.start(db, nodes, after(3, 1), on_error="pause")
    flow.settle_down()
    claimed = flow.by_name(db.claim())
    db.start(claimed["bad"], claimed["running"])
    flow.end([claimed["bad"]], failing("bad"))
    flow.settle_down()
    assert flow.state == "PAUSED"
    assert flow.nodes() == {"bad": "FAILED", "running": "ENQUEUED", "waiting": "READY", "next": "PENDING"}
    assert flow.claim() == []
    flow.end([claimed["running"]], str)
    flow.settle_down()
    assert flow.nodes()["next"] == "READY"
    assert flow.claim() == []


@pytest.mark.parametrize(
    ("bad", "cases", "state", "code"),
    [
        (("a",), ((1,), (0, 2)), "COMPLETED", None),
        (("a", "b"), ((1,), (0, 2)), "FAILED", "BROKEN"),
        (("c",), ((0, 2),), "FAILED", "BROKEN"),
    ],
)
def test_the_success_cases_of_a_workflow_decide_its_final_state(
    db: StoreHarness, bad: tuple[str, ...], cases: Any, state: str, code: str | None
) -> None:  # W4
    flow = Flow.start(db, [task("a"), task("b"), task("c")], success=cases)
    flow.play(failing(*bad))
    assert flow.state == state
    assert code is None or flow.column("error")["code"] == code


def test_a_workflow_that_meets_no_success_case_fails_even_without_a_failed_node(
    db: StoreHarness,
) -> None:  # W4
    nodes = [task("is_big"), task("big")]
    flow = Flow.start(db, nodes, [Edge(0, 1, path=(), expects=True)], success=((1,),))
    flow.play(lambda name: False)
    assert (flow.state, flow.column("error")["code"]) == ("FAILED", "WORKFLOW_SUCCESS_CASE_NOT_MET")


def test_a_workflow_with_on_error_continue_completes_despite_failures(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("a"), task("b")], on_error="continue", output=1)
    flow.play(failing("a"))
    assert (flow.state, flow.column("result")) == ("COMPLETED", "b")


def test_a_repeated_step_enqueues_no_task_twice(db: StoreHarness) -> None:
    nodes = [*(task(f"p{n}") for n in range(5)), task("join")]
    flow = Flow.start(db, nodes, after(5, 0, 1, 2, 3, 4))
    flow.play(at_once=1)
    assert flow.state == "COMPLETED"
    assert not flow.step().workflows
    db.connection.execute(
        db.plain(
            "insert into {schema}.outbox (workflow_id, node) select workflow_id, number from {schema}.nodes"
        )
    )
    db.connection.execute(
        db.plain("insert into {schema}.outbox (workflow_id, node) select id, null from {schema}.workflows")
    )
    flow.play()
    assert len(db.table("tasks", "id")) == 6
    assert json.dumps(flow.nodes()).count("COMPLETED") == 6


def test_a_node_waits_for_all_of_its_parents(db: StoreHarness) -> None:  # W1
    flow = Flow.start(db, [task("p0"), task("p1"), task("joined")], after(2, 0, 1))
    flow.settle_down()
    first, second = flow.claim()
    flow.end([first], str)
    flow.settle_down()
    assert flow.nodes()["joined"] == "PENDING"
    flow.end([second], str)
    flow.settle_down()
    assert flow.nodes()["joined"] == "ENQUEUED"


def test_a_quorum_node_waits_for_its_quorum(db: StoreHarness) -> None:  # W1
    nodes = [*(task(f"p{n}") for n in range(3)), task("joined", quorum=2)]
    flow = Flow.start(db, nodes, after(3, 0, 1, 2, joins=True))
    flow.settle_down()
    seen = []
    for one in flow.claim():
        flow.end([one], str)
        flow.settle_down()
        seen.append(flow.nodes()["joined"])
    assert seen == ["PENDING", "ENQUEUED", "ENQUEUED"]


def test_a_workflow_with_thousands_of_events_does_not_delay_other_workflows(db: StoreHarness) -> None:
    """A step takes events from each workflow in turn, so the events of others are not queued behind thousands of one."""
    wide = Flow.start(db, [task("first")])
    fill = "insert into {schema}.outbox (workflow_id, node) select %s, 0 from generate_series(1, 3000)"
    db.connection.execute(db.plain(fill), [wide.id])
    narrow = [Flow.start(db, [task("a")]) for _ in range(3)]
    ids = [wide.id, *(each.id for each in narrow)]
    step = advance.step(channel=db.target.channel, ids=ids)
    db.database.transact(lambda run: perform(step, run))
    assert [each.nodes() for each in narrow] == [{"a": "ENQUEUED"}] * 3
    wide.settle_down()
    assert wide.nodes() == {"first": "ENQUEUED"}


def test_an_expired_node_fails_its_workflow_and_skips_its_dependants(db: StoreHarness) -> None:  # W8
    late = TaskSpec(name="work", queue="default", good_until=datetime.now(UTC) - timedelta(seconds=1))
    outcome = ('{"got":', Hole(0, "outcome"), "}")
    nodes = [GraphNode(name="late", task=late, args="{}"), task("needs it"), task("told", template=outcome)]
    flow = Flow.start(db, nodes, [*after(1, 0), Edge(0, 2, tolerates=True)])
    flow.settle_down()
    db.run(expiry.expire(limit=10, channel=db.target.channel))
    flow.play()
    assert flow.nodes() == {"late": "EXPIRED", "needs it": "SKIPPED", "told": "COMPLETED"}
    assert flow.args("told")["got"]["failed"]["code"] == "TASK_EXPIRED"
    assert (flow.state, flow.column("error")["code"]) == ("FAILED", "TASK_EXPIRED")
    assert flow.column("error")["data"]["node"] == "late"


def test_a_step_skips_a_workflow_that_another_worker_holds(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("a")])
    with db.target.connect("the other") as other:
        begun(db, other, workflows.lock(entries=10, limit=10))
        assert flow.step() == AdvanceResult(0)
        other.execute("commit")
    assert flow.step().enqueued == 1


def test_move_on_leaves_a_workflow_to_the_worker_that_holds_it(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("a")])
    with db.target.connect("the other") as other:
        begun(db, other, workflows.lock(entries=10, limit=10))
        db.database.transact(lambda run: perform(move_on([flow.id], channel=db.target.channel), run))
        assert flow.nodes() == {"a": "READY"}
        other.execute("commit")
    assert flow.step().enqueued == 1


def test_a_node_that_is_enqueued_twice_sends_one_task_or_child(db: StoreHarness) -> None:
    """A worker that lags one step finds nothing left to start: neither a task nor a child."""
    child = Graph(name="child", nodes=(task("inner"),))
    flow = Flow.start(db, [task("a"), GraphNode(name="child", kind="workflow", graph=child)])
    flow.settle_down()
    before = db.table("nodes", "name, state, task_id, iteration"), len(db.table("tasks", "id"))
    db.run(workflows.enqueue([(flow.id, 0)], [None], channel=db.target.channel))
    assert db.run(workflows.adopt((flow.id, 1))) is None
    assert before == (
        db.table("nodes", "name, state, task_id, iteration"),
        len(db.table("tasks", "id")),
    )


def test_a_node_that_forgot_its_task_does_not_send_it_again(db: StoreHarness) -> None:
    """The id of a task derives from its node and iteration, so even a node that forgot its task cannot send a second one."""
    flow = Flow.start(db, [task("a")])
    flow.settle_down()
    forgotten = "update {schema}.nodes set state = 'READY', iteration = 0, task_id = null"
    db.connection.execute(db.plain(forgotten))
    db.run(workflows.enqueue([(flow.id, 0)], [None], channel=db.target.channel))
    assert len(db.table("tasks", "id")) == 1
    flow.play()
    assert flow.state == "COMPLETED"
