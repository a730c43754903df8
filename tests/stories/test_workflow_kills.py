"""A worker is killed at each point of a workflow's progress; the half-finished step is completed once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import pytest

from everbeat.domain.workflow.graph import Edge, Graph, GraphNode, Hole
from tests.stories.scenario import Scenario
from tests.stories.test_workflows import WORK, Starter, flows, node

__all__ = ["flows"]

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

GATE = 7_701
POINTS = {
    "a task is settled": ("tasks", "update", "new.state = 'COMPLETED' and new.node = 0"),
    "a task has ended and its node has not": ("outbox", "delete", "true"),
    "a node ends": ("nodes", "update", "new.state = 'COMPLETED' and new.kind = 'task'"),
    "an edge is met": ("edges", "update", "new.state = 'MET'"),
    "a child begins": ("workflows", "insert", "new.parent_id is not null"),
    "a child's task is sent": ("tasks", "insert", "new.node = 0"),
    "a child ends": ("workflows", "update", "new.parent_id is not null and new.state = 'COMPLETED'"),
    "a child has ended and its parent goes on": ("nodes", "update", "new.kind = 'workflow' and new.state = 'COMPLETED'"),
    "members of a map are made": ("nodes", "insert", "new.member_of is not null"),
    "what is ready is sent": ("nodes", "update", "old.state = 'READY' and new.state = 'ENQUEUED'"),
    "a map ends with its members": ("nodes", "update", "new.kind = 'map' and new.state = 'COMPLETED'"),
    "a workflow ends": ("workflows", "update", "new.parent_id is null and new.state = 'COMPLETED'"),
}  # fmt: skip


def sample_graph() -> Graph:
    """Return a graph with a task, a nested workflow, and a map over the task's result."""
    child = Graph(name="child", nodes=(node("inner"),), output=0)
    first = GraphNode(name="first", task=WORK, args=json.dumps({"name": "first", "value": [1, 2, 3]}))
    below = GraphNode(name="below", kind="workflow", graph=child)
    item = ('{"name":"member","value":', Hole(-2), "}")
    spread = GraphNode(name="all", kind="map", task=WORK, items=(Hole(0),), template=item)
    last = GraphNode(name="last", task=WORK, template=('{"name":"last","value":', Hole(2), "}"))
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 2), Edge(2, 3))
    return Graph(name="winding", nodes=(first, below, spread, last), edges=edges, output=3)


@contextmanager
def gate(scenario: Scenario, table: str, event: str, condition: str) -> Iterator[None]:
    """Block every transaction that does this to a row until the gate is removed."""
    old = condition if event != "delete" else "true"
    scenario.query("select pg_advisory_lock(%s)", GATE)
    scenario.connection.execute(
        f"""create function {scenario.schema}.wait_at_the_gate() returns trigger language plpgsql as $$
            begin perform pg_advisory_xact_lock_shared({GATE}); return coalesce(new, old); end $$"""
    )
    scenario.connection.execute(
        f"create trigger gate before {event} on {scenario.schema}.{table} for each row when ({old})"
        f" execute function {scenario.schema}.wait_at_the_gate()"
    )
    try:
        yield
    finally:
        scenario.query("select pg_advisory_unlock(%s)", GATE)
        scenario.connection.execute(f"drop function {scenario.schema}.wait_at_the_gate() cascade")


def is_blocked(scenario: Scenario) -> bool:
    waiting: list[dict[str, Any]] = scenario.query(
        "select 1 from pg_locks where locktype = 'advisory' and objid = %s and not granted", GATE
    )
    return waiting != []


@pytest.mark.parametrize(
    "point",
    [
        point if number % 4 == 1 else pytest.param(point, marks=pytest.mark.long)
        for number, point in enumerate(POINTS)
    ],
)
def test_a_kill_at_any_point_of_a_step_completes_the_workflow_once(
    scenario: Scenario, flows: ModuleType, point: str
) -> None:  # W9, I21, I22, I25
    tree = scenario.ready_tree(program="flows")
    with gate(scenario, *POINTS[point]):
        handle = Starter(flows).start(sample_graph())
        scenario.until(lambda: is_blocked(scenario), within=30, what=point)
        for worker in psutil.Process(tree.pid).children():
            worker.kill()
    took = scenario.until(lambda: handle.status() == "COMPLETED", within=30, what=f"completed after {point}")
    assert handle.result() == [1, 2, 3]
    found = scenario.query(
        "select name, state, iteration from {schema}.nodes where kind <> 'map' order by name"
    )
    assert [row["name"] for row in found] == ["all[0]", "all[1]", "all[2]", "below", "first", "inner", "last"]
    assert {(row["state"], row["iteration"]) for row in found} == {("COMPLETED", 1)}
    assert len(scenario.query("select 1 from {schema}.tasks")) == 6
    assert scenario.query("select 1 from {schema}.outbox") == []
    print(f"{took:.2f} s after the kill")


def test_a_workflow_whose_step_fails_does_not_delay_other_workflows(
    scenario: Scenario, flows: ModuleType
) -> None:
    """The server rejects every step of one workflow."""
    starter = Starter(flows)
    failing, *others = [starter.start(sample_graph()) for _ in range(5)]
    scenario.connection.execute(
        f"""create function {scenario.schema}.refuse() returns trigger language plpgsql as $$
            begin raise exception 'not this one'; end $$"""
    )
    scenario.connection.execute(
        f"create trigger refuses before update on {scenario.schema}.nodes for each row"
        f" when (new.workflow_id = '{failing.id}') execute function {scenario.schema}.refuse()"
    )
    tree = scenario.ready_tree(program="flows")
    assert [handle.result(timeout=60) for handle in others] == [[1, 2, 3]] * 4
    scenario.until_logged(tree, f"workflow_cannot_go_on workflow={failing.id}", within=30)
    assert others[0].cancel() == "COMPLETED", "other workflows do not see its failure"
    scenario.connection.execute(f"drop function {scenario.schema}.refuse() cascade")
    next_tree = scenario.ready_tree(program="flows")
    assert failing.result(timeout=60) == [1, 2, 3]
    assert next_tree.process.poll() is None


def test_a_kill_while_the_workflows_of_a_map_start_starts_each_once(
    scenario: Scenario, flows: ModuleType
) -> None:  # W9, I21
    inner = Graph(name="one", nodes=(node("inner"),), output=0)
    listed = GraphNode(name="listed", task=WORK, args=json.dumps({"name": "listed", "value": [1, 2, 3]}))
    each = GraphNode(
        name="each", kind="map", graph=inner, items=(Hole(0),), template=('{"item":', Hole(-2), "}")
    )
    graph = Graph(name="spread", nodes=(listed, each), edges=(Edge(0, 1),), output=1)
    tree = scenario.ready_tree(program="flows")
    with gate(scenario, "workflows", "insert", "new.parent_node = 3"):
        handle = Starter(flows).start(graph)
        scenario.until(lambda: is_blocked(scenario), within=30, what="the second member begins")
        for worker in psutil.Process(tree.pid).children():
            worker.kill()
    assert handle.result(timeout=30) == ["inner"] * 3
    assert len(scenario.query("select 1 from {schema}.workflows")) == 4
    assert len(scenario.query("select 1 from {schema}.tasks")) == 4
