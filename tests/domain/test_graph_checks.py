"""All problems of a graph are found at once, and a valid graph has none."""

from __future__ import annotations

import pytest

from everbeat.domain.workflow.graph import (
    DEEPEST,
    ITEM,
    Edge,
    Graph,
    GraphNode,
    Hole,
    TaskSpec,
    depth,
    is_node_name,
    problems_of,
)

TASK = TaskSpec(name="pay", queue="default")


def nodes(*names: str) -> tuple[GraphNode, ...]:
    return tuple(GraphNode(name=name, task=TASK, args="{}") for name in names)


def graph(*names: str, edges: tuple[Edge, ...] = (), **facts: object) -> Graph:
    return Graph(name="order", nodes=nodes(*names), edges=edges, **facts)  # type: ignore[arg-type]


def codes(checked: Graph, **options: int) -> list[str]:
    return [problem.code for problem in problems_of(checked, **options)]  # type: ignore[arg-type]


def test_a_valid_graph_has_no_problems() -> None:
    edges = (Edge(0, 1), Edge(0, 2), Edge(1, 3, joins=True), Edge(2, 3, joins=True))
    parts = (*nodes("a", "b", "c"), GraphNode(name="d", task=TASK, quorum=2, template=("{", Hole(0), "}")))
    assert problems_of(Graph(name="order", nodes=parts, edges=edges, output=3, success=((1, 2),))) == []


def test_an_empty_graph_is_rejected() -> None:
    (problem,) = problems_of(graph())
    assert (problem.code, problem.subject) == ("EMPTY", "workflow 'order'")


@pytest.mark.parametrize(
    ("edges", "path"),
    [
        ([(0, 0)], "a -> a"),
        ([(0, 1), (1, 2), (2, 0)], "a -> b -> c -> a"),
        ([(0, 1), (1, 2), (2, 3), (3, 1)], "b -> c -> d -> b"),
        ([(3, 2), (2, 3)], "c -> d -> c"),
    ],
)
def test_the_problem_of_a_cycle_names_its_nodes_in_order(edges: list[tuple[int, int]], path: str) -> None:
    found = problems_of(
        graph("a", "b", "c", "d", edges=tuple(Edge(*edge) for edge in edges)), places={0: "a.py:1"}
    )
    assert [(problem.code, problem.value) for problem in found] == [("CYCLE", path)]


def test_a_diamond_is_accepted_and_a_long_chain_is_checked_for_cycles() -> None:
    many = [f"n{number}" for number in range(5_000)]
    chain = tuple(Edge(number, number + 1) for number in range(4_999))
    assert codes(graph(*many, edges=chain)) == []
    assert codes(graph(*many, edges=(*chain, Edge(4_999, 0)))) == ["CYCLE"]
    diamond = (Edge(0, 1), Edge(0, 2), Edge(1, 3), Edge(2, 3))
    assert codes(graph("a", "b", "c", "d", edges=diamond)) == []


def test_a_map_member_that_waits_for_its_own_map_is_a_cycle() -> None:
    whole = GraphNode(name="m", kind="map", first_member=1, members=1)
    member = GraphNode(name="m[0]", task=TASK, args="{}", member_of=0)
    assert codes(Graph(name="order", nodes=(whole, member))) == []
    (problem,) = problems_of(Graph(name="order", nodes=(whole, member), edges=(Edge(0, 1),)))
    assert problem.value == "m -> m[0] -> m"


def test_each_duplicate_node_name_is_reported_once() -> None:
    found = problems_of(graph("a", "b", "a", "a", "b"), places={0: "f.py:1", 1: "f.py:2"})
    assert [(problem.code, problem.value, problem.rule, problem.where) for problem in found] == [
        ("DUPLICATE", "'a'", "is the name of 3 nodes", "f.py:1"),
        ("DUPLICATE", "'b'", "is the name of 2 nodes", "f.py:2"),
    ]


@pytest.mark.parametrize(
    ("quorum", "is_possible"), [(1, True), (2, True), (0, False), (3, False), (-1, False), (None, False)]
)
def test_a_quorum_must_be_between_one_and_the_number_of_joining_parents(
    quorum: int | None, is_possible: bool
) -> None:
    parts = (*nodes("a", "b", "c"), GraphNode(name="d", task=TASK, args="{}", quorum=quorum))
    edges = (Edge(0, 3, joins=True), Edge(1, 3, joins=True), Edge(2, 3))
    found = codes(Graph(name="order", nodes=parts, edges=edges))
    assert found == ([] if is_possible else ["IMPOSSIBLE_QUORUM"])


@pytest.mark.parametrize(
    "wrong",
    [
        graph("a", edges=(Edge(0, 1),)),
        graph("a", edges=(Edge(-1, 0),)),
        graph("a", output=1),
        graph("a", success=((0, 5),)),
        Graph(name="order", nodes=(GraphNode(name="a", task=TASK, template=("{", Hole(1), "}")),)),
        Graph(name="order", nodes=(GraphNode(name="a", task=TASK, template=("{", Hole(ITEM), "}")),)),
        Graph(name="order", nodes=(GraphNode(name="a", kind="map", task=TASK, items=(Hole(7),)),)),
    ],
)
def test_references_to_missing_nodes_are_rejected(wrong: Graph) -> None:
    assert set(codes(wrong)) == {"UNKNOWN_NODE"}


def test_a_graph_above_the_size_limit_is_rejected() -> None:
    large = Graph(name="order", nodes=(GraphNode(name="a", task=TASK, args='"' + "x" * 5_000 + '"'),))
    assert codes(large, largest=4_000) == ["TOO_LARGE"]
    assert codes(large, largest=6_000) == []


def test_the_depth_of_nested_workflows_is_limited() -> None:
    inner = graph("a")
    for _ in range(DEEPEST - 1):
        inner = Graph(name="order", nodes=(GraphNode(name="w", kind="workflow", graph=inner),))
    assert depth(inner) == DEEPEST
    assert codes(inner) == []
    assert codes(Graph(name="order", nodes=(GraphNode(name="w", kind="workflow", graph=inner),))) == [
        "TOO_DEEP"
    ]


def test_all_problems_of_a_graph_are_reported_at_once() -> None:
    parts = (*nodes("a", "a"), GraphNode(name="b", task=TASK, args="{}", quorum=4))
    edges = (Edge(0, 1), Edge(1, 0), Edge(0, 2, joins=True))
    wrong = Graph(name="order", nodes=parts, edges=edges)
    assert sorted(codes(wrong, largest=10)) == ["CYCLE", "DUPLICATE", "IMPOSSIBLE_QUORUM", "TOO_LARGE"]


@pytest.mark.parametrize("name", ["a", "pay:eu", "A_b-c.9", "x" * 128])
def test_valid_node_names_are_accepted(name: str) -> None:
    assert is_node_name(name)


@pytest.mark.parametrize("name", ["", "a b", "a[0]", "a#2", "é", "x" * 129, 5, None, "a\n"])
def test_invalid_node_names_are_rejected(name: object) -> None:
    assert not is_node_name(name)
