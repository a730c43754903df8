"""A worker is killed at the very point where a workflow moves on, at each of them in turn, and what it left half done is done once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import pytest

from everbeat.domain.graph import Edge, Graph, Hole, Node
from tests.stories.stage import Stage
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


def winding() -> Graph:
    """A task, a child, a map over the task's result, and what comes of it."""
    child = Graph(name="child", nodes=(node("inner"),), output=0)
    first = Node(name="first", task=WORK, args=json.dumps({"name": "first", "value": [1, 2, 3]}))
    below = Node(name="below", kind="workflow", graph=child)
    item = ('{"name":"member","value":', Hole(-2), "}")
    spread = Node(name="all", kind="map", task=WORK, items=(Hole(0),), template=item)
    last = Node(name="last", task=WORK, template=('{"name":"last","value":', Hole(2), "}"))
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 2), Edge(2, 3))
    return Graph(name="winding", nodes=(first, below, spread, last), edges=edges, output=3)


@contextmanager
def gate(stage: Stage, table: str, event: str, condition: str) -> Iterator[None]:
    """Whoever does this to a row waits until the gate is gone."""
    old = condition if event != "delete" else "true"
    stage.query("select pg_advisory_lock(%s)", GATE)
    stage.connection.execute(
        f"""create function {stage.schema}.wait_at_the_gate() returns trigger language plpgsql as $$
            begin perform pg_advisory_xact_lock_shared({GATE}); return coalesce(new, old); end $$"""
    )
    stage.connection.execute(
        f"create trigger gate before {event} on {stage.schema}.{table} for each row when ({old})"
        f" execute function {stage.schema}.wait_at_the_gate()"
    )
    try:
        yield
    finally:
        stage.query("select pg_advisory_unlock(%s)", GATE)
        stage.connection.execute(f"drop function {stage.schema}.wait_at_the_gate() cascade")


def somebody_waits(stage: Stage) -> bool:
    waiting: list[dict[str, Any]] = stage.query(
        "select 1 from pg_locks where locktype = 'advisory' and objid = %s and not granted", GATE
    )
    return waiting != []


@pytest.mark.parametrize(
    "point",
    [
        point if number % 2 else pytest.param(point, marks=pytest.mark.long)
        for number, point in enumerate(POINTS)
    ],
)
def test_a_kill_at_that_very_point(stage: Stage, flows: ModuleType, point: str) -> None:  # W9, I21, I22, I25
    tree = stage.ready_tree(program="flows")
    with gate(stage, *POINTS[point]):
        handle = Starter(flows).start(winding())
        stage.until(lambda: somebody_waits(stage), within=30, what=point)
        for worker in psutil.Process(tree.pid).children():
            worker.kill()
    took = stage.until(lambda: handle.status() == "COMPLETED", within=30, what=f"completed after {point}")
    assert handle.result() == [1, 2, 3]
    found = stage.query("select name, state, iteration from {schema}.nodes where kind <> 'map' order by name")
    assert [row["name"] for row in found] == ["all[0]", "all[1]", "all[2]", "below", "first", "inner", "last"]
    assert {(row["state"], row["iteration"]) for row in found} == {("COMPLETED", 1)}
    assert len(stage.query("select 1 from {schema}.tasks")) == 6
    assert stage.query("select 1 from {schema}.outbox") == []
    print(f"{took:.2f} s after the kill")


def test_one_that_cannot_go_on_keeps_no_other_from_it(stage: Stage, flows: ModuleType) -> None:
    """Whatever it is that refuses its step: the server does so here, for this workflow alone."""
    starter = Starter(flows)
    cursed, *others = [starter.start(winding()) for _ in range(5)]
    stage.connection.execute(
        f"""create function {stage.schema}.refuse() returns trigger language plpgsql as $$
            begin raise exception 'not this one'; end $$"""
    )
    stage.connection.execute(
        f"create trigger refuses before update on {stage.schema}.nodes for each row"
        f" when (new.workflow_id = '{cursed.id}') execute function {stage.schema}.refuse()"
    )
    tree = stage.ready_tree(program="flows")
    assert [handle.result(timeout=60) for handle in others] == [[1, 2, 3]] * 4
    stage.until(lambda: f"workflow_cannot_go_on workflow={cursed.id}" in tree.output(), within=30)
    assert others[0].cancel() == "COMPLETED", "what it suffers from is told to nobody else"
    stage.connection.execute(f"drop function {stage.schema}.refuse() cascade")
    next_tree = stage.ready_tree(program="flows")
    assert cursed.result(timeout=60) == [1, 2, 3]
    assert next_tree.process.poll() is None
