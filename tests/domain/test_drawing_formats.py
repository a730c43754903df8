"""Mermaid and SVG contain everything that is drawn, and no name breaks their syntax."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.drawing.diagrams import escaped, mermaid, svg
from everbeat.domain.drawing.picture import picture
from everbeat.domain.workflow.states import NodeInfo, NodeState
from tests.domain.drawn_nodes import AT, CHILD, mapped, node

SVG = "{http://www.w3.org/2000/svg}"
ORDER = [
    node("reserve", state="COMPLETED"),
    *mapped("measure", "reserve", states={"COMPLETED": 2, "RUNNING": 1}),
    node("ship", "reserve", state="ENQUEUED", kind="workflow", task_id=CHILD),
    node("report", "measure", "ship", "reserve"),
]


def drawn_svg(nodes: list[NodeInfo], *, title: str = "order", limit: int = 300) -> ElementTree.Element:
    return ElementTree.fromstring(svg(picture(nodes, at=AT, limit=limit), title=title))


class TestMermaid:
    def test_mermaid_draws_the_whole_flowchart(self) -> None:
        lines = mermaid(picture(ORDER, at=AT)).splitlines()
        assert [line for line in lines if "classDef" not in line] == [
            "flowchart TD",
            '    n0["reserve<br/>COMPLETED 12 s"]:::completed',
            '    n1{{"measure#91;0..2#93;<br/>2 COMPLETED, 1 RUNNING"}}:::running',
            f'    n2[["ship<br/>ENQUEUED 12 s<br/>workflow {CHILD}"]]:::enqueued',
            '    n3["report<br/>PENDING"]:::pending',
            "    n0 --> n1",
            "    n0 --> n2",
            "    n1 --> n3",
            "    n2 --> n3",
            "    n0 --> n3",
        ]
        defined = [line.split()[1] for line in lines if "classDef" in line]
        assert sorted(defined) == ["completed", "enqueued", "pending", "running"]

    @pytest.mark.parametrize("state", NodeState)
    def test_mermaid_defines_a_class_for_every_state(self, state: NodeState) -> None:
        text = mermaid(picture([node("n", state=state)], at=AT))
        assert f":::{state.lower()}\n" in text
        assert f"classDef {state.lower()} fill:#" in text

    @given(st.text(min_size=1))
    def test_no_name_breaks_out_of_its_mermaid_quotes(self, name: str) -> None:
        text = mermaid(picture([node(name)], at=AT))
        head, box, *rest = text.splitlines()
        assert head == "flowchart TD"
        assert re.fullmatch(r'    n0\["[^"`<>]*<br/>PENDING"\]:::pending', box), box
        assert len(rest) == 1

    def test_mermaid_escapes_its_special_characters(self) -> None:
        assert escaped('a"b#c<d>&`;[]{}|') == "a#34;b#35;c#60;d#62;#38;#96;#59;#91;#93;#123;#125;#124;"
        assert escaped("größe (m²)") == "größe (m²)"

    def test_mermaid_states_how_many_nodes_are_not_drawn(self) -> None:
        chain = [node("n0"), *(node(f"n{number}", f"n{number - 1}") for number in range(1, 9))]
        assert "and 4 more nodes, which are not drawn" in mermaid(picture(chain, at=AT, limit=5))


class TestSvg:
    def test_svg_contains_every_box_line_and_text(self) -> None:
        found = drawn_svg(ORDER, title="order <1> & more")
        assert found.findtext(f"{SVG}title") == "order <1> & more"
        groups = found.findall(f"{SVG}g")
        assert [group.get("class") for group in groups] == ["completed", "running", "enqueued", "pending"]
        words = [[text.text for text in group.findall(f"{SVG}text")] for group in groups]
        assert words == [
            ["reserve", "✓ COMPLETED 12 s"],
            ["measure[0..2]", "● 2 COMPLETED, 1 RUNNING"],
            ["ship", "◔ ENQUEUED 12 s", f"workflow {CHILD}"],
            ["report", "○ PENDING"],
        ]
        assert len(found.findall(f"{SVG}path")) == 5
        assert "report: PENDING; waits for measure" in (groups[3].findtext(f"{SVG}title") or "")

    def test_svg_boxes_do_not_overlap_and_stay_within_the_picture(self) -> None:
        nodes = [
            node(f"n{number}", *(f"n{parent}" for parent in range(number) if number % (parent + 2) == 0))
            for number in range(40)
        ]
        found = drawn_svg(nodes)
        boxes = []
        for rect in found.iter(f"{SVG}rect"):
            left, top, width, height = (
                float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")
            )
            boxes.append((left, top, left + width, top + height))
        right, bottom = float(found.get("width", "nan")), float(found.get("height", "nan"))
        assert len(boxes) == 40
        assert all(box[0] >= 0 and box[1] >= 0 and box[2] <= right and box[3] <= bottom for box in boxes)
        by_row = sorted(boxes, key=lambda box: (box[1], box[0]))
        for one, other in pairwise(by_row):
            assert one[1] != other[1] or one[2] < other[0]
            assert one[1] == other[1] or one[3] < other[1]

    def test_svg_lines_start_below_one_box_and_end_on_top_of_another(self) -> None:
        found = drawn_svg([node("a"), node("b", "a"), node("c", "a", "b")])
        tops = [float(rect.get("y", "nan")) for rect in found.iter(f"{SVG}rect")]
        for path in found.findall(f"{SVG}path"):
            numbers = [float(each) for each in re.findall(r"[\d.]+", path.get("d", ""))]
            assert numbers[-1] in tops
            assert numbers[1] > min(tops)

    def test_svg_has_colours_for_light_and_dark_pages(self) -> None:
        style = drawn_svg(ORDER).findtext(f"{SVG}style") or ""
        light, dark = style.split("@media (prefers-color-scheme: dark)")
        for state in NodeState:
            if state not in (NodeState.PENDING, NodeState.SKIPPED):
                assert f".{state.lower()} rect" in light
                assert f".{state.lower()} rect" in dark
        assert "text { fill" in dark

    @given(st.text(min_size=1))
    def test_no_name_breaks_the_svg(self, name: str) -> None:
        found = drawn_svg([node(name)], title=name)
        assert len(found.findall(f"{SVG}g")) == 1

    def test_svg_cuts_a_long_name_and_shows_it_whole_in_the_tooltip(self) -> None:
        found = drawn_svg([node("x" * 100)])
        group = found.find(f"{SVG}g")
        assert group is not None
        assert group.findtext(f"{SVG}text") == "x" * 43 + "…"
        assert (group.findtext(f"{SVG}title") or "").startswith("x" * 100)

    def test_svg_states_how_many_nodes_are_not_drawn(self) -> None:
        chain = [node("n0"), *(node(f"n{number}", f"n{number - 1}") for number in range(1, 9))]
        found = drawn_svg(chain, limit=5)
        assert len(found.findall(f"{SVG}g")) == 5
        assert found.findall(f"{SVG}text")[-1].text == "and 4 more nodes, which are not drawn"

    def test_an_empty_workflow_has_an_svg(self) -> None:
        assert drawn_svg([]).findall(f"{SVG}g") == []
