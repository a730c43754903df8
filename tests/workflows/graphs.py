"""Convert plain workflows to graphs."""

from __future__ import annotations

import json
from typing import Any

from everbeat.domain.workflow.graph import ITEM, Edge, Graph, GraphNode, Hole, TaskSpec

_EDGES: dict[str, dict[str, Any]] = {
    "done": {},
    "value": {},
    "ended": {"tolerates": True},
    "outcome": {"tolerates": True},
    "failed": {"if_failed": True},
    "if": {"path": (), "expects": True},
    "unless": {"path": (), "expects": False},
}


def graph_of(
    plain: list[dict[str, Any]], *, name: str = "random", task: str = "work", silent: bool = False
) -> Graph:
    """Return the graph of plain nodes; its output is the last node, if any. Each task gets its name and its end as arguments."""
    spec = TaskSpec(name=task, queue="default")
    numbers: list[int] = []
    nodes: list[GraphNode] = []
    edges: list[Edge] = []
    for each in plain:
        number = len(nodes)
        numbers.append(number)
        of_one: list[int] = [number]
        match each["kind"]:
            case "map" | "flows":
                members = each["members"]
                if each.get("made"):
                    inner = _inner(members[0], task)
                    whole = GraphNode(
                        name=each["name"],
                        kind="map",
                        graph=inner,
                        items=("[1]",),
                        template=('{"item":', Hole(ITEM), "}"),
                        quorum=each["quorum"],
                    )
                    members = []
                elif members:
                    whole = GraphNode(
                        name=each["name"], kind="map", first_member=number + 1, members=len(members)
                    )
                else:
                    whole = GraphNode(
                        name=each["name"],
                        kind="map",
                        task=spec,
                        items=("[]",),
                        args="{}",
                        quorum=each["quorum"],
                    )
                nodes.append(whole)
                nodes += [
                    GraphNode(name=one["name"], member_of=number, quorum=each["quorum"], **_member(one, spec))
                    for one in members
                ]
                of_one = [number + 1 + n for n in range(len(members))] or [number]
            case "child":
                nodes.append(
                    GraphNode(
                        name=each["name"], kind="workflow", graph=_inner(each, task), quorum=each["quorum"]
                    )
                )
            case _:
                nodes.append(_task(each, plain, numbers, spec))
        for child in of_one:
            edges += [Edge(numbers[parent], child, **_EDGES[mode]) for parent, mode in each["needs"]]
            edges += [Edge(numbers[parent], child, joins=True) for parent in each["joins"]]
    return Graph(name=name, nodes=tuple(nodes), edges=tuple(edges), output=None if silent else numbers[-1])


def _inner(workflow: dict[str, Any], task: str) -> Graph:
    return graph_of(workflow["nodes"], name="child", task=task, silent=workflow["silent"])


def _member(one: dict[str, Any], spec: TaskSpec) -> dict[str, Any]:
    if "nodes" in one:
        return {"kind": "workflow", "graph": _inner(one, spec.name)}
    return {"task": spec, "args": _told(one, one["name"]) + "}"}


def _task(each: dict[str, Any], plain: list[dict[str, Any]], numbers: list[int], spec: TaskSpec) -> GraphNode:
    template: list[str | Hole] = [_told(each, each["value"]) + ',"given":{']
    for parent, mode in each["needs"]:
        if mode in ("value", "outcome"):
            comma = "" if len(template) == 1 else ","
            template[-1] = f'{template[-1]}{comma}"from {plain[parent]["name"]}":'
            template += [Hole(numbers[parent], mode), ""]
    template[-1] = f"{template[-1]}}}}}"
    if len(template) == 1:
        return GraphNode(name=each["name"], task=spec, quorum=each["quorum"], args=str(template[0]))
    return GraphNode(name=each["name"], task=spec, quorum=each["quorum"], template=tuple(template))


def _told(task: dict[str, Any], value: Any) -> str:
    return json.dumps({"name": task["name"], "fails": task["fails"], "value": value})[:-1]
