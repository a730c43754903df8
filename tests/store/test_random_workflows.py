"""Random workflows, ended in random order: every node must come to what a plain evaluation of the same graph says."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from tests.store.conftest import Hands
from tests.store.flows import Flow
from tests.workflows.graphs import graph_of
from tests.workflows.plain import Ends, random_nodes


def leaves(nodes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for node in nodes:
        match node["kind"]:
            case "map":
                found |= {one["name"]: {"value": one["name"], **one} for one in node["members"]}
            case "child":
                found |= leaves(node["nodes"])
            case _:
                found[node["name"]] = node
    return found


def told(value: Any) -> Any:
    """An outcome as the plain evaluation tells it."""
    match value:
        case {
            "failed": {"code": "BROKEN" | "SUBWORKFLOW_FAILED" | "MEMBERS_FAILED" | "RESULT_NOT_AVAILABLE"}
        }:
            return "FAILED"
        case {"failed": {"code": "UPSTREAM_SKIPPED" | "MEMBERS_SKIPPED"}}:
            return "SKIPPED"
        case list():
            return [told(each) for each in value]
        case _:
            return value


@pytest.mark.parametrize(
    "seed", [*range(15), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(15, 100))]
)
def test_random_workflows_end_as_a_plain_evaluation_says(hands: Hands, seed: int) -> None:  # W1, W5, I21, I22
    random = Random(seed)
    plain = random_nodes(random, count=random.randrange(1, 15))
    ends = Ends()
    expected = ends.workflow(plain)
    tasks = leaves(plain)
    graph = graph_of(plain)
    flow = Flow.start(hands, graph.nodes, graph.edges, output=graph.output)
    flow.settle_down()
    seen: dict[str, Any] = {}
    while claimed := flow.claim(random.randrange(1, 6)):
        names = flow.names()
        for each in claimed:
            assert names[each.id] not in seen, "twice"
            seen[names[each.id]] = each.args
        random.shuffle(claimed)
        middle = random.randrange(len(claimed) + 1)
        for part in (claimed[:middle], claimed[middle:]):
            flow.end(part, lambda name: ValueError("no") if tasks[name]["fails"] else tasks[name]["value"])
            if random.random() < 0.5:
                flow.step()
        flow.settle_down()
    found = hands.table("nodes", "name, state")
    assert dict(found) == ends.states
    assert flow.state == expected
    assert seen.keys() == ends.called_with.keys()
    for name, args in seen.items():
        given = json.loads(args).get("given", {})
        assert {key: told(value) for key, value in given.items()} == ends.called_with[name], name
    assert hands.table("outbox") == []
    assert flow.stuck() == []
