"""Where the boxes of a drawing go: layers from top to bottom, the order within each, and where between them lines run.

What lives here: longest-path layers, orders by barycentres, places on a line. What may not: what a box says and how wide it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

from msgspec import Struct

_SWEEPS: Final = 8
_MOST_PLACES: Final = 4_000
"""Lines that would pass through more layers than this, all together, go straight from box to box."""


class Place(Struct, frozen=True):
    """A place in a layer: a box by its `key`, or (`is_bend`) where the line of an edge passes through the layer."""

    key: str
    is_bend: bool = False


class Layers(Struct, frozen=True):
    """The layers with their places in order, and of every edge (parent, child) the places it runs through, both ends included."""

    layers: tuple[tuple[Place, ...], ...]
    lines: Mapping[tuple[str, str], tuple[Place, ...]]


def depths(needs: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """The layer of each box: one below the deepest of those it needs. A box of a circle, which no workflow has, is where it was met."""
    waits = {key: len(set(parents)) for key, parents in needs.items()}
    children: dict[str, list[str]] = {}
    for key, parents in needs.items():
        for parent in set(parents):
            children.setdefault(parent, []).append(key)
    found: dict[str, int] = {}
    ready = [key for key, count in waits.items() if count == 0]
    for key in ready:  # it grows
        found[key] = max((found[parent] + 1 for parent in needs[key]), default=0)
        for child in children.get(key, ()):
            waits[child] -= 1
            if waits[child] == 0:
                ready.append(child)
    return {key: found.get(key, 0) for key in needs}


def layered(needs: Mapping[str, Sequence[str]]) -> Layers:
    """Layers in which few lines cross; `needs` maps each box to those it waits for, all of them boxes."""
    depth = depths(needs)
    span = sum(depth[key] - depth[parent] - 1 for key, parents in needs.items() for parent in parents)
    bends = span <= _MOST_PLACES
    layers: list[list[Place]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    boxes = {key: Place(key) for key in needs}
    for key in needs:
        layers[depth[key]].append(boxes[key])
    lines: dict[tuple[str, str], tuple[Place, ...]] = {}
    for key, parents in needs.items():
        for parent in dict.fromkeys(parents):
            passed = range(depth[parent] + 1, depth[key]) if bends else ()
            run = [boxes[parent]]
            for layer in passed:
                bend = Place(f"{parent}\n{key}\n{layer}", is_bend=True)
                layers[layer].append(bend)
                run.append(bend)
            lines[parent, key] = (*run, boxes[key])
    return Layers(tuple(map(tuple, _ordered(layers, lines.values()))), lines)


def neighbours(
    lines: Iterable[tuple[Place, ...]],
) -> tuple[dict[Place, list[Place]], dict[Place, list[Place]]]:
    """Of every place those above it and those below it."""
    above: dict[Place, list[Place]] = {}
    below: dict[Place, list[Place]] = {}
    for line in lines:
        for upper, lower in pairwise(line):
            above.setdefault(lower, []).append(upper)
            below.setdefault(upper, []).append(lower)
    return above, below


def crossings(layers: Sequence[Sequence[Place]], below: Mapping[Place, Sequence[Place]]) -> int:
    """How many pairs of lines between neighbouring layers cross."""
    total = 0
    for upper, lower in pairwise(layers):
        order = {place: number for number, place in enumerate(lower)}
        ends = [
            end
            for place in upper
            for end in sorted(order[each] for each in below.get(place, ()) if each in order)
        ]
        total += _inversions(ends, len(lower))
    return total


def spread(
    layers: Sequence[Sequence[Place]],
    lines: Sequence[tuple[Place, ...]],
    widths: Mapping[Place, float],
    *,
    gap: float,
) -> dict[Place, float]:
    """The middle of every place on its line: near those it is joined to, `gap` from its neighbours, none below half its width."""
    above, below = neighbours(lines)
    middles: dict[Place, float] = {}
    for layer in layers:
        edge = 0.0
        for place in layer:
            middles[place] = edge + widths[place] / 2
            edge += widths[place] + gap
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        joined = above if down else below
        for layer in layers if down else reversed(layers):
            wanted = [
                _mean([middles[each] for each in joined.get(place, ())], middles[place]) for place in layer
            ]
            placed = _apart(wanted, [widths[each] for each in layer], gap)
            middles |= dict(zip(layer, placed, strict=True))
    shift = min((middle - widths[place] / 2 for place, middle in middles.items()), default=0.0)
    return {place: middle - shift for place, middle in middles.items()}


def _ordered(layers: list[list[Place]], lines: Iterable[tuple[Place, ...]]) -> list[list[Place]]:
    above, below = neighbours(lines)
    best, fewest = layers, crossings(layers, below)
    current = [list(layer) for layer in layers]
    for sweep in range(_SWEEPS):
        if not fewest:
            break
        down = sweep % 2 == 0
        joined = above if down else below
        rows = range(1, len(current)) if down else range(len(current) - 2, -1, -1)
        for row in rows:
            beside = {place: number for number, place in enumerate(current[row - 1 if down else row + 1])}
            weights = {
                place: _mean(
                    [float(beside[each]) for each in joined.get(place, ()) if each in beside], float(number)
                )
                for number, place in enumerate(current[row])
            }
            current[row].sort(key=weights.__getitem__)
        found = crossings(current, below)
        if found < fewest:
            best, fewest = [list(layer) for layer in current], found
    return best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _apart(wanted: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """The nearest to what is wanted in which neighbours keep their distance: between all pushed right and all pushed left."""
    right: list[float] = []
    for number, middle in enumerate(wanted):
        least = right[-1] + (widths[number - 1] + widths[number]) / 2 + gap if right else middle
        right.append(max(middle, least))
    left: list[float] = []
    for number in range(len(wanted) - 1, -1, -1):
        most = left[-1] - (widths[number + 1] + widths[number]) / 2 - gap if left else wanted[number]
        left.append(min(wanted[number], most))
    return [(one + other) / 2 for one, other in zip(right, reversed(left), strict=True)]


def _inversions(ends: Sequence[int], size: int) -> int:
    """How many pairs stand in the wrong order, by a Fenwick tree."""
    tree = [0] * (size + 1)
    total = 0
    for seen, end in enumerate(ends):
        total += seen - _upto(tree, end + 1)
        place = end + 1
        while place <= size:
            tree[place] += 1
            place += place & -place
    return total


def _upto(tree: Sequence[int], place: int) -> int:
    found = 0
    while place > 0:
        found += tree[place]
        place -= place & -place
    return found
