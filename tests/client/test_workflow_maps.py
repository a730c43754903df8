"""Test maps: one node for each item of a list that is known when the workflow is built or when it runs."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat import Workflow
from everbeat.domain.workflow.graph import ITEM, Edge, Hole, Known, fill
from everbeat.errors import ConfigurationError, NoSuchPart, PayloadError, PlaceholderUsed
from everbeat.workflows import results
from tests.client.workflow_app import (
    Order,
    Payment,
    anything,
    app,
    charge,
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
    return app.workflow("orders")


class TestKnownItems:
    def test_a_map_node_comes_before_its_members_in_the_graph(self, wf: Workflow) -> None:
        wf.add(is_open)
        mapped = wf.map(welcome, (1, 2), locale="de")
        graph = wf.graph(mapped)
        _, whole, *members = graph.nodes
        assert (whole.kind, whole.first_member, whole.members, whole.task) == ("map", 2, 2, None)
        assert (whole.args, whole.template, whole.items) == (None, None, None)
        assert [member.args for member in members] == [
            '{"user_id":1,"locale":"de"}',
            '{"user_id":2,"locale":"de"}',
        ]
        assert [(member.member_of, member.name) for member in members] == [
            (1, "welcome-[0]"),
            (1, "welcome-[1]"),
        ]
        assert graph.edges == ()
        assert graph.output == 1

    def test_the_list_of_results_of_a_map_needs_one_edge(self, wf: Workflow) -> None:
        mapped = wf.map(charge, [Order(1), Order(2)])
        wf.add(total, mapped.results)
        wf.add(report, mapped[1].outcome, mapped.outcomes)
        graph = wf.graph()
        assert graph.nodes[3].template == ('{"payments":', Hole(0), "}")
        assert graph.edges == (Edge(0, 3), Edge(2, 4, tolerates=True), Edge(0, 4, tolerates=True))
        assert results(mapped).__class__ is mapped.results.__class__

    def test_members_of_a_map_are_ordinary_nodes(self, wf: Workflow) -> None:
        mapped = wf.map(charge, [Order(1), Order(2)])
        first, second = mapped
        assert len(mapped) == 2
        assert (first.name, second.name, mapped[1].name) == ("charge[0]", "charge[1]", "charge[1]")
        wf.add(pack, first.result).after(*mapped, join="any")
        assert wf.graph().edges == (Edge(1, 3), Edge(1, 3, joins=True), Edge(2, 3, joins=True))

    def test_options_of_a_map_of_known_items_apply_to_each_member(self, wf: Workflow) -> None:
        opened, other = wf.add(is_open), wf.add(is_open)
        mapped = wf.map(charge, [Order(1), Order(2)]).named("all").when(opened.result)
        mapped.after(other).allow_failed().after(opened, other, join=2)
        graph = wf.graph()
        assert [node.name for node in graph.nodes][2:] == ["all", "all[0]", "all[1]"]
        assert [node.quorum for node in graph.nodes] == [None, None, None, 2, 2]
        for member in (3, 4):
            assert [edge for edge in graph.edges if edge.child == member] == [
                Edge(1, member, tolerates=True),
                Edge(0, member, tolerates=True, joins=True),
                Edge(1, member, tolerates=True, joins=True),
                Edge(0, member, path=(), expects=True),
            ]
        assert not [edge for edge in graph.edges if edge.child == 2]

    def test_items_and_shared_arguments_of_a_map_can_be_results(self, wf: Workflow) -> None:
        paid, label = wf.add(charge, Order(1)), wf.add(anything)
        wf.map(pack, [paid.result, Payment(2)], label.result)
        graph = wf.graph()
        assert graph.nodes[3].template == ('{"payment":', Hole(0), ',"fragile":', Hole(1), "}")
        assert graph.edges == (Edge(0, 3), Edge(1, 3), Edge(1, 4))

    def test_a_map_of_an_empty_list_is_one_node(self, wf: Workflow) -> None:
        mapped = wf.map(charge, [])
        wf.add(total, mapped.results)
        graph = wf.graph()
        assert (graph.nodes[0].members, graph.nodes[0].items) == (None, ("[]",))
        assert graph.edges == (Edge(0, 1),)
        assert (list(mapped), len(mapped)) == ([], 0)

    def test_a_map_of_an_empty_list_waits_for_the_dependencies_of_its_members(self, wf: Workflow) -> None:
        opened, label = wf.add(is_open), wf.add(anything)
        wf.map(pack, [], label.result).when(opened.result).after(label, opened, join="any")
        graph = wf.graph()
        assert set(graph.edges) == {
            Edge(1, 2),
            Edge(0, 2, path=(), expects=True),
            Edge(1, 2, joins=True),
            Edge(0, 2, joins=True),
        }
        assert graph.nodes[2].quorum == 1

    def test_shared_arguments_of_a_map_of_an_empty_list_are_checked(self, wf: Workflow) -> None:
        with pytest.raises(PayloadError, match="weight"):
            wf.map(ship, [], "heavy")  # type: ignore[arg-type]

    def test_a_map_of_a_thousand_items_is_collected_with_one_edge(self, wf: Workflow) -> None:
        wf.add(total, wf.map(charge, [Order(number) for number in range(1_000)]).results)
        graph = wf.graph()
        assert len(graph.nodes) == 1_002
        assert len(graph.edges) == 1

    def test_a_map_names_the_item_that_does_not_fit(self, wf: Workflow) -> None:
        with pytest.raises(PayloadError, match="Item 1 of the map: Argument 'order' = 5 of task 'charge'"):
            wf.map(charge, [Order(1), 5])  # type: ignore[list-item]
        with pytest.raises(ConfigurationError, match="has no nodes"):
            wf.graph()

    @pytest.mark.parametrize("items", ["abc", b"x", {"a": 1}, 5, None, charge])
    def test_a_map_of_an_object_without_items_is_refused(self, wf: Workflow, items: Any) -> None:
        with pytest.raises(ConfigurationError, match="must be a list of items"):
            wf.map(welcome, items)

    def test_a_map_of_a_node_instead_of_its_result_is_refused(self, wf: Workflow) -> None:
        with pytest.raises(ConfigurationError, match=r"pass its \.result"):
            wf.map(charge, wf.add(list_orders))  # type: ignore[arg-type]

    def test_an_item_of_the_results_of_a_map_is_refused_and_its_node_suggested(self, wf: Workflow) -> None:
        mapped = wf.map(charge, [Order(1)])
        with pytest.raises(NoSuchPart, match=r"nodes\[0\].result"):
            mapped.results[0]


class TestItemsOfANode:
    def test_a_map_of_a_result_is_one_node_with_a_template_of_its_members(self, wf: Workflow) -> None:
        orders = wf.add(list_orders)
        opened = wf.add(anything)
        mapped = wf.map(pack, wf.map(charge, orders.result).results, fragile=opened.result)
        wf.add(anything, mapped.results)
        graph = wf.graph()
        _, _, charged, packed, _ = graph.nodes
        assert (charged.kind, charged.members, charged.first_member) == ("map", None, None)
        assert charged.items == (Hole(0),)
        assert charged.template == ('{"order":', Hole(ITEM), "}")
        assert charged.task is not None
        assert charged.task.name == "charge"
        assert packed.items == (Hole(2),)
        assert packed.template == ('{"payment":', Hole(ITEM), ',"fragile":', Hole(1), "}")
        assert graph.edges == (Edge(0, 2), Edge(2, 3), Edge(1, 3), Edge(3, 4))

    def test_a_filled_template_of_a_map_decodes_to_the_arguments_of_the_task(self, wf: Workflow) -> None:
        wf.map(charge, wf.add(list_orders).result)
        template = wf.graph().nodes[1].template
        assert template is not None
        filled = fill(template, {ITEM: Known("COMPLETED", result='{"id":4}')})
        assert charge._definition.codec.decode(filled) == ((Order(4),), {})

    def test_outcomes_can_be_the_items_of_a_map(self, wf: Workflow) -> None:
        wf.map(report, wf.map(charge, [Order(1)]).outcomes)
        graph = wf.graph()
        assert graph.nodes[2].items == (Hole(0, "outcome"),)
        assert graph.edges == (Edge(0, 2, tolerates=True),)

    def test_options_of_a_map_of_a_result_apply_to_the_map_node(self, wf: Workflow) -> None:
        opened = wf.add(is_open)
        wf.map(charge, wf.add(list_orders).result).after(opened).when(opened.result).named("all")
        graph = wf.graph()
        assert graph.nodes[2].name == "all"
        assert graph.edges == (Edge(1, 2), Edge(0, 2), Edge(0, 2, path=(), expects=True))

    def test_members_of_a_map_of_a_result_cannot_be_accessed(self, wf: Workflow) -> None:
        mapped = wf.map(charge, wf.add(list_orders).result)
        for use in (len, list, lambda it: it[0]):
            with pytest.raises(PlaceholderUsed, match="Nodes 'charge' of workflow 'orders'"):
                use(mapped)  # type: ignore[operator]

    def test_a_map_of_a_result_with_items_of_the_wrong_type_is_refused(self, wf: Workflow) -> None:
        wf.map(ship, wf.add(list_orders).result)
        with pytest.raises(
            ConfigurationError,
            match=r"argument 'label' of node 'ship' = <value of an item of <result of node",
        ):
            wf.graph()

    def test_a_map_of_a_result_that_is_not_a_list_is_refused(self, wf: Workflow) -> None:
        wf.map(pack, wf.add(charge, Order(1)).result)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="is Payment, and only a list has items"):
            wf.graph()

    def test_a_map_of_a_result_of_unknown_type_is_accepted(self, wf: Workflow) -> None:
        wf.map(pack, wf.add(anything).result)
        assert wf.graph().nodes[1].items == (Hole(0),)
