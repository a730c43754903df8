"""Draw a workflow as an SVG picture or a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from textwrap import shorten, wrap
from typing import Final

from everbeat.domain.drawing.picture import BoxPlace, Drawn, Layers, Picture, layered, printable, spread
from everbeat.domain.drawing.text import SYMBOLS
from everbeat.errors.wording import amount

_CLASSES: Final = {
    "pending": "fill:#f1f3f5,stroke:#868e96,color:#212529",
    "ready": "fill:#e7f5ff,stroke:#4dabf7,color:#212529",
    "enqueued": "fill:#d0ebff,stroke:#1c7ed6,color:#212529",
    "running": "fill:#fff3bf,stroke:#f08c00,color:#212529",
    "completed": "fill:#d3f9d8,stroke:#2f9e44,color:#212529",
    "failed": "fill:#ffe3e3,stroke:#e03131,color:#212529,stroke-width:3px",
    "cancelled": "fill:#f3d9fa,stroke:#9c36b5,color:#212529",
    "expired": "fill:#f3d9fa,stroke:#9c36b5,color:#212529",
    "skipped": "fill:#f8f9fa,stroke:#adb5bd,color:#868e96,stroke-dasharray:4",
}
_SHAPES: Final = {"task": ('["', '"]'), "workflow": ('[["', '"]]'), "map": ('{{"', '"}}')}
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 _-.,:()…")


def mermaid(picture: Picture) -> str:
    """Return a top-to-bottom Mermaid flowchart. States are classes, maps are hexagons, and child workflows have double sides."""
    names = {box.key: f"n{number}" for number, box in enumerate(picture.boxes)}
    lines = ["flowchart TD"]
    lines += [f"    {names[box.key]}{_shape(box)}:::{box.state.lower()}" for box in picture.boxes]
    lines += [f"    {names[parent]} --> {names[box.key]}" for box in picture.boxes for parent in box.needs]
    if picture.left_out:
        left_out = amount(picture.left_out, "more node, which is", plural="more nodes, which are")
        lines.append(f'    rest["and {left_out} not drawn"]')
    there = {box.state.lower() for box in picture.boxes}
    lines += [f"    classDef {name} {style}" for name, style in _CLASSES.items() if name in there]
    return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Escape text for Mermaid and HTML."""
    return "".join(each if each in _PLAIN or each.isalnum() else f"#{ord(each)};" for each in printable(text))


def _shape(box: Drawn) -> str:
    left, right = _SHAPES[box.kind]
    text = "<br/>".join(escaped(part) for part in (box.label, box.status, box.rule, box.child) if part)
    return f"{left}{text}{right}"


_LETTER: Final = 7.3  # the width of a 12 px monospace letter, rounded up
_LINE: Final = 16
_PADDING: Final = 10
_MOST_LETTERS: Final = 44
_GAP_ACROSS: Final = 24
_GAP_DOWN: Final = 46
_MARGIN: Final = 16
_STYLE: Final = """\
    text { font: 12px ui-monospace, 'SFMono-Regular', Menlo, Consolas, monospace; fill: #212529; }
    text.name { font-weight: bold; }
    text.note { fill: #495057; }
    path { fill: none; stroke: #868e96; stroke-width: 1.5; }
    marker path { fill: #868e96; stroke: none; }
    rect { fill: #f1f3f5; stroke: #868e96; stroke-width: 1.5; }
    rect.fold { stroke-width: 4; }
    .ready rect { fill: #e7f5ff; stroke: #4dabf7; }
    .enqueued rect { fill: #d0ebff; stroke: #1c7ed6; }
    .running rect { fill: #fff3bf; stroke: #f08c00; }
    .completed rect { fill: #d3f9d8; stroke: #2f9e44; }
    .failed rect { fill: #ffe3e3; stroke: #e03131; stroke-width: 3; }
    .cancelled rect, .expired rect { fill: #f3d9fa; stroke: #9c36b5; }
    .skipped rect { stroke-dasharray: 4; }
    .rest { fill: #868e96; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f1f3f5; }
      text.note { fill: #ced4da; }
      rect { fill: #343a40; }
      .ready rect { fill: #1b3a57; }
      .enqueued rect { fill: #14406b; }
      .running rect { fill: #5c4400; }
      .completed rect { fill: #1b4d2a; }
      .failed rect { fill: #641e1e; }
      .cancelled rect, .expired rect { fill: #4a1f56; }
    }
"""


def svg(
    picture: Picture, *, title: str, links: Mapping[str, str] | None = None, is_styled: bool = True
) -> str:
    """Return the picture as an SVG document. `title` is the text for tooltips and screen readers.

    `links` maps the keys of boxes to addresses. Without `is_styled`, the page that contains the picture styles it.
    """
    boxes = {box.key: box for box in picture.boxes}
    found = layered({box.key: box.needs for box in picture.boxes})
    texts = {key: _texts(box) for key, box in boxes.items()}
    places = [place for layer in found.layers for place in layer]
    widths = {place: 2.0 if place.is_bend else _width(texts[place.key]) for place in places}
    middles = spread(found.layers, list(found.lines.values()), widths, gap=_GAP_ACROSS)
    tops, heights, bottom = _rows(found, texts)
    right = max((middles[place] + widths[place] / 2 for place in places), default=0.0)
    width, height = right + 2 * _MARGIN, bottom + _MARGIN + (2 * _LINE if picture.left_out else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}">',
        f"  <title>{_text(title)}</title>",
        *([f"  <style>\n{_STYLE}  </style>"] if is_styled else []),
        '  <defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z"/></marker></defs>',
    ]
    rows = {place: number for number, layer in enumerate(found.layers) for place in layer}
    parts += [
        _line(line, rows=rows, tops=tops, heights=heights, middles=middles) for line in found.lines.values()
    ]
    for place in places:
        if not place.is_bend:
            box = _box(
                boxes[place.key],
                texts[place.key],
                left=_MARGIN + middles[place] - widths[place] / 2,
                top=tops[rows[place]],
                width=widths[place],
            )
            address = (links or {}).get(place.key)
            parts += box if address is None else [f'  <a href="{escape(address)}">', *box, "  </a>"]
    if picture.left_out:
        rest = (
            f"and {amount(picture.left_out, 'more node, which is', plural='more nodes, which are')} not drawn"
        )
        parts.append(f'  <text class="rest" x="{_MARGIN}" y="{height - _MARGIN:.0f}">{rest}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _texts(box: Drawn) -> tuple[str, ...]:
    label = shorten(printable(box.label), _MOST_LETTERS, placeholder="…")
    if len(label) <= 1:  # the label is one long word
        label = f"{printable(box.label)[: _MOST_LETTERS - 1]}…"
    status = wrap(box.status, _MOST_LETTERS) or [""]
    rule = wrap(printable(box.rule or ""), _MOST_LETTERS)
    return (
        label,
        f"{SYMBOLS[box.state]} {status[0]}",
        *status[1:],
        *rule,
        *([box.child] if box.child else []),
    )


def _width(texts: Sequence[str]) -> float:
    return max(len(text) for text in texts) * _LETTER + 2 * _PADDING


def _rows(found: Layers, texts: Mapping[str, Sequence[str]]) -> tuple[list[float], list[float], float]:
    """Return the top and the height of each layer, and the lower edge of the last layer."""
    tops: list[float] = []
    heights: list[float] = []
    edge = float(_MARGIN)
    for layer in found.layers:
        lines = max((len(texts[place.key]) for place in layer if not place.is_bend), default=1)
        tops.append(edge)
        heights.append(_height(lines))
        edge += heights[-1] + _GAP_DOWN
    return tops, heights, edge - _GAP_DOWN if tops else edge


def _height(lines: int) -> float:
    return lines * _LINE + 2.0 * _PADDING - 4


def _line(
    line: Sequence[BoxPlace],
    *,
    rows: Mapping[BoxPlace, int],
    tops: Sequence[float],
    heights: Sequence[float],
    middles: Mapping[BoxPlace, float],
) -> str:
    x = _MARGIN + middles[line[0]]
    y = tops[rows[line[0]]] + heights[rows[line[0]]]
    path = [f"M{x:.1f} {y:.1f}"]
    for place in line[1:]:
        row = rows[place]
        to_x, to_y = _MARGIN + middles[place], tops[row]
        half = (y + to_y) / 2
        path.append(f"C{x:.1f} {half:.1f} {to_x:.1f} {half:.1f} {to_x:.1f} {to_y:.1f}")
        x, y = to_x, to_y
        if place.is_bend:
            y = to_y + heights[row]
            path.append(f"L{x:.1f} {y:.1f}")
    return f'  <path d="{" ".join(path)}" marker-end="url(#tip)"/>'


def _box(box: Drawn, texts: Sequence[str], *, left: float, top: float, width: float) -> Iterator[str]:
    height = _height(len(texts))
    remarks = "; ".join(text for text in (box.status, box.rule, box.waiting) if text)
    yield f'  <g class="{box.state.lower()}">'
    yield f"    <title>{_text(f'{box.label}: {remarks}')}</title>"
    fold = ' class="fold"' if box.counts or box.kind == "workflow" else ""
    yield f'    <rect{fold} x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6"/>'
    for number, text in enumerate(texts):
        kind = "name" if number == 0 else "note"
        y = top + _PADDING + number * _LINE + 10
        yield f'    <text class="{kind}" x="{left + _PADDING:.1f}" y="{y:.1f}">{_text(text)}</text>'
    yield "  </g>"


def _text(text: str) -> str:
    return escape(printable(text))
