"""Nodes that handle failures, take the first of several results, or are delayed, at the level of statements."""

from __future__ import annotations

from datetime import timedelta

import pytest

from everbeat.domain.workflow.graph import Edge, GraphNode, Hole, TaskSpec
from tests.store.conftest import StoreHarness
from tests.store.flows import Flow, Script, after, task

DELAY_MS = 3_600_000


def failing(*names: str) -> Script:
    return lambda name: ValueError("no") if name in names else name


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ((), "SKIPPED"),
        (("a",), "COMPLETED"),
        (("b",), "COMPLETED"),
        (("a", "b"), "COMPLETED"),
        (("c",), "SKIPPED"),
    ],
)
def test_a_node_that_handles_two_failures_runs_if_one_of_them_happens(
    db: StoreHarness, bad: tuple[str, ...], expected: str
) -> None:  # W1
    nodes = [task("a"), task("b"), task("c"), task("undo", quorum=1)]
    flow = Flow.start(
        db, nodes, [Edge(0, 3, joins=True, if_failed=True), Edge(1, 3, joins=True, if_failed=True)]
    )
    flow.play(failing(*bad))
    assert flow.nodes()["undo"] == expected
    assert flow.state == ("FAILED" if bad else "COMPLETED")


def test_the_failure_of_a_skipped_node_is_not_handled(db: StoreHarness) -> None:  # W1
    flow = Flow.start(db, [task("a"), task("b"), task("undo")], [*after(1, 0), Edge(1, 2, if_failed=True)])
    flow.play(failing("a"))
    assert flow.nodes() == {"a": "FAILED", "b": "SKIPPED", "undo": "SKIPPED"}
    assert "runs only if b fails, which ended SKIPPED" in reason(flow, "undo")


def test_of_two_results_the_one_that_came_first_is_passed_on(db: StoreHarness) -> None:
    nodes = [task("a"), task("b"), task("taker", template=('{"x":', Hole((0, 1)), "}"), quorum=1)]
    flow = Flow.start(db, nodes, after(2, 0, 1, joins=True))
    flow.settle_down()
    claimed = flow.by_name(flow.claim())
    flow.end([claimed["b"]], str)
    flow.end([claimed["a"]], str)  # before a step has seen that b ended
    flow.settle_down()
    assert flow.args("taker") == {"x": "b"}


def reason(flow: Flow, name: str) -> str:
    found = flow.db.connection.execute(
        flow.db.plain("select error ->> 'message' from {schema}.nodes where workflow_id = %s and name = %s"),
        [flow.id, name],
    ).fetchone()
    assert found is not None
    return str(found[0])


def delayed(name: str) -> GraphNode:
    return GraphNode(name=name, task=TaskSpec(name="work", queue="default", delay_ms=DELAY_MS), args="{}")


def due_in(flow: Flow) -> timedelta:
    """Return how long after the first task was sent the latest task is due."""
    found = flow.db.connection.execute(
        flow.db.plain(
            "select min(sent_at), max(enqueued_at) filter (where state = 'PENDING') from {schema}.tasks"
        )
    ).fetchone()
    assert found is not None
    sent_at, due_at = found
    return due_at - sent_at


def test_a_pause_does_not_begin_a_delay_again(db: StoreHarness) -> None:
    flow = Flow.start(db, [delayed("late")])
    flow.settle_down()
    assert flow.claim() == []
    flow.pause()
    assert flow.nodes() == {"late": "READY"}
    flow.resume()
    assert flow.nodes() == {"late": "ENQUEUED"}
    assert due_in(flow) == timedelta(milliseconds=DELAY_MS)
    assert flow.claim() == []
