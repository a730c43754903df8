"""Plain workflows as graphs."""

from __future__ import annotations

import json
from typing import Any

from everbeat.domain.graph import Edge, Graph, Hole, Node, TaskSpec

_EDGES: dict[str, dict[str, Any]] = {
    "done": {},
    "value": {},
    "ended": {"tolerates": True},
    "outcome": {"tolerates": True},
    "if": {"path": (), "expects": True},
    "unless": {"path": (), "expects": False},
}


def graph_of(plain: list[dict[str, Any]], *, name: str = "random", task: str = "work") -> Graph:
    """The graph of plain nodes; its output is the last one. Every task is told its name and how to end."""
    spec = TaskSpec(name=task, queue="default")
    numbers: list[int] = []
    nodes: list[Node] = []
    edges: list[Edge] = []
    for each in plain:
        number = len(nodes)
        numbers.append(number)
        of_one: list[int] = [number]
        match each["kind"]:
            case "map":
                members = each["members"]
                if members:
                    whole = Node(name=each["name"], kind="map", first_member=number + 1, members=len(members))
                else:
                    whole = Node(
                        name=each["name"],
                        kind="map",
                        task=spec,
                        items=("[]",),
                        args="{}",
                        quorum=each["quorum"],
                    )
                nodes.append(whole)
                nodes += [
                    Node(
                        name=one["name"],
                        task=spec,
                        member_of=number,
                        quorum=each["quorum"],
                        args=_told(one, one["name"]) + "}",
                    )
                    for one in members
                ]
                of_one = [number + 1 + n for n in range(len(members))] or [number]
            case "child":
                inner = graph_of(each["nodes"], name="child", task=task)
                nodes.append(Node(name=each["name"], kind="workflow", graph=inner, quorum=each["quorum"]))
            case _:
                nodes.append(_task(each, plain, numbers, spec))
        for child in of_one:
            edges += [Edge(numbers[parent], child, **_EDGES[mode]) for parent, mode in each["needs"]]
            edges += [Edge(numbers[parent], child, joins=True) for parent in each["joins"]]
    return Graph(name=name, nodes=tuple(nodes), edges=tuple(edges), output=numbers[-1])


def _task(each: dict[str, Any], plain: list[dict[str, Any]], numbers: list[int], spec: TaskSpec) -> Node:
    template: list[str | Hole] = [_told(each, each["value"]) + ',"given":{']
    for parent, mode in each["needs"]:
        if mode in ("value", "outcome"):
            comma = "" if len(template) == 1 else ","
            template[-1] = f'{template[-1]}{comma}"from {plain[parent]["name"]}":'
            template += [Hole(numbers[parent], mode), ""]
    template[-1] = f"{template[-1]}}}}}"
    if len(template) == 1:
        return Node(name=each["name"], task=spec, quorum=each["quorum"], args=str(template[0]))
    return Node(name=each["name"], task=spec, quorum=each["quorum"], template=tuple(template))


def _told(task: dict[str, Any], value: Any) -> str:
    return json.dumps({"name": task["name"], "fails": task["fails"], "value": value})[:-1]
