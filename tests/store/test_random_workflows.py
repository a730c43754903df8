"""Random workflows whose tasks end in random order: every node must end as a plain evaluation of the same graph says."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from tests.store.conftest import StoreHarness
from tests.store.flows import Flow
from tests.workflows.graphs import graph_of
from tests.workflows.plain import Ends, random_nodes


def leaves(nodes: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for node in nodes:
        match node["kind"]:
            case "map":
                found |= {one["name"]: {"value": one["name"], **one} for one in node["members"]}
            case "flows":
                for one in node["members"]:
                    found |= leaves(one["nodes"])
            case "child":
                found |= leaves(node["nodes"])
            case _:
                found[node["name"]] = node
    return found


def plain_outcome(value: Any) -> Any:
    """Return an outcome in the form of the plain evaluation."""
    match value:
        case {
            "failed": {"code": "BROKEN" | "SUBWORKFLOW_FAILED" | "MEMBERS_FAILED" | "RESULT_NOT_AVAILABLE"}
        }:
            return "FAILED"
        case {"failed": {"code": "UPSTREAM_SKIPPED" | "MEMBERS_SKIPPED"}}:
            return "SKIPPED"
        case list():
            return [plain_outcome(each) for each in value]
        case _:
            return value


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 100))]
)
def test_random_workflows_end_like_a_plain_evaluation_of_their_graphs(
    db: StoreHarness, seed: int
) -> None:  # W1, W5, I21, I22
    random = Random(seed)
    plain = random_nodes(random, count=random.randrange(1, 15))
    ends = Ends()
    expected = ends.workflow(plain)
    tasks = leaves(plain)
    graph = graph_of(plain)
    flow = Flow.start(db, graph.nodes, graph.edges, output=graph.output)
    flow.settle_down()
    seen: dict[str, Any] = {}
    while claimed := flow.claim(random.randrange(1, 6)):
        names = flow.names()
        for each in claimed:
            assert names[each.id] not in seen, "a node ran twice"
            seen[names[each.id]] = each.args
        random.shuffle(claimed)
        middle = random.randrange(len(claimed) + 1)
        for part in (claimed[:middle], claimed[middle:]):
            flow.end(part, lambda name: ValueError("no") if tasks[name]["fails"] else tasks[name]["value"])
            if random.random() < 0.5:
                flow.step()
        flow.settle_down()
    found = db.table("nodes", "name, state")
    assert dict(found) == ends.states
    assert flow.state == expected
    assert seen.keys() == ends.called_with.keys()
    for name, args in seen.items():
        given = json.loads(args).get("given", {})
        assert {key: plain_outcome(value) for key, value in given.items()} == ends.called_with[name], name
    assert db.table("outbox") == []
    assert flow.stuck() == []
