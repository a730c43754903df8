"""Test workflow definitions, built from their arguments alone or as one node of another workflow."""

from __future__ import annotations

from typing import Any

import pytest

from everbeat import App, Node, Workflow
from everbeat.client.workflow.definition import WorkflowDefinition
from everbeat.domain.task.outcome import TaskResult
from everbeat.domain.workflow.graph import DEEPEST, INPUT, Edge, Graph, Hole, Known, fill
from everbeat.errors import ConfigurationError, PayloadError, RegistrationError
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
    def test_build_passes_the_arguments_to_the_function_and_uses_its_output(self) -> None:
        graph = parcel.build(Order(3), weights=[1])
        assert seen == [Order(3), "x", [1]]
        assert (graph.name, graph.on_error, graph.output) == ("parcel", "pause", 2)
        assert [node.name for node in graph.nodes] == ["charge", "ship", "pack"]
        assert graph.nodes[0].args == '{"order":{"id":3}}'

    def test_a_workflow_function_that_returns_no_node_has_no_output(self) -> None:
        assert silent.build().output is None

    def test_builds_with_the_same_arguments_are_equal_and_independent(self) -> None:
        assert parcel.build(Order(1)) == parcel.build(Order(1))
        assert parcel.build(Order(1)) != parcel.build(Order(2))

    def test_a_workflow_definition_has_a_repr_and_the_docstring_of_its_function(self) -> None:
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
    def test_build_refuses_arguments_that_do_not_fit_the_function(
        self, args: Any, kwargs: Any, says: str
    ) -> None:
        for call in (parcel.build, lambda *a, **k: app.workflow("outer").add(parcel, *a, **k)):
            with pytest.raises(PayloadError, match=says):
                call(*args, **kwargs)

    def test_build_refuses_a_result_of_a_node_of_another_workflow(self) -> None:
        wf = app.workflow("other")
        with pytest.raises(PayloadError, match="which only its own workflow knows"):
            parcel.build(Order(1), weights=[wf.add(total, []).result])


class TestWithinAnother:
    def test_a_definition_in_a_workflow_becomes_one_node_with_the_child_graph(self) -> None:
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

    def test_a_child_workflow_gets_placeholders_as_its_input(self) -> None:
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

    def test_nodes_of_a_child_workflow_decode_the_input_filled_in_at_run_time(self) -> None:
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
        (paid,), _ = report._definition.codec.decode(fill(told.template, given))
        assert paid.value == Payment(1)

    def test_the_result_of_a_child_workflow_has_the_type_of_its_output(self) -> None:
        wf = app.workflow("outer")
        wf.add(total, [wf.add(parcel, Order(1)).result])  # type: ignore[list-item]
        wf.add(ship, wf.add(silent).result)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError) as caught:
            wf.graph()
        assert [problem.rule for problem in caught.value.problems] == [
            "is str, but must be Payment",
            "is None, but must be str",
        ]

    def test_arguments_of_a_child_workflow_are_checked_against_their_annotations(self) -> None:
        wf = app.workflow("outer")
        wf.add(parcel, wf.add(charge, Order(1)).result)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigurationError, match=r"argument 'order' of node 'parcel'.*is Payment, but must be Order"
        ):
            wf.graph()

    def test_problems_of_a_child_workflow_are_reported_with_those_of_the_outer(self) -> None:
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

    def test_the_output_of_a_definition_must_be_one_of_its_nodes(self) -> None:
        other = App("postgresql://nobody@nowhere.invalid/none")
        stranger = other.workflow("x").add(is_open)

        @other.define_workflow("lost")
        def lost(wf: Workflow) -> Node[bool]:
            wf.add(is_open)
            return stranger

        with pytest.raises(ConfigurationError, match=r"output of workflow 'lost'.*node of another workflow"):
            lost.build()


class TestDepth:
    def test_a_workflow_that_contains_itself_is_refused_with_the_path(self) -> None:
        with pytest.raises(
            ConfigurationError, match="endless -> between -> endless: is a workflow that contains itself"
        ):
            endless.build()
        with pytest.raises(ConfigurationError, match="endless -> between -> endless"):
            app.workflow("outer").add(endless)

    @pytest.mark.parametrize("outermost", ["workflow", "definition"])
    def test_workflows_nested_too_deeply_are_refused(self, outermost: str) -> None:
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
    def test_two_workflow_definitions_with_one_name_are_refused(self) -> None:
        with pytest.raises(
            RegistrationError, match=r"'silent' is already defined, by .*test_workflow_definitions"
        ):
            app.define_workflow("silent")(silent.function)

    def test_a_function_that_cannot_define_a_workflow_is_refused(self) -> None:
        async def waits(wf: Workflow) -> None: ...

        def lost(order: Order) -> None: ...

        def nothing() -> None: ...

        def rest(wf: Workflow, *orders: Order) -> None: ...

        def uncodable(wf: Workflow, where: complex) -> None: ...

        for function, says in [
            (waits, "'x' is an `async def`"),
            (lost, r"has no first parameter that is annotated as Workflow.*def name\(wf: Workflow"),
            (nothing, "has no first parameter"),
            (rest, r"any number of arguments \(\*orders"),
            (uncodable, "Workflow 'x' cannot be sent: parameter 'where'"),
        ]:
            with pytest.raises(RegistrationError, match=says) as caught:
                app.define_workflow("x")(function)  # type: ignore[call-overload]
            assert caught.value.where
            assert __file__ in caught.value.where
        assert "x" not in app.workflows
