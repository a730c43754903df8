"""A map over a result creates a workflow of its graph for each item."""

from __future__ import annotations

import psycopg
import pytest

from everbeat.domain.workflow.graph import INPUT, ITEM, Graph, GraphNode, Hole
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.test_workflow_control import hurt

INNER = Graph(
    name="inner",
    nodes=(task("double", template=('{"name":"double","of":', Hole(INPUT, path=("item",)), "}")),),
    output=0,
)
EACH = GraphNode(
    name="each", kind="map", graph=INNER, items=(Hole(0),), template=('{"item":', Hole(ITEM), "}")
)
EXPAND_OF_11 = """
    insert into {schema}.nodes (workflow_id, number, name, kind, state, member_of, task, queue, priority, options, args)
    select m.workflow_id, 100, m.name || '[0]', 'task', 'READY', m.number, m.task, m.queue, m.priority, m.options, '{{}}'
    from {schema}.nodes m where m.name = 'each'
"""
"""The statement that creates a member in the code of version 11."""


def mapped(db: StoreHarness) -> Flow:
    last = task("sum", template=('{"all":', Hole(1), "}"))
    return Flow.start(db, [task("list"), EACH, last], [*after(1, 0), *after(2, 1)])


def test_each_item_of_a_map_is_the_input_of_a_separate_workflow(db: StoreHarness) -> None:
    flow = mapped(db)
    flow.play(lambda name: ["x", "y"] if name == "list" else f"{name}d")
    assert flow.args("sum") == {"all": ["doubled", "doubled"]}
    found = db.connection.execute(
        db.plain("select t.args ->> 'of' from {schema}.tasks t where t.args ->> 'name' = 'double' order by 1")
    ).fetchall()
    assert found == [("x",), ("y",)]
    assert flow.state == "COMPLETED"


def test_code_of_version_11_cannot_create_a_member_without_a_task(db: StoreHarness) -> None:  # J3
    """The statement fails as a whole and leaves the map to a worker of this version."""
    flow = mapped(db)
    with pytest.raises(psycopg.errors.CheckViolation, match="nodes_task"):
        hurt(db, EXPAND_OF_11)
    flow.play(lambda name: ["x"] if name == "list" else name)
    assert flow.state == "COMPLETED"


def test_a_map_member_whose_graph_is_missing_fails(db: StoreHarness) -> None:  # W9
    flow = mapped(db)
    flow.settle_down()
    flow.end(flow.claim(), lambda name: ["x"])
    flow.step()
    hurt(db, "update {schema}.nodes set graph = null where name = 'each'")
    flow.play()
    assert (flow.nodes()["each[0]"], flow.state) == ("FAILED", "FAILED")


def test_a_map_with_a_member_without_its_output_has_no_result(db: StoreHarness) -> None:  # W9
    """The workflow completes as it does with a single child, and its error names the missing part."""
    half = Graph(
        name="half",
        nodes=(task("asks"), task("answers")),
        edges=(*after(1, 0, path=(), expects=True),),
        output=1,
    )
    members = [GraphNode(name=f"each[{n}]", kind="workflow", graph=half, member_of=0) for n in range(2)]
    flow = Flow.start(db, [GraphNode(name="each", kind="map", first_member=1, members=2), *members], output=0)
    asked = iter([True, False])
    flow.play(lambda name: next(asked) if name == "asks" else "answer")
    assert (flow.nodes()["each"], flow.state) == ("COMPLETED", "COMPLETED")
    assert (flow.column("result"), flow.column("error ->> 'code'")) == (None, "UPSTREAM_SKIPPED")
    assert flow.stuck() == []


@pytest.mark.parametrize("made", [False, True])
def test_a_map_of_workflows_without_an_output_returns_a_list_of_none(db: StoreHarness, made: bool) -> None:
    silent = Graph(name="silent", nodes=(task("double"),))
    listed = task("list")
    if made:
        whole = [
            GraphNode(
                name="each",
                kind="map",
                graph=silent,
                items=(Hole(0),),
                template=('{"item":', Hole(ITEM), "}"),
            )
        ]
        edges = after(1, 0)
    else:
        whole = [
            GraphNode(name="each", kind="map", first_member=2, members=2),
            *(GraphNode(name=f"each[{n}]", kind="workflow", graph=silent, member_of=1) for n in range(2)),
        ]
        edges = [*after(2, 0), *after(3, 0)]
    last = 1 + len(whole)
    told = task("told", template=('{"values":', Hole(1), ',"ends":', Hole(1, "outcome"), "}"))
    flow = Flow.start(db, [listed, *whole, told], [*edges, *after(last, 1, tolerates=True)], output=1)
    flow.play(lambda name: ["x", "y"] if name == "list" else name)
    assert flow.args("told") == {"values": [None, None], "ends": [{"completed": None}, {"completed": None}]}
    assert (flow.state, flow.column("result")) == ("COMPLETED", [None, None])


def test_a_map_whose_member_result_was_deleted_has_no_result(db: StoreHarness) -> None:  # W9
    members = [task(f"each[{n}]", member_of=0) for n in range(2)]
    flow = Flow.start(db, [GraphNode(name="each", kind="map", first_member=1, members=2), *members], output=0)
    flow.settle_down()
    first, second = flow.claim()
    flow.end([first], lambda name: 1)
    flow.settle_down()
    hurt(db, "update {schema}.tasks set result = null where state = 'COMPLETED'")
    flow.end([second], lambda name: 2)
    flow.settle_down()
    assert (flow.state, flow.column("error ->> 'code'")) == ("COMPLETED", "RESULT_NOT_AVAILABLE")
