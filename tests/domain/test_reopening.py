"""Which nodes a retry of a workflow reopens, compared on random graphs with a plain closure."""

from __future__ import annotations

from random import Random

import pytest

from everbeat.domain.workflow.states import EndedNode, plan_retry

STATES = ["COMPLETED", "COMPLETED", "FAILED", "SKIPPED", "CANCELLED", "EXPIRED"]


def drawn(random: Random, count: int) -> tuple[list[EndedNode], list[tuple[int, int]]]:
    nodes: list[EndedNode] = []
    for number in range(count):
        state = random.choice(STATES)
        nodes.append(
            EndedNode(
                number=number, name=f"n{number}", kind="task", state=state, follows=random.random() < 0.5
            )
        )
    edges = [(parent, child) for child in range(count) for parent in range(child) if random.random() < 0.2]
    return nodes, edges


def reached(edges: list[tuple[int, int]], seeds: set[int], stops: set[int]) -> set[int]:
    """Return every node behind a seed, by repetition until no node is new; nodes in `stops` are not entered."""
    found = set(seeds)
    while more := {child for parent, child in edges if parent in found and child not in found | stops}:
        found |= more
    return found


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_a_retry_reopens_or_names_everything_downstream_of_a_reopened_node(
    seed: int, keep: bool
) -> None:  # J7
    random = Random(seed)
    nodes, edges = drawn(random, random.randrange(1, 25))
    first = {random.randrange(len(nodes))} if random.random() < 0.3 else set[int]()
    plan = plan_retry(nodes, edges, keep=keep, first=first)
    completed = {node.number for node in nodes if node.state == "COMPLETED"}
    seeds = first | {
        node.number
        for node in nodes
        if node.state in ("FAILED", "CANCELLED", "EXPIRED") or (node.state == "SKIPPED" and not node.follows)
    }
    stops = completed - first if keep else set[int]()
    assert set(plan.again) == reached(edges, seeds, stops)
    assert plan.states == dict.fromkeys(plan.again, "PENDING")
    assert set(plan.completed) == completed & set(plan.again)
    behind = {child for parent, child in edges if parent in plan.again}
    assert behind <= {*plan.again, *plan.kept}
    assert keep or not plan.kept
    assert not {*plan.again} & {*plan.kept}


def test_a_retry_rebuilds_a_map_whose_list_changes_and_continues_one_with_a_failed_member() -> None:
    nodes = [
        EndedNode(number=0, name="list", kind="task", state="COMPLETED"),
        EndedNode(number=1, name="each", kind="map", state="FAILED", has_members=True, makes_members=True),
        EndedNode(number=2, name="sum", kind="task", state="SKIPPED", follows=True),
        EndedNode(number=3, name="each[0]", kind="task", state="COMPLETED", member_of=1),
        EndedNode(number=4, name="each[1]", kind="task", state="FAILED", member_of=1),
    ]
    edges = [(0, 1), (1, 2)]
    assert plan_retry(nodes, edges).states == {1: "ENQUEUED", 2: "PENDING", 4: "PENDING"}
    anew = plan_retry(nodes, edges, first=[0])
    assert (anew.states, anew.emptied) == ({0: "PENDING", 1: "PENDING", 2: "PENDING"}, {1})
    assert anew.completed == [0, 3]
    only = plan_retry(nodes, edges, first=[3])
    assert only.states == {1: "ENQUEUED", 2: "PENDING", 3: "PENDING", 4: "PENDING"}
    assert not only.emptied


def test_a_retry_keeps_and_names_nodes_that_are_under_way() -> None:
    nodes = [
        EndedNode(number=0, name="bad", kind="task", state="FAILED"),
        EndedNode(number=1, name="told", kind="task", state="ENQUEUED"),
        EndedNode(number=2, name="next", kind="task", state="PENDING"),
        EndedNode(number=3, name="ready", kind="task", state="READY"),
    ]
    plan = plan_retry(nodes, [(0, 1), (1, 2), (0, 3)])
    assert (plan.states, plan.again, plan.kept) == ({0: "PENDING", 3: "PENDING"}, [0], [1])
