"""The drawing of a workflow: folded maps and equal siblings, and the text on each box."""

from __future__ import annotations

from uuid import UUID

import pytest

from everbeat.domain.drawing.diagrams import mermaid, svg
from everbeat.domain.drawing.picture import Drawn, blockers, folded, picture, printable, spoken
from everbeat.domain.drawing.text import draw
from everbeat.domain.workflow.states import NodeInfo, NodeState
from everbeat.errors.wording import some
from tests.domain.drawn_nodes import AT, CHILD, mapped, node


def boxes(nodes: list[NodeInfo], *, limit: int = 300) -> dict[str, Drawn]:
    return {box.key: box for box in folded(nodes, at=AT, limit=limit)}


def test_the_members_of_a_map_become_one_box_with_counts() -> None:
    nodes = [
        node("load", state="COMPLETED"),
        *mapped("measure", "load", states={"COMPLETED": 9_812, "RUNNING": 188}),
        node("sum", "measure"),
    ]
    drawn = boxes(nodes)
    assert list(drawn) == ["load", "measure", "sum"]
    assert drawn["measure"].label == "measure[0..9999]"
    assert drawn["measure"].status == "9,812 COMPLETED, 188 RUNNING"
    assert drawn["measure"].state is NodeState.RUNNING
    assert drawn["measure"].needs == ("load",)
    assert drawn["sum"].needs == ("measure",)


def test_a_node_that_waits_for_one_map_member_waits_for_the_box_of_the_map() -> None:
    drawn = boxes([*mapped("measure", states={"RUNNING": 2}), node("look", "measure[1]")])
    assert drawn["look"].needs == ("measure",)
    assert drawn["look"].blockers == ("measure (ENQUEUED 12 s)",)


def test_the_box_of_a_map_shows_its_state_before_and_after_its_members_run() -> None:
    assert boxes(mapped("m", states={}, state="PENDING"))["m"].label == "m[]"
    assert boxes(mapped("m", states={"COMPLETED": 1}))["m"].label == "m[0]"
    about_to_end = boxes(mapped("m", states={"COMPLETED": 3}))["m"]
    assert (about_to_end.state, about_to_end.status) == (NodeState.ENQUEUED, "3 COMPLETED")
    failed = boxes(mapped("m", states={"COMPLETED": 3, "FAILED": 1}, state="FAILED"))["m"]
    assert (failed.state, failed.status) == (NodeState.FAILED, "3 COMPLETED, 1 FAILED")


def test_equal_siblings_are_folded_only_above_the_box_limit() -> None:
    nodes = [
        node("a", state="COMPLETED"),
        *(node(f"b{number}", "a", state="RUNNING") for number in range(6)),
        node("other", "a", task="other"),
        node("c", *(f"b{number}" for number in range(6))),
        node("d", "b0"),
    ]
    assert len(boxes(nodes, limit=10)) == 10
    drawn = boxes(nodes, limit=9)
    assert list(drawn) == ["a", "b0", "b1", "other", "c", "d"], (
        "d waits for b0 alone, so b0 is no twin of the rest"
    )
    assert (drawn["b1"].label, drawn["b1"].status) == ("b1 … b5", "5 RUNNING")
    assert drawn["c"].needs == ("b0", "b1")


def test_a_drawing_counts_the_boxes_that_it_leaves_out() -> None:
    chain = [node("n0"), *(node(f"n{number}", f"n{number - 1}") for number in range(1, 9))]
    drawn = picture(chain, at=AT, limit=5)
    assert [box.key for box in drawn.boxes] == ["n0", "n1", "n2", "n3", "n4"]
    assert drawn.left_out == 4
    backwards = picture([node("last", "n8"), *chain], at=AT, limit=5)
    assert backwards.boxes[0].needs == (), "no line leads to what is not drawn"
    assert picture(chain, at=AT).left_out == 0


@pytest.mark.parametrize(
    ("given", "status", "waiting"),
    [
        (node("n", state="RUNNING", attempt=2), "RUNNING 12 s, attempt 2", ""),
        (node("n", state="COMPLETED", ago_s=1.7), "COMPLETED 1.2 s", ""),
        (node("n", state="FAILED", attempt=3), "FAILED 12 s, attempt 3", ""),
        (node("n", state="ENQUEUED"), "ENQUEUED", "waits for a worker"),
        (node("n", state="READY"), "READY", "waits to be enqueued"),
        (node("n", state="ENQUEUED", kind="workflow"), "ENQUEUED 12 s", ""),
        (node("n"), "PENDING", ""),
        (node("n", state="SKIPPED", started_at=None), "SKIPPED", ""),
    ],
)
def test_a_box_shows_its_state_its_age_and_what_it_waits_for(
    given: NodeInfo, status: str, waiting: str
) -> None:
    (box,) = boxes([given]).values()
    assert (box.status, box.waiting) == (status, waiting)


def test_a_box_names_the_unfinished_nodes_that_it_needs() -> None:
    nodes = [
        node("done", state="COMPLETED"),
        node("charge", state="RUNNING", attempt=2),
        *mapped("m", states={"PENDING": 5}),
        node("ship", "done", "charge", "m[0]", "m[1]"),
    ]
    by_name = {each.name: each for each in nodes}
    found = blockers(by_name["ship"], by_name, at=AT)
    assert found == ("charge (RUNNING 12 s, attempt 2)", "m (ENQUEUED 12 s)")
    assert boxes(nodes)["ship"].waiting == f"waits for {found[0]}, {found[1]}"
    assert blockers(by_name["charge"], by_name, at=AT) == ()
    assert some(["a", "b", "c", "d", "e"], limit=3) == "a, b, c and 2 more"
    assert some(["a", "b", "c"], limit=3) == "a, b, c"


def test_every_drawing_format_shows_the_conditions_of_a_node() -> None:
    conditions = ("2 of left, right, up", "if paid.is_large")
    nodes = [node("paid"), node("insure", "paid", conditions=conditions)]
    plain, insure = boxes(nodes).values()
    assert plain.rule is None
    assert insure.rule == "2 of left, right, up, if paid.is_large"
    whole = picture(nodes, at=AT)
    text = "".join(span.text for line in draw(whole, width=100) for span in line)
    for drawn in (text, mermaid(whole), svg(whole, title="")):
        assert insure.rule in drawn


def test_the_box_of_a_suspended_task_does_not_wait_for_a_worker() -> None:
    nodes = [
        node("sleeps", state="ENQUEUED", wake_at=AT),
        node("waits", state="ENQUEUED", wake_at=AT, waits_for="approved"),
        node("queued", state="ENQUEUED"),
    ]
    assert [box.waiting for box in boxes(nodes).values()] == [
        "sleeps",
        "waits for event 'approved'",
        "waits for a worker",
    ]


def test_the_box_of_a_nested_workflow_names_its_child() -> None:
    (box,) = boxes([node("ship", state="ENQUEUED", kind="workflow", task_id=CHILD)]).values()
    assert box.child == f"workflow {CHILD}"
    (not_yet,) = boxes([node("ship", kind="workflow")]).values()
    assert not_yet.child is None
    (task,) = boxes([node("ship", state="RUNNING", task_id=UUID(int=8))]).values()
    assert task.child is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"), (0.85, "850 ms"), (1.24, "1.2 s"), (12.4, "12 s"), (119, "119 s"), (120, "2.0 min"), (3_600, "60 min"),
        (7_200, "2.0 h"), (172_800, "2.0 d"),
    ],
)  # fmt: skip
def test_durations_in_drawings_are_short(seconds: float, text: str) -> None:
    assert spoken(seconds) == text


def test_a_clock_that_lags_shows_zero_instead_of_a_negative_duration() -> None:
    (box,) = boxes([node("n", state="RUNNING", ago_s=-5)]).values()
    assert box.status == "RUNNING 0 ms"


def test_control_characters_in_names_are_replaced() -> None:
    assert printable("a\x1b[31m\nb") == "a�[31m�b"
