"""Large results that are handed on: a node that is given too much fails, and no other workflow waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import ModuleType
from uuid import UUID

import psutil
import pytest
from psycopg import sql

from everbeat.domain.graph import Edge, Graph, Hole, Node, TaskSpec
from tests.stories.stage import SLACK, Stage, program_of
from tests.stories.test_workflows import Starter, chain

pytestmark = [pytest.mark.story, pytest.mark.timeout(300)]

MANY = 300
SIZE = 1_500_000
ENDED = """update {schema}.tasks set state = 'COMPLETED', completed_at = now(), started_at = now(), claim_id = null, attempt = 1,
    result = to_json(repeat('large', 300000)) where workflow_id = %s and node < %s"""


@pytest.fixture
def flows(stage: Stage) -> Iterator[ModuleType]:
    with program_of(stage, "flows") as program:
        yield program


def execute(stage: Stage, text: str, *parameters: object) -> None:
    schema = sql.Identifier(stage.schema)
    stage.connection.execute(sql.SQL(text).format(schema=schema), parameters)  # type: ignore[arg-type]


def collected(hole: Hole) -> Graph:
    """`all` is given something of each of many results."""
    of = TaskSpec(name="never", queue="default")
    nodes = [Node(name=f"n{number}", task=of, args="{}") for number in range(MANY)]
    template: list[str | Hole] = ['{"name":"all","given":{"all":[']
    for number in range(MANY):
        template += ["," if number else "", Hole(number, hole.wants, hole.path)]
    taker = Node(name="all", task=TaskSpec(name="work", queue="default"), template=(*template, "]}}"))
    return Graph(
        name="collected", nodes=(*nodes, taker), edges=tuple(Edge(number, MANY) for number in range(MANY))
    )


@pytest.mark.parametrize(
    "storage",
    ["extended", pytest.param("external", marks=pytest.mark.long)],
    ids=["compressed", "as they are"],
)
def test_a_node_that_is_given_too_much_fails_and_holds_up_nobody(
    stage: Stage, flows: ModuleType, storage: str
) -> None:  # W12
    execute(stage, f"alter table {{schema}}.tasks alter column result set storage {storage}")
    tree = stage.ready_tree(program="flows")
    starter = Starter(flows)
    assert starter.start(chain(2)).result(timeout=60) == "n1"
    handle = starter.start(collected(Hole(0)))
    stage.until(
        lambda: len(stage.query("select id from {schema}.tasks where workflow_id = %s", handle.id)) == MANY,
        within=60,
        what="all nodes are enqueued",
    )
    most, over = [0], threading.Event()
    measuring = threading.Thread(target=measured, args=(tree.pid, most, over), daemon=True)
    measuring.start()
    execute(stage, "set session_replication_role = replica")
    execute(stage, ENDED, handle.id, MANY)
    execute(stage, "reset session_replication_role")
    execute(stage, "insert into {schema}.outbox (workflow_id, node) values (%s, null)", handle.id)
    slowest = hops(starter, handle.id, stage)
    over.set()
    measuring.join(10)
    print(f"slowest hop {slowest:.2f} s, largest process {most[0] / 1e6:.0f} MB")
    (failed,) = stage.query(
        "select state, error from {schema}.nodes where workflow_id = %s and number = %s", handle.id, MANY
    )
    assert failed["state"] == "FAILED"
    assert "payload_limit" in failed["error"]["message"]
    assert most[0] < 500_000_000
    assert slowest < 1 + SLACK
    forget(stage, handle.id)


def forget(stage: Stage, workflow_id: UUID) -> None:
    """Tasks that were ended with SQL have no attempts, which breaches an invariant."""
    execute(stage, "set session_replication_role = replica")
    for table in ("tasks", "nodes", "edges", "outbox"):
        execute(stage, f"delete from {{schema}}.{table} where workflow_id = %s", workflow_id)
    execute(stage, "delete from {schema}.workflows where id = %s", workflow_id)
    execute(stage, "reset session_replication_role")


def hops(starter: Starter, stuck: UUID, stage: Stage) -> float:
    """The slowest hop of chains that run until the large one has ended."""
    slowest = 0.0
    while True:
        before = time.monotonic()
        assert starter.start(chain(2)).result(timeout=120) == "n1"
        slowest = max(slowest, (time.monotonic() - before) / 2)
        if stage.query("select 1 from {schema}.workflows where id = %s and state = 'FAILED'", stuck):
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
