"""Workflows on real workers end correctly although workers die."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import psutil
import pytest
from psycopg import sql

from everbeat.client.options import StartSettings
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.client.workflow.sender import WorkflowSender
from everbeat.domain.workflow.graph import Edge, Graph, GraphNode, Hole, TaskSpec
from tests.stories.scenario import FAST, SLACK, Scenario, program_of
from tests.workflows.graphs import graph_of
from tests.workflows.plain import Ends, random_nodes

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

WORK = TaskSpec(name="work", queue="default")


@pytest.fixture
def flows(scenario: Scenario) -> Iterator[ModuleType]:
    """Import the program as a sender does."""
    with program_of(scenario, "flows") as program:
        yield program


class Starter:
    """Start graphs as a client does."""

    def __init__(self, program: ModuleType) -> None:
        self._sender: WorkflowSender = program.app._workflow_sender

    def start(self, graph: Graph) -> WorkflowHandle[Any]:
        return self._sender.start(graph, StartSettings(), decode=json.loads)


def node(name: str, *, pace: float = 0.0, **more: Any) -> GraphNode:
    given = {} if "template" in more else {"args": json.dumps({"name": name, "value": name, "pace": pace})}
    return GraphNode(name=name, task=WORK, **given, **more)


def diamond(*, pace: float = 0.0) -> Graph:
    nodes = (
        node("top", pace=pace),
        node("left", pace=pace),
        node("right", pace=pace),
        node("bottom", pace=pace),
    )
    return Graph(
        name="diamond", nodes=nodes, edges=(Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3)), output=3
    )


def chain(count: int, *, pace: float = 0.0) -> Graph:
    nodes = tuple(node(f"n{index}", pace=pace) for index in range(count))
    return Graph(
        name="chain",
        nodes=nodes,
        edges=tuple(Edge(index, index + 1) for index in range(count - 1)),
        output=count - 1,
    )


def join_of(parents: int) -> Graph:
    nodes = (*(node(f"p{index}") for index in range(parents)), node("join"))
    return Graph(
        name="join",
        nodes=nodes,
        edges=tuple(Edge(index, parents) for index in range(parents)),
        output=parents,
    )


@contextmanager
def kills(scenario: Scenario, *, every_s: float, seed: int) -> Iterator[list[int]]:
    """Kill a random worker process repeatedly; yield the list of killed processes.

    Only workers that have started are killed. On a slow machine, no worker would start between two kills of others.
    """
    dice, over = random.Random(seed), threading.Event()
    killed: list[int] = []
    live = sql.SQL("select pid from {}.workers where ended_at is null order by pid")

    def kill() -> None:
        with scenario.target.connect("everbeat test kills") as connection:
            while not over.wait(every_s):
                rows = connection.execute(live.format(sql.Identifier(scenario.schema)))
                started = {pid for (pid,) in rows.fetchall()} - {*killed}
                workers = [child for tree in scenario.trees for child in psutil.Process(tree.pid).children()]
                if victims := [child for child in workers if child.pid in started]:
                    victim = dice.choice(victims)
                    killed.append(victim.pid)
                    victim.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    try:
        yield killed
    finally:
        over.set()
        killer.join(10)


def test_a_chain_continues_after_its_worker_was_killed(scenario: Scenario, flows: ModuleType) -> None:  # W10
    tree = scenario.ready_tree(program="flows")
    handle = Starter(flows).start(chain(3, pace=0.3))
    scenario.until(
        lambda: scenario.query("select 1 from {schema}.tasks where node = 1 and state = 'RUNNING'"),
        within=30,
        what="the middle runs",
    )
    (worker,) = psutil.Process(tree.pid).children()
    worker.kill()
    at = time.monotonic()
    assert handle.result(timeout=60) == "n2"
    took = time.monotonic() - at
    print(f"completed {took:.2f} s after the kill")
    assert took < 5 + SLACK


def test_twenty_joins_of_twenty_parents_run_once_each(scenario: Scenario, flows: ModuleType) -> None:  # W11
    """The long run has two hundred joins of fifty parents."""
    for _ in range(2):
        scenario.ready_tree(program="flows", worker={"processes": 2})
    starter = Starter(flows)
    handles = [starter.start(join_of(20)) for _ in range(20)]
    assert [handle.result(timeout=120) for handle in handles] == ["join"] * 20
    assert (
        scenario.query(
            "select workflow_id from {schema}.tasks where node = 20 group by 1 having count(*) > 1"
        )
        == []
    )


@pytest.mark.long
def test_two_hundred_joins_of_fifty_parents_run_once_each(
    scenario: Scenario, flows: ModuleType
) -> None:  # W11
    for _ in range(2):
        scenario.ready_tree(program="flows", worker={"processes": 2})
    starter = Starter(flows)
    handles = [starter.start(join_of(50)) for _ in range(200)]
    assert [handle.result(timeout=240) for handle in handles] == ["join"] * 200
    assert (
        scenario.query(
            "select workflow_id from {schema}.tasks where node = 50 group by 1 having count(*) > 1"
        )
        == []
    )


def test_a_thousand_nodes_fan_out_and_in(scenario: Scenario, flows: ModuleType) -> None:  # W7
    scenario.ready_tree(program="flows")
    members = tuple(
        GraphNode(name=f"all[{n}]", task=WORK, member_of=0, args=json.dumps({"name": "x", "value": n}))
        for n in range(1_000)
    )
    whole = GraphNode(name="all", kind="map", first_member=1, members=1_000)
    total = GraphNode(name="sum", task=WORK, template=('{"name":"sum","value":', Hole(0), "}"))
    graph = Graph(name="fan", nodes=(whole, *members, total), edges=(Edge(0, 1_001),), output=1_001)
    began = time.monotonic()
    handle = Starter(flows).start(graph)
    started_s = time.monotonic() - began
    assert handle.result(timeout=120) == [*range(1_000)]
    print(f"started in {started_s:.3f} s, ended after {time.monotonic() - began:.2f} s")
    assert started_s < 1.0 * SLACK
    assert handle.info().counts == {"COMPLETED": 1_002}


def test_random_workflows_end_correctly_while_workers_are_killed(
    scenario: Scenario, flows: ModuleType
) -> None:  # I21, I22, I25, W1, W5
    assert run_under_kills(scenario, flows, count=40, every_s=1.0, seed=7, within_s=120) == []


@pytest.mark.long
def test_three_hundred_random_workflows_end_correctly_while_workers_are_killed(
    scenario: Scenario, flows: ModuleType
) -> None:  # I21, I22, I25
    assert run_under_kills(scenario, flows, count=300, every_s=1.5, seed=8, within_s=280) == []


def run_under_kills(
    scenario: Scenario, flows: ModuleType, *, count: int, every_s: float, seed: int, within_s: float
) -> list[object]:
    """Run random workflows while workers die; return those that did not end as a plain evaluation says."""
    dice = random.Random(seed)
    for _ in range(2):
        scenario.ready_tree(program="flows", recovery=FAST, worker={"processes": 2})
    starter = Starter(flows)
    started: list[tuple[WorkflowHandle[Any], Ends, str]] = []
    with kills(scenario, every_s=every_s, seed=seed) as killed:
        while len(started) < count or not killed:  # a fast machine finishes before the first kill
            plain = random_nodes(dice, count=dice.randrange(1, 15))
            ends = Ends()
            state = ends.workflow(plain)
            started.append((starter.start(graph_of(plain)), ends, state))
        scenario.until(
            lambda: not scenario.query("select 1 from {schema}.workflows where ended_at is null limit 1"),
            within=within_s,
            what=f"{count} random workflows under fire",
        )
    print(f"{len(killed)} kills")
    assert killed
    wrong: list[object] = []
    for handle, ends, state in started:
        found = scenario.query(
            """with recursive tree as (
                   select %s::uuid as id union all select w.id from tree t join {schema}.workflows w on w.parent_id = t.id)
               select n.name, n.state from tree t join {schema}.nodes n on n.workflow_id = t.id""",
            handle.id,
        )
        states = {row["name"]: row["state"] for row in found}
        if (handle.status(), states) != (state, ends.states):
            wrong.append((handle.id, states, ends.states))
    return wrong


@pytest.mark.long
def test_fifty_diamonds_complete_while_workers_are_killed(scenario: Scenario, flows: ModuleType) -> None:
    """The long run has five hundred diamonds."""
    assert diamonds(scenario, flows, count=50, every_s=1.0) == {"bottom"}


@pytest.mark.long
def test_five_hundred_diamonds_complete_with_a_kill_every_two_seconds(
    scenario: Scenario, flows: ModuleType
) -> None:
    assert diamonds(scenario, flows, count=500, every_s=2.0) == {"bottom"}


def diamonds(scenario: Scenario, flows: ModuleType, *, count: int, every_s: float) -> set[object]:
    for _ in range(2):
        scenario.ready_tree(program="flows", recovery=FAST, worker={"processes": 2})
    starter = Starter(flows)
    with kills(scenario, every_s=every_s, seed=3) as killed:
        handles = [starter.start(diamond(pace=0.05)) for _ in range(count)]
        while not killed:
            handles.append(starter.start(diamond(pace=0.05)))
        found = {handle.result(timeout=200) for handle in handles}
    print(f"{len(killed)} kills")
    assert scenario.query("select state, count(*) from {schema}.nodes group by 1") == [
        {"state": "COMPLETED", "count": 4 * len(handles)}
    ]
    return found
