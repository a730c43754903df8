"""Random workflows as plain data, and their expected ends by a plain evaluation that shares no code with everbeat.

A node is a dict: `name`; `needs`, a list of (parent, mode), mode one of "done", "ended", "value", "outcome", "failed", "if", "unless"; `joins` and
`quorum`; `kind` "task", "map" (with `members`, each a node), "child" (with `nodes`) or "flows" (a map of workflows: each of its `members`
has `nodes`). The field `fails` of a task sets how it ends. A workflow that is `silent` has no output. A map that is `made` gets its
members when it runs; it has one at most, because all members share one graph and so the names of its nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any


def random_nodes(random: Random, *, count: int, prefix: str = "", depth: int = 0) -> list[dict[str, Any]]:
    """Return random nodes in an order in which parents come first."""
    nodes: list[dict[str, Any]] = []
    for index in range(count):
        nested = 1 if depth < 2 else 0
        kind = random.choices(["task", "map", "child", "flows"], [8, 1, nested, nested])[0]
        node: dict[str, Any] = {
            "name": f"{prefix}{index}", "kind": kind, "fails": random.random() < 0.15, "value": random.random() < 0.5,
            "needs": [], "joins": [], "quorum": None,
        }  # fmt: skip
        _draw_parents(random, node, nodes)
        if kind == "map":
            node["members"] = [
                {"name": f"{node['name']}[{n}]", "fails": random.random() < 0.1}
                for n in range(random.randrange(5))
            ]
        if kind == "child":
            node |= _random_workflow(random, name=node["name"], depth=depth + 1)
        if kind == "flows":
            names = [f"{node['name']}[{n}]" for n in range(random.randrange(4))]
            node["members"] = [_random_workflow(random, name=name, depth=depth + 1) for name in names]
            node["made"] = len(names) == 1 and random.random() < 0.5
        nodes.append(node)
    return nodes


def _random_workflow(random: Random, *, name: str, depth: int) -> dict[str, Any]:
    nodes = random_nodes(random, count=random.randrange(1, 4), prefix=f"{name}/", depth=depth)
    return {"name": name, "nodes": nodes, "silent": random.random() < 0.4}


def _draw_parents(random: Random, node: dict[str, Any], before: list[dict[str, Any]]) -> None:
    if not before:
        return
    parents = random.sample(range(len(before)), k=min(len(before), random.choice([0, 1, 1, 2, 3])))
    for parent in parents:
        modes = ["done", "ended", "value", "outcome", "failed"]
        if before[parent]["kind"] == "task":
            modes += ["if", "unless"]
        node["needs"].append((parent, random.choice(modes)))
    rest = [index for index in range(len(before)) if index not in parents]
    if len(rest) >= 2 and random.random() < 0.3:
        node["joins"] = random.sample(rest, k=random.randrange(2, min(len(rest), 5) + 1))
        node["quorum"] = random.randrange(1, len(node["joins"]) + 1)


@dataclass(frozen=True)
class Missing:
    """The value of a completed workflow whose last node did not complete; `told` is its outcome for other nodes."""

    told: str


@dataclass
class Ends:
    """The expected ends: states by name, values by name, and the arguments that each task must get.

    `unmade`: maps that were skipped before their members were made.
    """

    states: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    called_with: dict[str, dict[str, Any]] = field(default_factory=dict)
    unmade: set[str] = field(default_factory=set)

    def workflow(self, nodes: list[dict[str, Any]]) -> str:
        """Evaluate all nodes and return how the workflow ends."""
        for node in nodes:
            self._node(node, nodes)
        bad = any(self.states[node["name"]] == "FAILED" for node in nodes)
        return "FAILED" if bad else "COMPLETED"

    def _node(self, node: dict[str, Any], nodes: list[dict[str, Any]]) -> None:
        name = node["name"]
        if not self._may_run(node, nodes):
            self._end(name, "SKIPPED", None)
            if node.get("made"):
                self.unmade.add(name)
                return
            for member in node.get("members", ()):
                self._end(member["name"], "SKIPPED", None)
            return
        match node["kind"]:
            case "task":
                arguments = self._arguments(node, nodes)
                if any(_missing(value) for value in arguments.values()):
                    self._end(name, "FAILED", None)  # it cannot be called
                    return
                self.called_with[name] = arguments
                self._run(name, node["fails"], node["value"])
            case "map" | "flows":
                for member in node["members"]:
                    if "nodes" in member:
                        self._child(member)
                        continue
                    self.called_with[member["name"]] = {}
                    self._run(member["name"], member["fails"], member["name"])
                states = [self.states[member["name"]] for member in node["members"]]
                values = [self.values[member["name"]] for member in node["members"]]
                self._end(name, "FAILED" if "FAILED" in states else "COMPLETED", values)
            case _:
                self._child(node)

    def _child(self, node: dict[str, Any]) -> None:
        state = self.workflow(node["nodes"])
        last = node["nodes"][-1]["name"]
        value = self.values[last] if self.states[last] == "COMPLETED" else Missing(self.states[last])
        if node["silent"]:
            value = None
        self._end(node["name"], state, (_missing(value) or value) if state == "COMPLETED" else None)

    def _may_run(self, node: dict[str, Any], nodes: list[dict[str, Any]]) -> bool:
        for parent, mode in node["needs"]:
            state, value = self.states[nodes[parent]["name"]], self.values[nodes[parent]["name"]]
            if mode in ("done", "value") and state != "COMPLETED":
                return False
            if mode == "failed" and state != "FAILED":
                return False
            if mode == "if" and not (state == "COMPLETED" and value is True):
                return False
            if mode == "unless" and not (state == "COMPLETED" and value is False):
                return False
        completed = sum(self.states[nodes[parent]["name"]] == "COMPLETED" for parent in node["joins"])
        return completed >= (node["quorum"] or 0)

    def _arguments(self, node: dict[str, Any], nodes: list[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for parent, mode in node["needs"]:
            name = nodes[parent]["name"]
            if mode == "value":
                found[f"from {name}"] = self.values[name]
            elif mode == "outcome":
                found[f"from {name}"] = self._outcome(nodes[parent])
        return found

    def _outcome(self, node: dict[str, Any]) -> Any:
        is_map, has_ended_well = "members" in node, self.states[node["name"]] == "COMPLETED"
        members = node["members"] if is_map and (has_ended_well or node["name"] not in self.unmade) else ()
        if is_map and (members or has_ended_well):
            return [self._told(member["name"]) for member in members]
        if is_map:
            return [self.states[node["name"]]]
        return self._told(node["name"])

    def _told(self, name: str) -> Any:
        state, value = self.states[name], self.values[name]
        if isinstance(value, Missing):
            return value.told
        return {"completed": value} if state == "COMPLETED" else state

    def _run(self, name: str, fails: bool, value: Any) -> None:
        self._end(name, "FAILED" if fails else "COMPLETED", None if fails else value)

    def _end(self, name: str, state: str, value: Any) -> None:
        self.states[name], self.values[name] = state, value


def _missing(value: Any) -> Missing | None:
    """Return what a value lacks: the whole value, or the first member of a list."""
    found = value if isinstance(value, list) else [value]
    return next((each for each in found if isinstance(each, Missing)), None)
