"""Large results that later nodes take: a node with oversized arguments fails, and no other workflow waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import ModuleType
from uuid import UUID

import psutil
import pytest
from psycopg import sql

from everbeat.domain.workflow.graph import Edge, Graph, GraphNode, Hole, TaskSpec
from tests.stories.scenario import SLACK, Scenario, program_of
from tests.stories.test_workflows import Starter, chain

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

MANY = 300
SIZE = 1_500_000
ENDED = """update {schema}.tasks set state = 'COMPLETED', completed_at = now(), started_at = now(), claim_id = null, attempt = 1,
    result = to_json(repeat('large', 300000)) where workflow_id = %s and node < %s"""


@pytest.fixture
def flows(scenario: Scenario) -> Iterator[ModuleType]:
    with program_of(scenario, "flows") as program:
        yield program


def execute(scenario: Scenario, text: str, *parameters: object) -> None:
    schema = sql.Identifier(scenario.schema)
    scenario.connection.execute(sql.SQL(text).format(schema=schema), parameters)  # type: ignore[arg-type]


def collected(hole: Hole) -> Graph:
    """Return a graph in which `all` takes a part of each of many results."""
    of = TaskSpec(name="never", queue="default")
    nodes = [GraphNode(name=f"n{number}", task=of, args="{}") for number in range(MANY)]
    template: list[str | Hole] = ['{"name":"all","given":{"all":[']
    for number in range(MANY):
        template += ["," if number else "", Hole(number, hole.wants, hole.path)]
    taker = GraphNode(name="all", task=TaskSpec(name="work", queue="default"), template=(*template, "]}}"))
    return Graph(
        name="collected", nodes=(*nodes, taker), edges=tuple(Edge(number, MANY) for number in range(MANY))
    )


@pytest.mark.parametrize(
    "storage",
    ["extended", pytest.param("external", marks=pytest.mark.long)],
    ids=["compressed", "as they are"],
)
def test_a_node_with_oversized_arguments_fails_without_delaying_other_workflows(
    scenario: Scenario, flows: ModuleType, storage: str
) -> None:  # W12
    execute(scenario, f"alter table {{schema}}.tasks alter column result set storage {storage}")
    tree = scenario.ready_tree(program="flows")
    starter = Starter(flows)
    assert starter.start(chain(2)).result(timeout=60) == "n1"
    handle = starter.start(collected(Hole(0)))
    scenario.until(
        lambda: (
            len(scenario.query("select id from {schema}.tasks where workflow_id = %s", handle.id)) == MANY
        ),
        within=60,
        what="all nodes are enqueued",
    )
    most, over = [0], threading.Event()
    measuring = threading.Thread(target=measured, args=(tree.pid, most, over), daemon=True)
    measuring.start()
    execute(scenario, "set session_replication_role = replica")
    execute(scenario, ENDED, handle.id, MANY)
    execute(scenario, "reset session_replication_role")
    execute(scenario, "insert into {schema}.outbox (workflow_id, node) values (%s, null)", handle.id)
    slowest = hops(starter, handle.id, scenario)
    over.set()
    measuring.join(10)
    print(f"slowest hop {slowest:.2f} s, largest process {most[0] / 1e6:.0f} MB")
    (failed,) = scenario.query(
        "select state, error from {schema}.nodes where workflow_id = %s and number = %s", handle.id, MANY
    )
    assert failed["state"] == "FAILED"
    assert "payload_limit" in failed["error"]["message"]
    assert most[0] < 500_000_000
    assert slowest < 1 + SLACK
    forget(scenario, handle.id)


def forget(scenario: Scenario, workflow_id: UUID) -> None:
    """Delete tasks that were ended with SQL: they have no attempts, which breaches an invariant."""
    execute(scenario, "set session_replication_role = replica")
    for table in ("tasks", "nodes", "edges", "outbox"):
        execute(scenario, f"delete from {{schema}}.{table} where workflow_id = %s", workflow_id)
    execute(scenario, "delete from {schema}.workflows where id = %s", workflow_id)
    execute(scenario, "reset session_replication_role")


def hops(starter: Starter, stuck: UUID, scenario: Scenario) -> float:
    """Return the slowest hop of chains that run until the large workflow has ended."""
    slowest = 0.0
    while True:
        before = time.monotonic()
        assert starter.start(chain(2)).result(timeout=120) == "n1"
        slowest = max(slowest, (time.monotonic() - before) / 2)
        if scenario.query("select 1 from {schema}.workflows where id = %s and state = 'FAILED'", stuck):
            return slowest
        assert time.monotonic() - before < 120


def measured(pid: int, most: list[int], over: threading.Event) -> None:
    tree = psutil.Process(pid)
    while not over.wait(0.02):
        for each in [tree, *tree.children(recursive=True)]:
            try:
                most[0] = max(most[0], each.memory_info().rss)
            except psutil.Error:
                continue
