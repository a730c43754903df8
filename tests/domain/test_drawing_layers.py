"""Layers, order and positions: every edge leads down, few lines cross, boxes do not overlap."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from everbeat.domain.drawing.picture import BoxPlace, crossings, depths, layered, neighbours, spread


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, list[str]]:
    size = draw(st.integers(1, 14))
    return {
        f"n{number}": [
            f"n{parent}"
            for parent in sorted(draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else [])
        ]
        for number in range(size)
    }


def test_a_box_is_one_layer_below_the_deepest_box_that_it_needs() -> None:
    needs = {"end": ["c", "a"], "a": [], "b": ["a"], "c": ["b", "a"], "alone": []}
    assert depths(needs) == {"a": 0, "b": 1, "c": 2, "end": 3, "alone": 0}


def test_a_cycle_does_not_block_the_layout() -> None:
    assert depths({"a": ["b"], "b": ["a"], "c": []}) == {"a": 0, "b": 0, "c": 0}
    assert len(layered({"a": ["b"], "b": ["a"]}).lines) == 2


def test_an_edge_over_several_layers_bends_in_each_of_them() -> None:
    found = layered({"a": [], "b": ["a"], "c": ["b", "a"]})
    line = found.lines["a", "c"]
    assert [place.is_bend for place in line] == [False, True, False]
    assert line[1] in found.layers[1]
    assert found.lines["a", "b"] == (BoxPlace("a"), BoxPlace("b"))


def test_the_layout_removes_avoidable_crossings() -> None:
    needs = {"a": [], "b": [], "c": [], "x": ["c"], "y": ["b"], "z": ["a"]}
    tangled = [[BoxPlace(key) for key in "abc"], [BoxPlace(key) for key in "xyz"]]
    lines = layered(needs).lines.values()
    assert crossings(tangled, neighbours(lines)[1]) == 3
    assert crossings(layered(needs).layers, neighbours(lines)[1]) == 0


@given(graphs())
def test_the_layout_places_every_box_once_and_every_edge_downwards(needs: dict[str, list[str]]) -> None:
    found = layered(needs)
    row = {place: number for number, layer in enumerate(found.layers) for place in layer}
    assert sorted(place.key for place in row if not place.is_bend) == sorted(needs)
    assert set(found.lines) == {(parent, key) for key, parents in needs.items() for parent in parents}
    for line in found.lines.values():
        assert all(row[lower] == row[upper] + 1 for upper, lower in pairwise(line))


@given(graphs())
def test_positions_keep_their_order_and_minimum_distance(needs: dict[str, list[str]]) -> None:
    found = layered(needs)
    widths = {place: 2.0 if place.is_bend else 40.0 for layer in found.layers for place in layer}
    middles = spread(found.layers, list(found.lines.values()), widths, gap=10)
    for layer in found.layers:
        assert all(middles[place] - widths[place] / 2 >= -1e-6 for place in layer)
        for left, right in pairwise(layer):
            assert middles[right] - middles[left] >= (widths[left] + widths[right]) / 2 + 10 - 1e-6


def test_a_parent_is_centred_above_its_children() -> None:
    found = layered({"a": [], "b": ["a"], "c": ["a"], "d": ["a"]})
    widths = {place: 40.0 for layer in found.layers for place in layer}
    middles = spread(found.layers, list(found.lines.values()), widths, gap=10)
    assert abs(middles[BoxPlace("a")] - middles[BoxPlace("c")]) < 1


def test_the_layout_handles_wide_and_long_graphs() -> None:
    wide = {"a": [], **{f"b{number}": ["a"] for number in range(300)}}
    wide["c"] = [f"b{number}" for number in range(300)]
    assert [len(layer) for layer in layered(wide).layers] == [1, 300, 1]
    long = {f"n{number}": [f"n{number - 1}", "n0"] if number else [] for number in range(300)}
    assert all(not place.is_bend for layer in layered(long).layers for place in layer), (
        "too many bends: straight"
    )
