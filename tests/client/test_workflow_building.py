"""Test how a workflow becomes a stored graph: its nodes, their arguments and options, and their dependencies."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from everbeat import App, Workflow
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.workflow.graph import Edge, Graph, GraphNode, Hole, decode_graph, encode
from everbeat.errors import PayloadError
from everbeat.workflows import outcomes, results
from tests.client.workflow_app import (
    Order,
    Payment,
    app,
    charge,
    flags,
    is_open,
    list_orders,
    pack,
    report,
    ship,
    total,
    welcome,
)


@pytest.fixture
def wf() -> Workflow:
    return app.workflow("order")


def edges_into(graph: Graph, name: str) -> list[Edge]:
    child = [node.name for node in graph.nodes].index(name)
    return [edge for edge in graph.edges if edge.child == child]


def node_of(graph: Graph, name: str) -> GraphNode:
    return next(node for node in graph.nodes if node.name == name)


class TestArguments:
    def test_a_node_stores_known_arguments_as_a_send_does(self, wf: Workflow) -> None:
        wf.add(charge, Order(7))
        (node,) = wf.graph().nodes
        assert (node.kind, node.args, node.template) == ("task", '{"order":{"id":7}}', None)
        assert node.args == charge.call(Order(7)).payload.decode()

    def test_a_result_argument_becomes_a_hole_and_an_edge_that_must_succeed(self, wf: Workflow) -> None:
        wf.add(pack, wf.add(charge, Order(1)).result, fragile=True)
        graph = wf.graph()
        assert graph.nodes[1].template == ('{"payment":', Hole(0), ',"fragile":true}')
        assert graph.edges == (Edge(0, 1),)

    def test_a_part_of_a_result_becomes_a_hole_with_a_path(self, wf: Workflow) -> None:
        wf.add(ship, "x", wf.add(charge, Order(1)).result.amount)
        assert wf.graph().nodes[1].template == ('{"label":"x","weight":', Hole(0, "value", ("amount",)), "}")

    def test_an_outcome_argument_becomes_an_edge_that_tolerates_failure(self, wf: Workflow) -> None:
        wf.add(report, wf.add(charge, Order(1)).outcome)
        graph = wf.graph()
        assert graph.nodes[1].template == ('{"paid":', Hole(0, "outcome"), "}")
        assert graph.edges == (Edge(0, 1, tolerates=True),)

    def test_several_edges_between_two_nodes_become_the_strictest_one(self, wf: Workflow) -> None:
        paid = wf.add(charge, Order(1))
        wf.add(report, paid.outcome, [paid.outcome]).named("tolerant")
        wf.add(report, paid.outcome).after(paid).named("strict")
        wf.add(ship, "x", paid.result.amount).after(paid, paid).named("twice")
        graph = wf.graph()
        assert edges_into(graph, "tolerant") == [Edge(0, 1, tolerates=True)]
        assert edges_into(graph, "strict") == [Edge(0, 2)]
        assert edges_into(graph, "twice") == [Edge(0, 3)]

    def test_lists_of_results_and_outcomes_become_holes_and_edges(self, wf: Workflow) -> None:
        paid = [wf.add(charge, Order(number)) for number in range(2)]
        wf.add(total, results(paid))
        wf.add(report, paid[0].outcome, outcomes(paid))
        graph = wf.graph()
        assert graph.nodes[2].template == ('{"payments":[', Hole(0), ",", Hole(1), "]}")
        assert edges_into(graph, "report") == [Edge(0, 3, tolerates=True), Edge(1, 3, tolerates=True)]


class TestOptions:
    def test_a_node_stores_the_options_of_its_task(self, wf: Workflow) -> None:  # W8
        until = datetime(2031, 1, 1, tzinfo=UTC)
        wf.add(pack.with_options(good_until=until, serial="c-1", priority=9), wf.add(charge, Order(1)).result)
        spec = wf.graph().nodes[1].task
        assert spec is not None
        assert (spec.name, spec.queue, spec.priority) == ("pack", "mail", 9)
        assert (spec.serial, spec.flags) == ("key:c-1", '{"resilient":true}')
        assert datetime.fromisoformat(spec.good_until or "") == until
        policy = StoredPolicy.from_json(spec.policy)
        assert (policy.timeout_ms, policy.retry_for) == (30_000, ("X",))

    def test_a_node_in_a_serial_queue_stores_its_serial_line(self, wf: Workflow) -> None:  # W8
        wf.add(charge.with_options(queue="line", timeout="5s"), Order(1))
        spec = wf.graph().nodes[0].task
        assert spec is not None
        assert (spec.queue, spec.serial) == ("line", "queue:line")
        assert StoredPolicy.from_json(spec.policy).timeout_ms == 5_000

    def test_a_node_of_a_task_without_options_stores_no_options(self, wf: Workflow) -> None:
        wf.add(charge, Order(1))
        spec = wf.graph().nodes[0].task
        assert spec is not None
        assert (spec.policy, spec.flags, spec.good_until, spec.serial, spec.priority) == (
            None,
            None,
            None,
            None,
            0,
        )


class TestWaiting:
    def test_after_adds_an_edge_that_must_succeed(self, wf: Workflow) -> None:
        first, second = wf.add(is_open), wf.add(is_open)
        wf.add(charge, Order(1)).after(first, second)
        assert wf.graph().edges == (Edge(0, 2), Edge(1, 2))

    @pytest.mark.parametrize(("join", "quorum"), [("any", 1), (1, 1), (2, 2)])
    def test_a_join_stores_its_quorum_and_its_edges(self, wf: Workflow, join: Any, quorum: int) -> None:
        first, second, third = wf.add(is_open), wf.add(is_open), wf.add(is_open)
        wf.add(charge, Order(1)).after(first, second, join=join).after(third)
        graph = wf.graph()
        assert graph.nodes[3].quorum == quorum
        assert graph.edges == (Edge(2, 3), Edge(0, 3, joins=True), Edge(1, 3, joins=True))

    def test_a_parent_can_be_an_argument_and_a_member_of_a_join(self, wf: Workflow) -> None:
        first, second = wf.add(charge, Order(1)), wf.add(is_open)
        wf.add(report, first.outcome).after(first, second, join="any")
        assert wf.graph().edges == (
            Edge(0, 2, tolerates=True),
            Edge(0, 2, joins=True),
            Edge(1, 2, joins=True),
        )

    def test_allow_failed_applies_to_order_and_joins_but_not_to_results(self, wf: Workflow) -> None:
        first, second = wf.add(charge, Order(1)), wf.add(is_open)
        third = wf.add(charge, Order(2))
        wf.add(ship, "x", third.result.amount).after(first).after(second, join=1).allow_failed()
        assert edges_into(wf.graph(), "ship") == [
            Edge(2, 3),
            Edge(0, 3, tolerates=True),
            Edge(1, 3, tolerates=True, joins=True),
        ]

    def test_each_condition_becomes_its_own_edge(self, wf: Workflow) -> None:
        opened, paid = wf.add(is_open), wf.add(charge, Order(1))
        wf.add(ship, "x", paid.result.amount).when(paid.result.is_paid).unless(opened.result).after(opened)
        assert edges_into(wf.graph(), "ship") == [
            Edge(1, 2),
            Edge(0, 2),
            Edge(1, 2, path=("is_paid",), expects=True),
            Edge(0, 2, path=(), expects=False),
        ]

    def test_a_repeated_condition_is_stored_once(self, wf: Workflow) -> None:
        opened = wf.add(is_open)
        wf.add(charge, Order(1)).when(opened.result).when(opened.result)
        assert wf.graph().edges == (Edge(0, 1, path=(), expects=True),)


class TestNames:
    def test_nodes_get_the_names_of_their_tasks_with_a_number(self, wf: Workflow) -> None:
        for number in range(3):
            wf.add(charge, Order(number))
        wf.add(welcome, 1)
        assert [node.name for node in wf.graph().nodes] == ["charge", "charge#2", "charge#3", "welcome-"]

    def test_a_name_given_later_replaces_a_generated_one(self, wf: Workflow) -> None:
        first, second = wf.add(charge, Order(1)), wf.add(charge, Order(2))
        second.named("charge")
        assert [node.name for node in wf.graph().nodes] == ["charge#2", "charge"]
        assert (first.name, second.name) == ("charge#2", "charge")
        assert repr(second) == "<Node 'charge' of workflow 'order'>"

    def test_node_names_of_tasks_with_the_longest_names_are_valid(self) -> None:
        other = App("postgresql://nobody@nowhere.invalid/none")

        @other.task(name="x" * 200)
        def long() -> None: ...

        wf = other.workflow("order")
        wf.add(long)
        wf.add(long)
        assert all(len(node.name) <= 128 for node in wf.graph().nodes)


class TestGraph:
    def test_a_graph_has_the_name_the_error_mode_the_output_and_the_success_cases(self) -> None:
        wf = app.workflow("order", on_error="continue")
        first, second = wf.add(is_open), wf.add(is_open)
        wf.succeeds_when(first)
        wf.succeeds_when(first, second)
        graph = wf.graph(second)
        assert (graph.name, graph.on_error, graph.output) == ("order", "continue", 1)
        assert graph.success == ((0,), (0, 1))
        assert decode_graph(encode(graph)) == graph

    def test_a_workflow_can_return_its_graph_repeatedly_and_grow(self, wf: Workflow) -> None:
        wf.add(is_open)
        before = wf.graph()
        assert wf.graph() == before
        wf.add(is_open)
        assert len(before.nodes) == 1
        assert len(wf.graph().nodes) == 2

    def test_a_node_decodes_results_with_the_type_of_its_task(self, wf: Workflow) -> None:
        paid = wf.add(charge, Order(1))
        assert paid.read_result('{"amount":3}') == Payment(3)
        assert wf.map(charge, [Order(1)]).read_result('[{"amount":3}]') == [Payment(3)]
        assert wf.map(charge, wf.add(list_orders).result).read_result("[]") == []
        with pytest.raises(PayloadError):
            paid.read_result("3")

    def test_each_call_of_workflow_returns_a_new_workflow(self) -> None:
        app.workflow("order").add(is_open)
        assert repr(app.workflow("order")) == "<Workflow 'order', 0 nodes>"

    def test_an_item_of_a_tuple_result_can_be_an_argument(self, wf: Workflow) -> None:
        both = wf.add(flags)
        wf.add(pack, wf.add(charge, Order(1)).result, both.result[1])
        template = wf.graph().nodes[2].template
        assert template is not None
        assert Hole(0, "value", (1,)) in template
