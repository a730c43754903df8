"""Graphs sent through an app, and the flow that plays their workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from everbeat import App
from everbeat.client.workflow_handle import WorkflowHandle
from everbeat.client.workflow_signature import StartOptions
from everbeat.domain.graph import Edge, Graph, Node
from tests.store.conftest import Hands
from tests.store.flows import Flow, task


def sent(
    app: App, hands: Hands, nodes: Sequence[Node], edges: Sequence[Edge] = (), **more: Any
) -> tuple[WorkflowHandle[Any], Flow]:
    """A workflow that was sent and taken as far as it goes without a worker; `advanced=False`: as it was sent."""
    key, advanced = more.pop("key", None), more.pop("advanced", True)
    graph = Graph(name=more.pop("name", "order"), nodes=tuple(nodes), edges=tuple(edges), **more)
    sender = app._workflow_sender
    handle = sender.start(graph, StartOptions(key=key), decode=json.loads)
    flow = Flow(hands, handle.id)
    if advanced:
        flow.settle_down()
    return handle, flow


def mapped(name: str, number: int, members: int) -> list[Node]:
    """A map, and its members behind it."""
    collector = Node(name=name, kind="map", first_member=number + 1, members=members)
    return [collector, *(task(f"{name}[{place}]", member_of=number) for place in range(members))]


def child(name: str, *nodes: Node) -> Node:
    """A workflow in a workflow."""
    return Node(name=name, kind="workflow", graph=Graph(name=f"{name} child", nodes=nodes))
