"""A defined workflow is built from its arguments, by itself or as one node of another."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat import App, ConfigurationError, Node, PayloadError, RegistrationError, Workflow
from everbeat.client.workflow import WorkflowDefinition
from everbeat.domain.graph import INPUT, Edge, Graph, Hole, Known, fill
from everbeat.domain.graph_checks import DEEPEST
from everbeat.domain.outcome import TaskResult
from tests.client.workflow_app import (
    Order,
    Payment,
    app,
    charge,
    is_open,
    list_orders,
    pack,
    report,
    ship,
    total,
)

seen: list[Any] = []


@app.define_workflow("parcel", on_error="pause")
def parcel(wf: Workflow, order: Order, label: str = "x", *, weights: list[int] | None = None) -> Node[str]:
    """Packs one order."""
    seen[:] = [order, label, weights]
    paid = wf.add(charge, order)
    wf.add(ship, label, paid.result.amount)
    return wf.add(pack, paid.result)


@app.define_workflow("silent")
def silent(wf: Workflow) -> None:
    wf.add(is_open)


@app.define_workflow("judged")
def judged(wf: Workflow, paid: TaskResult[Payment], orders: list[Order]) -> Node[str]:
    wf.map(charge, orders)
    return wf.add(report, paid)


@app.define_workflow("endless")
def endless(wf: Workflow) -> None:
    wf.add(between)


@app.define_workflow("between")
def between(wf: Workflow) -> None:
    wf.add(endless)


def child_of(graph: Graph, number: int) -> Graph:
    child = graph.nodes[number].graph
    assert child is not None
    return child


class TestBuild:
    def test_the_function_gets_the_arguments_and_gives_the_output(self) -> None:
        graph = parcel.build(Order(3), weights=[1])
        assert seen == [Order(3), "x", [1]]
        assert (graph.name, graph.on_error, graph.output) == ("parcel", "pause", 2)
        assert [node.name for node in graph.nodes] == ["charge", "ship", "pack"]
        assert graph.nodes[0].args == '{"order":{"id":3}}'

    def test_without_a_returned_node_there_is_no_output(self) -> None:
        assert silent.build().output is None

    def test_each_build_is_of_its_own(self) -> None:
        assert parcel.build(Order(1)) == parcel.build(Order(1))
        assert parcel.build(Order(1)) != parcel.build(Order(2))

    def test_it_shows_what_it_was_made_of(self) -> None:
        assert repr(parcel) == "<WorkflowDefinition 'parcel'>"
        assert parcel.__doc__ == "Packs one order."
        assert app.workflows["parcel"] is parcel

    @pytest.mark.parametrize(
        ("args", "kwargs", "says"),
        [
            ((5,), {}, r"Argument 'order' = 5 of workflow 'parcel' does not fit.*call it as parcel\("),
            ((), {}, "Workflow 'parcel' cannot be called like this: missing a required argument: 'order'"),
            ((Order(1),), {"lable": "y"}, "did you mean 'label'"),
            ((Order(1),), {"weights": ["x"]}, r"at weights\[0\]"),
        ],
    )
    def test_arguments_that_do_not_fit_are_refused(self, args: Any, kwargs: Any, says: str) -> None:
        for call in (parcel.build, lambda *a, **k: app.workflow("outer").add(parcel, *a, **k)):
            with pytest.raises(PayloadError, match=says):
                call(*args, **kwargs)

    def test_results_of_nodes_are_of_no_use_outside_their_workflow(self) -> None:
        wf = app.workflow("other")
        with pytest.raises(PayloadError, match="known in its own workflow only"):
            parcel.build(Order(1), weights=[wf.add(total, []).result])


class TestWithinAnother:
    def test_it_is_one_node_with_the_graph_of_the_child(self) -> None:
        wf = app.workflow("outer")
        packed = wf.add(parcel, Order(3)).named("inner")
        wf.add(ship, packed.result)
        graph = wf.graph()
        assert packed.read_result('"x"') == "x"
        (node, shipped) = graph.nodes
        assert (node.kind, node.name, node.task, node.template) == ("workflow", "inner", None, None)
        assert node.args == '{"order":{"id":3}}'
        assert child_of(graph, 0) == parcel.build(Order(3))
        assert shipped.template == ('{"label":', Hole(0), "}")

    def test_placeholders_reach_the_function_as_its_input(self) -> None:
        wf = app.workflow("outer")
        orders, number = wf.add(list_orders), wf.add(total, [])
        wf.add(parcel, orders.result[0], weights=[number.result, 4]).after(number)
        graph = wf.graph()
        assert graph.nodes[2].template == (
            '{"order":',
            Hole(0, "value", (0,)),
            ',"weights":[',
            Hole(1),
            ",4]}",
        )
        assert graph.nodes[2].args is None
        assert graph.edges == (Edge(0, 2), Edge(1, 2))
        assert seen[1] == "x"
        assert repr(seen[0]) == "<value of parameter 'order' of workflow 'parcel'>"
        child = child_of(graph, 2)
        assert child.nodes[0].template == ('{"order":', Hole(INPUT, "value", ("order",)), "}")
        assert child.edges == (Edge(0, 1), Edge(0, 2))

    def test_what_is_filled_in_is_what_the_nodes_within_take(self) -> None:
        wf = app.workflow("outer")
        wf.add(judged, wf.add(charge, Order(1)).outcome, wf.add(list_orders).result)
        graph = wf.graph()
        assert graph.edges == (Edge(0, 2, tolerates=True), Edge(1, 2))
        template = graph.nodes[2].template
        assert template is not None
        known = {0: Known("COMPLETED", '{"amount":1}'), 1: Known("COMPLETED", '[{"id":1}]')}
        given = {INPUT: Known("COMPLETED", fill(template, known))}
        mapped, told = child_of(graph, 2).nodes
        assert mapped.items is not None
        assert fill(mapped.items, given) == '[{"id":1}]'
        assert told.template is not None
        (paid,), _ = report.definition.codec.decode(fill(told.template, given))
        assert paid.value == Payment(1)

    def test_its_result_has_the_type_of_its_output(self) -> None:
        wf = app.workflow("outer")
        wf.add(total, [wf.add(parcel, Order(1)).result])  # type: ignore[list-item]
        wf.add(ship, wf.add(silent).result)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            wf.graph()
        assert [problem.rule for problem in caught.value.problems] == [
            "is str, and Payment is wanted",
            "is None, and str is wanted",
        ]

    def test_arguments_are_checked_against_their_annotations(self) -> None:
        wf = app.workflow("outer")
        wf.add(parcel, wf.add(charge, Order(1)).result)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigurationError, match=r"argument 'order' of node 'parcel'.*is Payment, and Order"
        ):
            wf.graph()

    def test_what_is_wrong_within_is_told_with_the_rest(self) -> None:
        other = App("postgresql://nobody@nowhere.invalid/none")

        @other.define_workflow("wrong")
        def wrong(wf: Workflow) -> None:
            wf.add(charge, Order(1)).named("a b")
            wf.add(charge, outside.result)  # type: ignore[arg-type]

        wf = other.workflow("outer")
        outside = wf.add(list_orders)
        wf.add(wrong).after(outside, join=3)
        with pytest.raises(ConfigurationError) as caught:
            wf.graph()
        found = [(problem.code, problem.subject) for problem in caught.value.problems]
        assert found == [
            ("WRONG_NAME", "name of node 'charge'"),
            ("OTHER_WORKFLOW", "argument 'order' of node 'charge#2'"),
            ("IMPOSSIBLE_QUORUM", "node 'wrong' of workflow 'outer'"),
        ]
        assert all(problem.where and __file__ in problem.where for problem in caught.value.problems)

    def test_the_output_must_be_a_node_of_it(self) -> None:
        other = App("postgresql://nobody@nowhere.invalid/none")
        stranger = other.workflow("x").add(is_open)

        @other.define_workflow("lost")
        def lost(wf: Workflow) -> Node[bool]:
            wf.add(is_open)
            return stranger

        with pytest.raises(ConfigurationError, match=r"output of workflow 'lost'.*node of another workflow"):
            lost.build()

    def test_a_map_of_workflows_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="only tasks are mapped"):
            app.workflow("outer").map(parcel, [Order(1)])  # type: ignore[arg-type]


class TestDepth:
    def test_a_workflow_within_itself_is_refused_with_its_path(self) -> None:
        with pytest.raises(
            ConfigurationError, match="endless -> between -> endless: is a workflow within itself"
        ):
            endless.build()
        with pytest.raises(ConfigurationError, match="endless -> between -> endless"):
            app.workflow("outer").add(endless)

    @pytest.mark.parametrize("outermost", ["workflow", "definition"])
    def test_there_are_so_many_levels_and_no_more(self, outermost: str) -> None:
        other = App("postgresql://nobody@nowhere.invalid/none")
        levels: list[WorkflowDefinition[..., Any]] = []
        for number in range(DEEPEST + 1):

            @other.define_workflow(f"level-{number}")
            def level(wf: Workflow, within: int = number) -> None:
                wf.add(levels[within - 1]) if within else wf.add(is_open)

            levels.append(level)

        def build(depth: int) -> Graph:
            if outermost == "definition":
                return levels[depth - 1].build()
            wf = other.workflow("outer")
            wf.add(levels[depth - 2])
            return wf.graph()

        assert build(DEEPEST).nodes
        with pytest.raises(ConfigurationError, match=f"would be level {DEEPEST + 1}"):
            build(DEEPEST + 1)


class TestRegistration:
    def test_a_name_is_given_once(self) -> None:
        with pytest.raises(
            RegistrationError, match=r"'silent' is already defined, by .*test_workflow_definitions"
        ):
            app.define_workflow("silent")(silent.function)

    def test_what_cannot_be_one_is_refused(self) -> None:
        async def waits(wf: Workflow) -> None: ...

        def lost(order: Order) -> None: ...

        def nothing() -> None: ...

        def rest(wf: Workflow, *orders: Order) -> None: ...

        def uncodable(wf: Workflow, where: complex) -> None: ...

        for function, says in [
            (waits, "'x' is an `async def`"),
            (lost, r"does not take the Workflow as its first parameter.*def name\(wf: Workflow"),
            (nothing, "does not take the Workflow"),
            (rest, r"any number of arguments \(\*orders"),
            (uncodable, "Workflow 'x' cannot be sent: parameter 'where'"),
        ]:
            with pytest.raises(RegistrationError, match=says) as caught:
                app.define_workflow("x")(function)  # type: ignore[call-overload]
            assert caught.value.where
            assert __file__ in caught.value.where
        assert "x" not in app.workflows
