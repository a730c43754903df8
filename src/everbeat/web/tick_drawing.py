"""Draws the ticks of a schedule as a row of marks in SVG. Each outcome has its own shape, so that nothing depends on a colour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Final, Literal, TypeAlias

from markupsafe import Markup
from msgspec import Struct

from everbeat.domain.schedule.inspection import TickInfo

TickKind: TypeAlias = Literal["sent", "late", "skipped", "missed", "next"]
_STEP: Final = 10
_LINE: Final = 245
"""Where the line stands that separates the last ticks from the next ones."""
_SHAPES: Final[Mapping[str, Callable[[int], str]]] = {
    "sent": lambda left: f'<rect class="f-live" x="{left + 3}" y="6" width="4" height="12" rx="1"/>',
    "late": lambda left: f'<path class="k-late" d="M{left + 5} 7 {left + 9} 17H{left + 1}Z"/>',
    "skipped": lambda left: f'<circle class="l-wait" cx="{left + 5}" cy="12" r="3.5"/>',
    "missed": lambda left: (
        f'<path class="l-dead" d="M{left + 2} 8 {left + 8} 16M{left + 8} 8 {left + 2} 16"/>'
    ),
    "next": lambda left: f'<rect class="l-wait thin" x="{left + 3}" y="6.5" width="4" height="11" rx="1"/>',
}


class TickMark(Struct, frozen=True):
    """A tick of the row of marks."""

    kind: TickKind
    tick: TickInfo


def tick_shape(kind: TickKind) -> Markup:
    """Return the shape of one mark, for a legend."""
    return Markup(_SHAPES[kind](0))


def tick_row(marks: Sequence[TickMark], coming: Sequence[datetime]) -> Markup:
    """Return the marks of the last ticks, the newest at the right, and empty boxes for the next ones right of a line."""
    count = Counter(mark.kind for mark in marks)
    said = ", ".join(f"{count[kind]} {kind}" for kind in ("sent", "late", "skipped", "missed"))
    parts = [
        '<svg class="ticks" viewBox="0 0 300 24" preserveAspectRatio="xMinYMid" role="img" '
        f'aria-label="last {len(marks)} ticks: {said}; {len(coming)} to come">'
        '<line class="ax" x1="0" x2="240" y1="18" y2="18"/>',
        *(_SHAPES[mark.kind](place * _STEP) for place, mark in enumerate(marks)),
    ]
    if coming:
        parts.append(f'<line class="ax0" x1="{_LINE}" x2="{_LINE}" y1="2" y2="22"/>')
    for place, tick in enumerate(coming):
        shape = _SHAPES["next"](_LINE + 3 + place * _STEP)
        parts.append(f"<g><title>{tick:%Y-%m-%d %H:%M:%S} UTC</title>{shape}</g>")
    parts.append("</svg>")
    return Markup("".join(parts))
