"""Retention of workflows: old ended ones go with their nodes, edges and signals; nothing of a live one goes."""

from __future__ import annotations

from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.domain.graph import Edge, Graph, Node
from everbeat.services.pruner import count_old, prune
from tests.services.conftest import Onlooker
from tests.store.conftest import Hands
from tests.store.flows import Flow, after, task
from tests.store.test_signals import send

OLD, OLDER = UUID("01900000-0000-7000-8000-000000000001"), UUID("01900000-0000-7000-8000-000000000000")
"""Of 2024: ids tell the time."""
CONFIG = RecoveryConfig(terminal_record_retention_hours=720)


def age(hands: Hands, flow: Flow) -> None:
    """Everything of it is 800 hours old, its id included."""
    for text in (
        "update {schema}.tasks set completed_at = completed_at - interval '800 h' where workflow_id = %(id)s",
        "update {schema}.workflows set ended_at = ended_at - interval '800 h' where %(id)s in (id, parent_id)",
    ):
        hands.connection.execute(hands.plain(text), {"id": flow.id})


async def test_old_workflows_go_with_all_that_is_theirs(onlooker: Onlooker, hands: Hands) -> None:  # H1
    old = Flow.start(hands, [task("a"), task("b")], after(1, 0), id=OLD)
    send(hands, old.id)
    old.play()
    age(hands, old)
    young = Flow.start(hands, [task("a"), task("b")], after(1, 0), id=OLDER)
    send(hands, young.id)
    young.play()
    before = await count_old(onlooker.session, CONFIG)
    assert (before.workflows, before.nodes, before.edges, before.tasks, before.signals) == (1, 2, 1, 2, 1)
    found = await prune(onlooker.session, CONFIG, clock=onlooker.clock)
    assert found == before
    assert hands.table("workflows", "id") == hands.table("signals", "target") == [(young.id,)]
    assert len(hands.table("nodes")) == 2


async def test_nothing_of_a_live_workflow_goes(onlooker: Onlooker, hands: Hands) -> None:  # H1
    child = Graph(name="child", nodes=(task("inner"),), output=0)
    nodes = [task("a"), Node(name="child", kind="workflow", graph=child), task("waits")]
    flow = Flow.start(hands, nodes, [Edge(0, 2), Edge(1, 2)], id=OLD)
    flow.settle_down()
    claimed = flow.by_name(flow.claim())
    flow.end([claimed["a"], claimed["inner"]], str)
    flow.settle_down()
    age(hands, flow)
    found = await prune(onlooker.session, CONFIG, clock=onlooker.clock)
    assert (found.workflows, found.tasks) == (0, 0)
    flow.play()
    assert flow.state == "COMPLETED"
