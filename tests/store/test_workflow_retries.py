"""Retried workflows: which nodes run again, what they keep, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.domain.workflow.graph import INPUT, ITEM, Edge, Graph, GraphNode, Hole, TaskSpec
from everbeat.errors import UnknownName, WorkflowNotRetryable
from everbeat.store.steps import record_checkpoint
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing, spread
from tests.store.test_steps import again, loaded, record


def order(db: StoreHarness) -> Flow:
    """Start a workflow in which `stock` fails; `told` takes its outcome and completes, then `noted`; `packed` is skipped."""
    nodes = [
        task("stock"),
        task("told", template=('{"of":', Hole(0, "outcome"), "}")),
        task("noted", template=('{"of":', Hole(1), "}")),
        task("packed", template=('{"of":', Hole(0), "}")),
        task("other"),
    ]
    return Flow.start(db, nodes, [Edge(0, 1, tolerates=True), *after(2, 1), *after(3, 0)], output=3)


def test_a_retry_repeats_nodes_that_consumed_an_outcome(db: StoreHarness) -> None:  # J7
    flow = order(db)
    flow.play(failing("stock"))
    assert flow.args("told")["of"]["failed"]["code"] == "BROKEN"
    before = dict(db.table("nodes", "name, task_id"))
    dry = flow.retry(dry_run=True)
    assert (flow.state, db.table("outbox"), flow.nodes()["told"]) == ("FAILED", [], "COMPLETED")
    assert (dry.again, dry.completed, dry.kept) == (
        ("stock", "told", "noted", "packed"),
        ("told", "noted"),
        (),
    )
    played: list[str] = []
    done = flow.retry()
    assert (done.again, done.completed, done.dry_run) == (dry.again, dry.completed, False)
    flow.play(lambda name: played.append(name) or name)  # type: ignore[func-returns-value]
    assert sorted(played) == ["noted", "packed", "stock", "told"]
    assert (flow.args("told"), flow.state) == ({"of": {"completed": "stock"}}, "COMPLETED")
    assert db.row(before["told"], "state, error") == ("COMPLETED", None), "its old row stays"
    assert db.row(before["other"], "state") == "COMPLETED"


def test_a_retry_that_keeps_completed_nodes_reports_them(db: StoreHarness) -> None:  # J7
    flow = order(db)
    flow.play(failing("stock"))
    played: list[str] = []
    done = flow.retry(completed="keep")
    assert (done.again, done.completed, done.kept) == (("stock", "packed"), (), ("told", "noted"))
    flow.play(lambda name: played.append(name) or name)  # type: ignore[func-returns-value]
    assert sorted(played) == ["packed", "stock"]
    assert (flow.state, flow.args("told")["of"]["failed"]["code"]) == ("COMPLETED", "BROKEN")


def test_a_reopened_completed_node_starts_without_its_steps_and_a_failed_one_keeps_them(
    db: StoreHarness,
) -> None:  # J7
    flow = Flow.start(
        db,
        [task("bad"), task("told", template=('{"of":', Hole(0, "outcome"), "}"))],
        [Edge(0, 1, tolerates=True)],
    )
    flow.settle_down()
    for outcome in (failing("bad"), str):
        (held,) = flow.claim(1)
        assert record(db, held)
        assert db.run(record_checkpoint(held.id, held.claim_id, b'{"row": 7}', number=1, progress=None))
        flow.end([held], outcome)
        flow.settle_down()
    flow.retry()
    bad = again(db)
    assert [each.name for each in loaded(db, bad) or ()] == ["charge"]
    assert bad.checkpoint == '{"row": 7}'
    flow.end([bad], str)
    flow.settle_down()
    told = again(db)
    assert (loaded(db, told) or [], told.checkpoint) == ([], None)
    flow.end([told], str)
    flow.settle_down()
    assert flow.state == "COMPLETED"


def test_an_unknown_node_gets_the_nearest_name_of_a_large_workflow(db: StoreHarness) -> None:  # J7
    flow = Flow.start(db, [*(task(f"{number:04}") for number in range(1_100)), task("packed")])
    flow.cancel()
    with pytest.raises(UnknownName, match=r"known: 0000, .* and 1,091 more") as refusal:
        flow.retry(from_node="pakced")
    assert refusal.value.fix == "did you mean 'packed'?"


def test_a_completed_workflow_can_be_retried_from_a_node(db: StoreHarness) -> None:
    flow = order(db)
    flow.play()
    assert flow.state == "COMPLETED"
    with pytest.raises(WorkflowNotRetryable, match="from_node"):
        flow.retry()
    with pytest.raises(UnknownName, match="tolt"):
        flow.retry(from_node="tolt")
    played: list[str] = []
    assert flow.retry(from_node="told").completed == ("told", "noted")
    flow.play(lambda name: played.append(name) or name)  # type: ignore[func-returns-value]
    assert (sorted(played), flow.state, flow.column("result")) == (["noted", "told"], "COMPLETED", "packed")


def test_a_retry_does_not_reopen_nodes_behind_a_condition_that_does_not_hold(db: StoreHarness) -> None:
    nodes = [
        task("asked"),
        task("wanted"),
        task("told", template=('{"of":', Hole(1, "outcome"), "}")),
        task("bad"),
    ]
    edges = [Edge(0, 1, path=(), expects=True), Edge(1, 2, tolerates=True)]
    flow = Flow.start(db, nodes, edges)
    flow.play(lambda name: False if name == "asked" else failing("bad")(name))
    assert flow.nodes() == {"asked": "COMPLETED", "wanted": "SKIPPED", "told": "COMPLETED", "bad": "FAILED"}
    assert flow.retry(dry_run=True).again == ("bad",)


def test_a_retry_of_a_cancelled_workflow_runs_the_nodes_that_the_cancel_skipped(db: StoreHarness) -> None:
    flow = Flow.start(db, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    flow.cancel()
    assert flow.retry().again == ("a", "b")
    flow.play()
    assert flow.state == "COMPLETED"


def mapped() -> list[GraphNode]:
    spec = TaskSpec(name="work", queue="default")
    each = GraphNode(
        name="each", kind="map", task=spec, items=(Hole(0),), template=('{"item":', Hole(ITEM), "}")
    )
    return [task("list"), each, task("sum", template=('{"all":', Hole(1), "}"))]


def test_a_retry_rebuilds_a_map_if_its_list_runs_again_and_keeps_its_members_otherwise(
    db: StoreHarness,
) -> None:
    flow = Flow.start(db, mapped(), [*after(1, 0), *after(2, 1)])
    bad = failing("each[1]")
    flow.play(lambda name: ["x", "y"] if name == "list" else bad(name))
    assert flow.retry().again == ("each", "sum", "each[1]")
    flow.play()
    assert (flow.args("sum"), flow.state) == ({"all": ["each[0]", "each[1]"]}, "COMPLETED")
    dry = flow.retry(from_node="list", dry_run=True)
    assert set(dry.completed) == {"list", "each", "sum", "each[0]", "each[1]"}
    flow.retry(from_node="list")
    flow.play(lambda name: ["p", "q", "r"] if name == "list" else name)
    assert flow.args("sum") == {"all": ["each[0]", "each[1]", "each[2]"]}
    assert [flow.args(f"each[{n}]")["item"] for n in range(3)] == ["p", "q", "r"]
    assert (flow.state, set(flow.nodes().values())) == ("COMPLETED", {"COMPLETED"})


def test_a_pending_node_receives_only_the_outcome_of_the_retry(db: StoreHarness) -> None:  # J7
    nodes = [task("bad"), task("slow"), task("told", template=('{"of":', Hole(0, "outcome"), "}"))]
    flow = Flow.start(db, nodes, [Edge(0, 2, tolerates=True), *after(2, 1)], on_error="pause")
    flow.settle_down()
    claimed = flow.by_name(flow.claim())
    flow.end([claimed["bad"]], failing("bad"))
    flow.settle_down()
    assert (flow.state, flow.nodes()["told"]) == ("PAUSED", "PENDING")
    assert flow.retry().again == ("bad",)
    flow.end([claimed["slow"]], str)
    flow.settle_down()
    assert flow.nodes()["told"] == "PENDING"
    flow.play()
    assert flow.args("told") == {"of": {"completed": "bad"}}


def test_a_retry_from_a_static_map_runs_all_of_its_members_again(db: StoreHarness) -> None:
    flow = Flow.start(db, spread(2), output=0)
    flow.play()
    assert flow.retry(from_node="all").completed == ("all", "all[0]", "all[1]")
    flow.play(lambda name: name.upper())
    assert (flow.state, flow.column("result")) == ("COMPLETED", ["ALL[0]", "ALL[1]"])


def nested(db: StoreHarness) -> Flow:
    leaf = Graph(
        name="leaf",
        nodes=(
            task("good"),
            task("inner", template=('{"given":', Hole(INPUT, path=("order",)), "}")),
            task("told", template=('{"of":', Hole(1, "outcome"), "}")),
        ),
        edges=(Edge(1, 2, tolerates=True),),
        output=1,
    )
    nodes = [
        task("first"),
        GraphNode(name="child", kind="workflow", graph=leaf, template=('{"order":', Hole(0), "}")),
        task("last", template=('{"of":', Hole(1, "outcome"), "}")),
    ]
    return Flow.start(db, nodes, [*after(1, 0), Edge(1, 2, tolerates=True)])


def test_a_nested_workflow_is_retried_by_the_same_rules(db: StoreHarness) -> None:  # J7
    flow = nested(db)
    flow.play(failing("inner"))
    done = flow.retry()
    assert set(done.again) == {"child", "last", "child/inner", "child/told"}
    assert set(done.completed) == {"last", "child/told"}
    played: list[str] = []
    flow.play(lambda name: played.append(name) or name)  # type: ignore[func-returns-value]
    assert sorted(played) == ["inner", "last", "told"]
    assert (flow.state, flow.args("last")["of"]) == ("COMPLETED", {"completed": "inner"})
    assert len(db.table("workflows")) == 2, "the failed child workflow continues"


@pytest.mark.parametrize("inner_fails", [False, True])
def test_a_nested_workflow_whose_input_changes_is_replaced_by_a_new_one(
    db: StoreHarness, inner_fails: bool
) -> None:
    flow = nested(db)
    flow.play(failing("inner") if inner_fails else str)
    flow.retry(from_node="first")
    given: list[Any] = []

    def script(name: str) -> str:
        return "changed" if name == "first" else name

    flow.settle_down()
    while claimed := flow.claim():
        given += [each.args for each in claimed if flow.names()[each.id] == "inner"]
        flow.end(claimed, script)
        flow.settle_down()
    assert given == ['{"given":"changed"}']
    assert flow.state == "COMPLETED"
    assert len(db.table("workflows")) == 3
