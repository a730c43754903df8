"""Test that invalid workflows are refused before anything is stored (W6): arguments at once, the rest together."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from everbeat import Workflow
from everbeat.domain.workflow.graph import problems_of
from everbeat.errors import ConfigurationError, PayloadError
from tests.client.workflow_app import (
    Order,
    Payment,
    anything,
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


def problems(wf: Workflow, **output: Any) -> list[tuple[str, str]]:
    with pytest.raises(ConfigurationError) as caught:
        wf.graph(**output)
    assert all(problem.fix for problem in caught.value.problems)
    return [(problem.code, problem.subject) for problem in caught.value.problems]


class TestArguments:
    @pytest.mark.parametrize(
        ("add", "says"),
        [
            (lambda wf, paid: wf.add(charge), "missing a required argument: 'order'"),
            (lambda wf, paid: wf.add(charge, paid.result, order=Order(1)), "multiple values|overlap|'order'"),
            (lambda wf, paid: wf.add(charge, Order(1), queue="x"), "unexpected keyword argument 'queue'"),
            (lambda wf, paid: wf.add(charge, 1), "'order' = 1 of task 'charge'"),
            (
                lambda wf, paid: wf.add(pack, paid),
                r"'payment' of task 'pack' is or contains <Node 'charge'.*\.result",
            ),
            (
                lambda wf, paid: wf.add(total, [paid]),
                r"'payments' of task 'total' is or contains <Node 'charge'",
            ),
            (
                lambda wf, paid: wf.add(total, wf.map(charge, [])),
                r"is or contains <Nodes .*pass its \.results",
            ),
            (
                lambda wf, paid: wf.add(pack, Payment(paid.result.amount)),
                "in an object, in a set or as a key",
            ),
            (lambda wf, paid: wf.add(anything, {paid.result}), "in an object, in a set or as a key"),
            (lambda wf, paid: wf.add(total, paid.result.amount + 1), "cannot be calculated with"),
        ],
    )
    def test_add_refuses_arguments_that_do_not_fit_the_task(
        self, wf: Workflow, add: Callable[[Any, Any], object], says: str
    ) -> None:
        paid = wf.add(charge, Order(1))
        with pytest.raises((PayloadError, TypeError), match=says):
            add(wf, paid)

    def test_add_refuses_an_object_that_is_not_a_task(self, wf: Workflow) -> None:  # W6
        for no_task in (len, "charge", charge._definition.function, charge.call(Order(1))):
            with pytest.raises(ConfigurationError, match=r"must be a task.*@app\.task"):
                wf.add(no_task, 1)  # type: ignore[arg-type]

    def test_a_send_refuses_a_placeholder(self, wf: Workflow) -> None:
        with pytest.raises(
            PayloadError, match=r"<result of node 'charge'> of task 'pack'.*Placeholder, which cannot"
        ):
            pack.call(wf.add(charge, Order(1)).result)

    def test_a_refused_argument_adds_no_node(self, wf: Workflow) -> None:  # W6
        with pytest.raises(PayloadError):
            wf.add(charge, 1)  # type: ignore[arg-type]
        assert problems(wf) == [("EMPTY", "workflow 'order'")]


class TestTypes:
    @pytest.mark.parametrize(
        ("add", "subject", "rule"),
        [
            (lambda wf, paid: wf.add(ship, paid.result), "label", "is Payment, but must be str"),
            (lambda wf, paid: wf.add(ship, paid.result.amount), "label", "is int, but must be str"),
            (lambda wf, paid: wf.add(charge, paid.result), "order", "is Payment, but must be Order"),
            (lambda wf, paid: wf.add(total, [paid.result.amount]), "payments[0]", "is int, but must be Payment"),
            (lambda wf, paid: wf.add(total, wf.map(ship, ["x"]).results), "payments", r"is list[None], but must be list[Payment]"),
            (lambda wf, paid: wf.add(pack, wf.add(list_orders).result), "payment", "is list[Order], but must be Payment"),
        ],
    )  # fmt: skip
    def test_a_result_of_the_wrong_type_is_refused(
        self, wf: Workflow, add: Callable[[Any, Any], Any], subject: str, rule: str
    ) -> None:
        node = add(wf, wf.add(charge, Order(1)))
        with pytest.raises(ConfigurationError) as caught:
            wf.graph()
        (problem,) = caught.value.problems
        assert (problem.code, problem.rule) == ("WRONG_TYPE", rule)
        assert problem.subject == f"argument {subject!r} of node {node.name!r}"
        assert problem.where is not None
        assert problem.where.startswith(__file__)

    def test_an_outcome_and_a_result_cannot_replace_each_other(self, wf: Workflow) -> None:
        paid = wf.add(charge, Order(1))
        wf.add(pack, paid.outcome)  # type: ignore[arg-type]
        wf.add(report, paid.result)  # type: ignore[arg-type]
        wf.add(report, wf.add(list_orders).outcome)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=r"Fix: take \.result, or annotate") as caught:
            wf.graph()
        assert len(caught.value.problems) == 3

    def test_results_of_unknown_type_are_accepted_until_the_workflow_runs(self, wf: Workflow) -> None:
        wf.add(pack, wf.add(anything).result)
        wf.add(anything, wf.add(charge, Order(1)).result)
        assert problems_of(wf.graph()) == []


class TestOptions:
    def test_a_node_refuses_options_that_only_a_send_takes(self, wf: Workflow) -> None:
        wf.add(charge.with_options(key="k", connection=object()), Order(1))
        assert problems(wf) == [
            ("NOT_FOR_NODES", "key of node 'charge'"),
            ("NOT_FOR_NODES", "connection of node 'charge'"),
        ]

    def test_a_node_refuses_options_that_a_send_would_refuse(self, wf: Workflow) -> None:
        wf.add(charge.with_options(queue="mial"), Order(1))
        wf.add(charge.with_options(queue="line", serial=True), Order(1))
        with pytest.raises(ConfigurationError, match="use 'mail'") as caught:
            wf.graph()
        assert [problem.code for problem in caught.value.problems] == ["UNKNOWN_QUEUE", "CONTRADICTION"]
        assert all(problem.where for problem in caught.value.problems)

    @pytest.mark.parametrize("on_error", ["skip", "faill", None])
    def test_an_unknown_on_error_is_refused(self, on_error: Any) -> None:
        with pytest.raises(ConfigurationError, match="on_error of workflow 'order'"):
            app.workflow("order", on_error=on_error)

    @pytest.mark.parametrize("name", ["", "a b", 5])
    def test_an_invalid_workflow_name_is_refused(self, name: Any) -> None:
        with pytest.raises(ConfigurationError, match="name of the workflow"):
            app.workflow(name)


class TestWaiting:
    @pytest.mark.parametrize("join", ["some", "anny", 1.5, None, True])
    def test_an_unknown_join_is_refused(self, wf: Workflow, join: Any) -> None:
        first = wf.add(is_open)
        wf.add(is_open).after(first, join=join)
        assert problems(wf) == [("UNKNOWN_CHOICE", "join of node 'is_open#2'")]

    @pytest.mark.parametrize("join", [0, -1, 3])
    def test_an_impossible_quorum_is_refused(self, wf: Workflow, join: int) -> None:  # W6
        first, second = wf.add(is_open), wf.add(is_open)
        wf.add(charge, Order(1)).after(first, second, second, join=join)
        assert problems(wf) == [("IMPOSSIBLE_QUORUM", "node 'charge' of workflow 'order'")]

    def test_a_join_without_nodes_is_refused(self, wf: Workflow) -> None:
        wf.add(charge, Order(1)).after(join="any")
        assert problems(wf) == [("IMPOSSIBLE_QUORUM", "node 'charge' of workflow 'order'")]

    def test_a_join_over_a_single_map_is_refused_and_its_members_suggested(self, wf: Workflow) -> None:
        mapped = wf.map(charge, [Order(1), Order(2)])
        wf.add(is_open).after(mapped, join="any")
        with pytest.raises(ConfigurationError, match=re.escape("write .after(*nodes, join=...)")):
            wf.graph()

    def test_a_second_join_of_a_node_is_refused(self, wf: Workflow) -> None:
        first, second = wf.add(is_open), wf.add(is_open)
        wf.add(charge, Order(1)).after(first, join="any").after(second, join=1)
        assert problems(wf) == [("DUPLICATE", "join of node 'charge'")]

    def test_dependencies_on_objects_that_are_not_nodes_of_the_workflow_are_refused(
        self, wf: Workflow
    ) -> None:  # W6
        elsewhere = app.workflow("other")
        elsewhere.map(welcome, range(9))
        other = elsewhere.add(charge, Order(1))
        mapped = app.workflow("other").map(charge, [])
        node = wf.add(is_open)
        node.after(other, mapped, charge, node.result).when(other.result.is_paid)  # type: ignore[arg-type]
        wf.add(pack, other.result)
        assert problems(wf) == [
            ("OTHER_WORKFLOW", "after of node 'is_open'"),
            ("OTHER_WORKFLOW", "after of node 'is_open'"),
            ("WRONG_TYPE", "after of node 'is_open'"),
            ("WRONG_TYPE", "after of node 'is_open'"),
            ("OTHER_WORKFLOW", "when of node 'is_open'"),
            ("OTHER_WORKFLOW", "argument 'payment' of node 'pack'"),
        ]

    def test_a_cycle_is_refused_with_the_names_of_its_nodes(self, wf: Workflow) -> None:  # W6
        paid = wf.add(charge, Order(1))
        packed = wf.add(pack, paid.result)
        paid.after(wf.add(ship, packed.result))
        with pytest.raises(ConfigurationError, match="charge -> pack -> ship -> charge: is a cycle"):
            wf.graph()

    @pytest.mark.parametrize("is_joined", [True, False])
    def test_a_result_argument_on_a_node_with_allow_failed_is_refused(
        self, wf: Workflow, is_joined: bool
    ) -> None:
        paid, opened = wf.add(charge, Order(1)), wf.add(is_open)
        node = wf.add(pack, paid.result).allow_failed()
        if is_joined:
            node.after(paid, opened, join="any")
        with pytest.raises(ConfigurationError, match=r"argument 'payment' needs it.*take \.outcome instead"):
            wf.graph()

    def test_allow_failed_is_accepted_for_nodes_that_only_order(self, wf: Workflow) -> None:
        paid, opened = wf.add(charge, Order(1)), wf.add(is_open)
        wf.add(pack, paid.result).after(opened).allow_failed()
        wf.add(report, paid.outcome).after(paid).allow_failed()
        assert problems_of(wf.graph()) == []


class TestConditions:
    @pytest.mark.parametrize(
        ("condition", "rule"),
        [
            (lambda wf: True, "must be the result of a node"),
            (lambda wf: wf.add(is_open), "must be the result of a node"),
            (lambda wf: wf.add(is_open).outcome, "a condition must be annotated bool"),
            (lambda wf: wf.add(charge, Order(1)).result, "is Payment, and a condition"),
            (lambda wf: wf.add(charge, Order(1)).result.amount, "is int, and a condition"),
            (lambda wf: wf.add(anything).result, "is Any, and a condition"),
            (lambda wf: wf.add(flags).result[0], "is an item of a list in JSON"),
            (lambda wf: wf.map(charge, []).results, r"is list\[Payment\], and a condition"),
        ],
    )
    def test_a_condition_that_is_not_a_bool_is_refused(
        self, wf: Workflow, condition: Callable[[Any], Any], rule: str
    ) -> None:
        wf.add(welcome, 1).when(condition(wf))
        with pytest.raises(ConfigurationError, match=f"when of node 'welcome-'.*{rule}") as caught:
            wf.graph()
        assert len(caught.value.problems) == 1

    def test_an_argument_of_a_workflow_cannot_be_a_condition(self) -> None:
        found: list[Any] = []

        @app.define_workflow("conditional")
        def conditional(wf: Workflow, is_wanted: bool) -> None:
            found.append(is_wanted)
            wf.add(is_open).unless(is_wanted)

        wf = app.workflow("outer")
        wf.add(conditional, wf.add(is_open).result)
        with pytest.raises(
            ConfigurationError, match=r"unless of node 'is_open'.*an argument of the workflow"
        ):
            wf.graph()

    def test_contradictory_conditions_are_refused(self, wf: Workflow) -> None:
        opened = wf.add(is_open)
        wf.add(welcome, 1).when(opened.result).unless(opened.result)
        assert problems(wf) == [("CONTRADICTION", "conditions of node 'welcome-'")]


class TestWhole:
    def test_an_empty_workflow_is_refused(self, wf: Workflow) -> None:  # W6
        assert problems(wf) == [("EMPTY", "workflow 'order'")]

    def test_duplicate_node_names_are_refused(self, wf: Workflow) -> None:  # W6
        wf.add(is_open).named("a")
        wf.add(is_open).named("a")
        assert problems(wf) == [("DUPLICATE", "node 'a' of workflow 'order'")]

    @pytest.mark.parametrize("name", ["a b", "", "a[0]", "a#2", 5, "x" * 129])
    def test_an_invalid_node_name_is_refused(self, wf: Workflow, name: Any) -> None:
        assert wf.add(is_open).named(name).name == "is_open"
        assert problems(wf) == [("WRONG_NAME", "name of node 'is_open'")]

    def test_an_output_that_is_not_a_node_of_the_workflow_is_refused(self, wf: Workflow) -> None:
        node = wf.add(is_open)
        stranger = app.workflow("other").add(is_open)
        for output, rule in [
            (stranger, "is a node of another workflow"),
            (node.result, "must be a node"),
            ("is_opn", "not the name of one"),
            (5, "must be a node, not a int"),
        ]:
            with pytest.raises(ConfigurationError, match=f"output of workflow 'order'.*{rule}"):
                wf.graph(output)  # type: ignore[arg-type]
        assert wf.graph(node).output == 0

    def test_a_success_case_without_nodes_of_the_workflow_is_refused(self, wf: Workflow) -> None:
        wf.add(is_open)
        wf.succeeds_when()
        wf.succeeds_when(app.workflow("other").add(is_open), charge)  # type: ignore[arg-type]
        assert problems(wf) == [
            ("EMPTY", "success case of workflow 'order'"),
            ("UNKNOWN_NODE", "success case of workflow 'order'"),
            ("UNKNOWN_NODE", "success case of workflow 'order'"),
        ]

    def test_all_problems_of_a_workflow_are_reported_together_with_their_places(
        self, wf: Workflow
    ) -> None:  # W6
        paid = wf.add(charge, Order(1)).named("a b")
        wf.add(ship, paid.result.amount).after(charge, join="som")  # type: ignore[arg-type]
        wf.add(is_open).named("x").after(paid, join=2)
        wf.add(is_open).named("x").when(paid.result)  # type: ignore[arg-type]
        paid.after(paid)
        with pytest.raises(ConfigurationError) as caught:
            wf.graph()
        assert [problem.code for problem in caught.value.problems] == [
            "WRONG_NAME",
            "WRONG_TYPE",
            "WRONG_TYPE",
            "UNKNOWN_CHOICE",
            "WRONG_TYPE",
            "DUPLICATE",
            "IMPOSSIBLE_QUORUM",
            "CYCLE",
        ]
        assert str(caught.value).count(f"{__file__}:") == 8
        assert problems(wf) == [(each.code, each.subject) for each in caught.value.problems]
