"""Send graphs through an app, with a flow that acts as their workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from everbeat import App
from everbeat.client.options import StartSettings
from everbeat.client.workflow.handle import WorkflowHandle
from everbeat.domain.workflow.graph import Edge, Graph, GraphNode
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, task


def sent(
    app: App, db: StoreHarness, nodes: Sequence[GraphNode], edges: Sequence[Edge] = (), **more: Any
) -> tuple[WorkflowHandle[Any], Flow]:
    """Send a workflow and advance it as far as possible without a worker; `advanced=False` leaves it as sent."""
    key, advanced = more.pop("key", None), more.pop("advanced", True)
    graph = Graph(name=more.pop("name", "order"), nodes=tuple(nodes), edges=tuple(edges), **more)
    sender = app._workflow_sender
    handle = sender.start(graph, StartSettings(key=key), decode=json.loads)
    flow = Flow(db, handle.id)
    if advanced:
        flow.settle_down()
    return handle, flow


def mapped(name: str, number: int, members: int) -> list[GraphNode]:
    """Return a map node followed by its members."""
    collector = GraphNode(name=name, kind="map", first_member=number + 1, members=members)
    return [collector, *(task(f"{name}[{place}]", member_of=number) for place in range(members))]


def child(name: str, *nodes: GraphNode) -> GraphNode:
    """Return the node of a child workflow."""
    return GraphNode(name=name, kind="workflow", graph=Graph(name=f"{name} child", nodes=nodes))
