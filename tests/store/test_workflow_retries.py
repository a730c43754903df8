"""A retried workflow: what runs again, with what it goes on, and what stays."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat.domain.graph import INPUT, ITEM, Edge, Graph, Hole, Node, TaskSpec
from everbeat.errors import UnknownName, WorkflowNotRetryable
from everbeat.store.partial_work import record_checkpoint
from tests.store.conftest import Hands
from tests.store.flows import Flow, after, task
from tests.store.test_advance import failing, spread
from tests.store.test_steps import again, loaded, record


def order(hands: Hands) -> Flow:
    """`stock` fails; `told` takes its outcome and completes, and so does `noted` behind it; `packed` is skipped."""
    nodes = [
        task("stock"),
        task("told", template=('{"of":', Hole(0, "outcome"), "}")),
        task("noted", template=('{"of":', Hole(1), "}")),
        task("packed", template=('{"of":', Hole(0), "}")),
        task("other"),
    ]
    return Flow.start(hands, nodes, [Edge(0, 1, tolerates=True), *after(2, 1), *after(3, 0)], output=3)


def test_a_retry_runs_consumers_of_an_outcome_again(hands: Hands) -> None:  # J7
    flow = order(hands)
    flow.play(failing("stock"))
    assert flow.args("told")["of"]["failed"]["code"] == "BROKEN"
    before = dict(hands.table("nodes", "name, task_id"))
    dry = flow.retry(dry_run=True)
    assert (flow.state, hands.table("outbox"), flow.nodes()["told"]) == ("FAILED", [], "COMPLETED")
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
    assert hands.row(before["told"], "state, error") == ("COMPLETED", None), "its old row stays"
    assert hands.row(before["other"], "state") == "COMPLETED"


def test_a_retry_that_keeps_what_completed_says_so(hands: Hands) -> None:  # J7
    flow = order(hands)
    flow.play(failing("stock"))
    played: list[str] = []
    done = flow.retry(completed="keep")
    assert (done.again, done.completed, done.kept) == (("stock", "packed"), (), ("told", "noted"))
    flow.play(lambda name: played.append(name) or name)  # type: ignore[func-returns-value]
    assert sorted(played) == ["packed", "stock"]
    assert (flow.state, flow.args("told")["of"]["failed"]["code"]) == ("COMPLETED", "BROKEN")


def test_a_completed_node_begins_without_its_steps_and_one_that_failed_keeps_them(hands: Hands) -> None:  # J7
    flow = Flow.start(
        hands,
        [task("bad"), task("told", template=('{"of":', Hole(0, "outcome"), "}"))],
        [Edge(0, 1, tolerates=True)],
    )
    flow.settle_down()
    for outcome in (failing("bad"), str):
        (held,) = flow.claim(1)
        assert record(hands, held)
        assert hands.run(record_checkpoint(held.id, held.claim_id, b'{"row": 7}', number=1, progress=None))
        flow.end([held], outcome)
        flow.settle_down()
    flow.retry()
    bad = again(hands)
    assert [each.name for each in loaded(hands, bad) or ()] == ["charge"]
    assert bad.checkpoint == '{"row": 7}'
    flow.end([bad], str)
    flow.settle_down()
    told = again(hands)
    assert (loaded(hands, told) or [], told.checkpoint) == ([], None)
    flow.end([told], str)
    flow.settle_down()
    assert flow.state == "COMPLETED"


def test_a_completed_workflow_begins_again_from_a_node(hands: Hands) -> None:
    flow = order(hands)
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


def test_a_condition_that_does_not_hold_lets_nothing_behind_it_run_again(hands: Hands) -> None:
    nodes = [
        task("asked"),
        task("wanted"),
        task("told", template=('{"of":', Hole(1, "outcome"), "}")),
        task("bad"),
    ]
    edges = [Edge(0, 1, path=(), expects=True), Edge(1, 2, tolerates=True)]
    flow = Flow.start(hands, nodes, edges)
    flow.play(lambda name: False if name == "asked" else failing("bad")(name))
    assert flow.nodes() == {"asked": "COMPLETED", "wanted": "SKIPPED", "told": "COMPLETED", "bad": "FAILED"}
    assert flow.retry(dry_run=True).again == ("bad",)


def test_a_cancelled_workflow_begins_what_was_skipped_by_the_cancel(hands: Hands) -> None:
    flow = Flow.start(hands, [task("a"), task("b")], after(1, 0))
    flow.settle_down()
    flow.cancel()
    assert flow.retry().again == ("a", "b")
    flow.play()
    assert flow.state == "COMPLETED"


def mapped() -> list[Node]:
    spec = TaskSpec(name="work", queue="default")
    each = Node(name="each", kind="map", task=spec, items=(Hole(0),), template=('{"item":', Hole(ITEM), "}"))
    return [task("list"), each, task("sum", template=('{"all":', Hole(1), "}"))]


def test_a_map_is_made_anew_when_its_list_is_and_keeps_its_members_otherwise(hands: Hands) -> None:
    flow = Flow.start(hands, mapped(), [*after(1, 0), *after(2, 1)])
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


def test_what_still_waits_hears_of_the_second_run_only(hands: Hands) -> None:  # J7
    nodes = [task("bad"), task("slow"), task("told", template=('{"of":', Hole(0, "outcome"), "}"))]
    flow = Flow.start(hands, nodes, [Edge(0, 2, tolerates=True), *after(2, 1)], on_error="pause")
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


def test_a_known_map_runs_all_of_its_members_again_from_its_node(hands: Hands) -> None:
    flow = Flow.start(hands, spread(2), output=0)
    flow.play()
    assert flow.retry(from_node="all").completed == ("all", "all[0]", "all[1]")
    flow.play(lambda name: name.upper())
    assert (flow.state, flow.column("result")) == ("COMPLETED", ["ALL[0]", "ALL[1]"])


def nested(hands: Hands) -> Flow:
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
        Node(name="child", kind="workflow", graph=leaf, template=('{"order":', Hole(0), "}")),
        task("last", template=('{"of":', Hole(1, "outcome"), "}")),
    ]
    return Flow.start(hands, nodes, [*after(1, 0), Edge(1, 2, tolerates=True)])


def test_a_child_is_retried_by_the_same_rule(hands: Hands) -> None:  # J7
    flow = nested(hands)
    flow.play(failing("inner"))
    done = flow.retry()
    assert set(done.again) == {"child", "last", "child/inner", "child/told"}
    assert set(done.completed) == {"last", "child/told"}
    played: list[str] = []
    flow.play(lambda name: played.append(name) or name)  # type: ignore[func-returns-value]
    assert sorted(played) == ["inner", "last", "told"]
    assert (flow.state, flow.args("last")["of"]) == ("COMPLETED", {"completed": "inner"})
    assert len(hands.table("workflows")) == 2, "the child that failed goes on"


@pytest.mark.parametrize("inner_fails", [False, True])
def test_a_child_whose_input_changes_is_a_new_one(hands: Hands, inner_fails: bool) -> None:
    flow = nested(hands)
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
    assert len(hands.table("workflows")) == 3
