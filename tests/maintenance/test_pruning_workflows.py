"""Test retention of workflows: old ended ones are deleted with their nodes, edges and signals, live ones are kept."""

from __future__ import annotations

from uuid import UUID

from everbeat.config import RecoveryConfig
from everbeat.domain.workflow.graph import Edge, Graph, GraphNode
from everbeat.maintenance.cleanup import prune
from everbeat.maintenance.counting import count_old
from tests.recovering.conftest import ManualObserver
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, after, task
from tests.store.test_signals import send

OLD, OLDER = UUID("01900000-0000-7000-8000-000000000001"), UUID("01900000-0000-7000-8000-000000000000")
"""Of 2024: ids tell the time."""
CONFIG = RecoveryConfig(terminal_record_retention_hours=720)


def age(db: StoreHarness, flow: Flow) -> None:
    """Date the workflow and its id back by 800 hours."""
    for text in (
        "update {schema}.tasks set completed_at = completed_at - interval '800 h' where workflow_id = %(id)s",
        "update {schema}.workflows set ended_at = ended_at - interval '800 h' where %(id)s in (id, parent_id)",
    ):
        db.connection.execute(db.plain(text), {"id": flow.id})


async def test_old_ended_workflows_are_pruned_with_their_nodes_and_signals(
    observer: ManualObserver, db: StoreHarness
) -> None:  # H1
    old = Flow.start(db, [task("a"), task("b")], after(1, 0), id=OLD)
    send(db, old.id)
    old.play()
    age(db, old)
    young = Flow.start(db, [task("a"), task("b")], after(1, 0), id=OLDER)
    send(db, young.id)
    young.play()
    before = await count_old(observer.session, CONFIG)
    assert (before.workflows, before.nodes, before.edges, before.tasks, before.signals) == (1, 2, 1, 2, 1)
    found = await prune(observer.session, CONFIG, clock=observer.clock)
    assert found == before
    assert db.table("workflows", "id") == db.table("signals", "target") == [(young.id,)]
    assert len(db.table("nodes")) == 2


async def test_nothing_of_a_live_workflow_is_pruned(observer: ManualObserver, db: StoreHarness) -> None:  # H1
    child = Graph(name="child", nodes=(task("inner"),), output=0)
    nodes = [task("a"), GraphNode(name="child", kind="workflow", graph=child), task("waits")]
    flow = Flow.start(db, nodes, [Edge(0, 2), Edge(1, 2)], id=OLD)
    flow.settle_down()
    claimed = flow.by_name(flow.claim())
    flow.end([claimed["a"], claimed["inner"]], str)
    flow.settle_down()
    age(db, flow)
    found = await prune(observer.session, CONFIG, clock=observer.clock)
    assert (found.workflows, found.tasks) == (0, 0)
    flow.play()
    assert flow.state == "COMPLETED"
