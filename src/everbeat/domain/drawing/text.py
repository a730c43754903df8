"""Draw a workflow as text for a terminal: one node per line, with rails that lead from each node to its dependents.

All rails to the same node are merged into one, so the number of nodes with open rails determines the drawing's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import Final, TypeAlias

from msgspec import Struct

from everbeat.domain.drawing.picture import Drawn, Picture, depths, layered, printable
from everbeat.domain.workflow.states import NodeState
from everbeat.errors.wording import amount

SYMBOLS: Final = {
    NodeState.PENDING: "○",
    NodeState.READY: "◌",
    NodeState.ENQUEUED: "◔",
    NodeState.RUNNING: "●",
    NodeState.COMPLETED: "✓",
    NodeState.FAILED: "✗",
    NodeState.CANCELLED: "⊘",
    NodeState.EXPIRED: "⊗",
    NodeState.SKIPPED: "∅",
}
_PLAIN: Final = str.maketrans("○◌◔●✓✗⊘⊗∅│─╭╮╰╯├┤┬┴┼…", "o.>*+x/X0|-/\\\\/||+++~")
_LEAST_TEXT: Final = 40
_JOINTS: Final = {
    # up, down, left, right
    (True, True, False, True): "├",
    (True, True, True, False): "┤",
    (True, True, True, True): "┼",
    (True, False, False, True): "╰",
    (True, False, True, False): "╯",
    (True, False, True, True): "┴",
    (False, True, False, True): "╭",
    (False, True, True, False): "╮",
    (False, True, True, True): "┬",
}


class Span(Struct, frozen=True):
    """A piece of a line. If it has a `state`, it is shown in that state's color."""

    text: str
    state: NodeState | None = None


TextLine: TypeAlias = tuple[Span, ...]


def draw(picture: Picture, *, width: int, plain: bool = False) -> list[TextLine]:
    """Return the lines of the drawing, no wider than `width` unless a name is wider. If `plain` is set, the drawing is pure ASCII."""
    boxes = {box.key: box for box in picture.boxes}
    needs = {box.key: box.needs for box in picture.boxes}
    by_layer = [place.key for layer in layered(needs).layers for place in layer if not place.is_bend]
    most = max(2, (width - _LEAST_TEXT) // 2)
    lines: list[TextLine] = []
    for order in (by_layer, _deep_first(needs)):
        rails = _Rails(needs, order)
        if rails.most <= most:
            lines = [line for key in order for line in _with_rails(boxes[key], rails, width=width)]
            break
    else:
        depth = depths(needs)
        lines = [line for key in by_layer for line in _with_layer(boxes[key], depth[key], width=width)]
    if picture.left_out:
        lines.append(
            (
                Span(
                    f"… and {amount(picture.left_out, 'more node, which is', plural='more nodes, which are')} not drawn"
                ),
            )
        )
    return (
        [tuple(Span(span.text.translate(_PLAIN), span.state) for span in line) for line in lines]
        if plain
        else lines
    )


class _Rails:
    """The rails of ordered nodes: beside each node's first line, beside its other lines, and below it."""

    def __init__(self, needs: Mapping[str, Sequence[str]], order: Sequence[str]) -> None:
        self.beside: dict[str, tuple[str, str]] = {}
        self.further: dict[str, str] = {}
        self.below: dict[str, str | None] = {}
        self.most = 0
        place = {key: number for number, key in enumerate(order)}
        children: dict[str, list[str]] = {key: [] for key in order}
        for key, parents in needs.items():
            for parent in dict.fromkeys(parents):
                if place[parent] < place[key]:
                    children[parent].append(key)
        self._columns: list[str | None] = []
        self.straight = {key for key, after in pairwise(order) if children[key] == [after]}
        """Nodes placed directly above their only dependent. A straight rail connects the two."""
        for key in order:
            self._pass(key, sorted(children[key], key=place.__getitem__))

    def _pass(self, key: str, targets: Sequence[str]) -> None:
        columns = self._columns
        if key not in columns:
            self._take(key, 0)
        own = columns.index(key)
        before = ["│" if each is not None else " " for each in columns]
        self.beside[key] = (_row(before[:own]), _row(before[own + 1 :]).rstrip())
        columns[own] = None
        standing = [each is not None for each in columns]
        ends = set()
        for target in targets:
            if target not in columns:
                self._take(target, own)
            ends.add(columns.index(target))
        standing += [False] * (len(columns) - len(standing))
        self.most = max(self.most, len(columns))
        before[own] = "│" if targets else " "
        self.further[key] = _row(before)
        self.below[key] = _row(_joints(own, ends, standing)) if ends and ends != {own} else None
        while columns and columns[-1] is None:
            columns.pop()

    def _take(self, key: str, near: int) -> None:
        columns = self._columns
        free = [number for number, each in enumerate(columns) if each is None]
        if not free:
            columns.append(key)
        else:
            columns[min(free, key=lambda number: (number < near, abs(number - near)))] = key
        self.most = max(self.most, len(columns))


def _row(cells: Sequence[str]) -> str:
    """Join cells into columns. A cell of two characters includes its own filler."""
    return "".join(cell if len(cell) == 2 else f"{cell} " for cell in cells)


def _joints(own: int, ends: set[int], standing: Sequence[bool]) -> list[str]:
    low, high = min(own, *ends), max(own, *ends)
    cells = []
    for column, stands in enumerate(standing):
        inside, right = low <= column <= high, low <= column < high
        if not inside:
            cell = "│" if stands else " "
        elif column != own and column not in ends:
            cell = "│" if stands else "─"
        else:
            up, down = column == own or stands, column in ends
            cell = _JOINTS[up, down, low < column, right]
        cells.append(cell + ("─" if right else " "))
    return cells


def _deep_first(needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the nodes in depth-first order, which needs fewer rails but is less chronological."""
    waits = {key: len(set(parents)) for key, parents in needs.items()}
    children: dict[str, list[str]] = {}
    for key, parents in needs.items():
        for parent in dict.fromkeys(parents):
            children.setdefault(parent, []).append(key)
    stack = [key for key in reversed(list(needs)) if waits[key] == 0]
    order: list[str] = []
    while stack:
        key = stack.pop()
        order.append(key)
        for child in reversed(children.get(key, ())):
            waits[child] -= 1
            if waits[child] == 0:
                stack.append(child)
    seen = set(order)
    return order + [key for key in needs if key not in seen]


def _with_rails(box: Drawn, rails: _Rails, *, width: int) -> Iterator[TextLine]:
    left, right = rails.beside[box.key]
    further = rails.further[box.key]
    gap = f"{right} " if right else ""
    drawn = list(_lines(box, Span(left), Span(gap), Span(further), width=width))
    yield from drawn
    below = rails.below[box.key]
    if below is None and box.key in rails.straight and len(drawn) == 1:
        below = further
    if below is not None:
        yield (Span(below.rstrip()),)


def _with_layer(box: Drawn, depth: int, *, width: int) -> Iterator[TextLine]:
    number = f"{depth + 1:>3}  "
    yield from _lines(box, Span(number), Span(""), Span(" " * len(number)), width=width)


def _lines(box: Drawn, left: Span, gap: Span, further: Span, *, width: int) -> Iterator[TextLine]:
    symbol = SYMBOLS[box.state]
    label = printable(box.label)
    first = (left, Span(symbol, box.state), Span(" "), gap, Span(f"{label}  "))
    used = sum(len(span.text) for span in first)
    room = max(20, width - len(further.text) - 2)
    rest = [text for text in (printable(box.rule or ""), box.child, printable(box.waiting)) if text]
    whole = "  ".join([box.status, *rest])
    if used + len(whole) <= width:
        after = whole[len(box.status) :]
        yield (*first, Span(box.status, box.state), *([Span(after)] if after else []))
        return
    if used + len(box.status) <= width:
        yield (*first, Span(box.status, box.state))
    else:
        yield (*first[:-1], Span(label))
        for part in wrap(box.status, room):
            yield (further, Span("  "), Span(part, box.state))
    for text in rest:
        for part in wrap(text, room, break_on_hyphens=False):
            yield (further, Span(f"  {part}"))
