"""Draws series as SVG: stacked bars, lines and areas. Attributes and classes only, so that the pages need no inline style.

A drawing is hidden from screen readers. The page has a summary in words and a table of the same numbers beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Final

from markupsafe import Markup
from msgspec import Struct

from everbeat.domain.charts import ChartMark, ChartPoint, Charts, nice_top
from everbeat.errors.wording import brief_duration
from everbeat.web import wording
from everbeat.web.wording import shown_text

_HEIGHT: Final = 132
_TOP: Final = 14
"""Room above the values for the words of marks, in pixels."""
_LEFT: Final = 12.0
"""Room on the left for the numbers of the axis, in percent."""
_WIDTH: Final = 100.0 - _LEFT
_MOST_MARKS: Final = 12
_WORDED: Final = 2
_LONGEST: Final = 40
_MARK_TONES: Final = {"death": "dead", "silence": "dead", "deploy": "ink", "pause": "late", "resume": "live"}


class SeriesStyle(Struct, frozen=True):
    """One series of a chart: its words, the class of its color, how its shape differs from the others, and its value at a point."""

    words: str
    tone: str
    form: str
    value: Callable[[ChartPoint], float | None]


OUTCOMES: Final = (
    SeriesStyle("completed", "live", "plain", lambda point: point.completed),
    SeriesStyle("to be retried", "late", "hatch", lambda point: point.retried),
    SeriesStyle("failed, crashed or lost", "dead", "cross", lambda point: point.failed),
    SeriesStyle("cancelled or expired", "wait", "dots", lambda point: point.cancelled),
)
WAITS: Final = (
    SeriesStyle("half below (p50)", "run", "solid", lambda point: point.wait_p50),
    SeriesStyle("p95", "run", "dash", lambda point: point.wait_p95),
    SeriesStyle("p99", "run", "dots", lambda point: point.wait_p99),
)
RUNS: Final = (
    SeriesStyle("half below (p50)", "live", "solid", lambda point: point.run_p50),
    SeriesStyle("p95", "live", "dash", lambda point: point.run_p95),
    SeriesStyle("p99", "live", "dots", lambda point: point.run_p99),
)
DEPTHS: Final = (
    SeriesStyle("running", "run", "plain", lambda point: point.running),
    SeriesStyle("claimed", "wait", "hatch", lambda point: point.claimed),
    SeriesStyle("due", "late", "cross", lambda point: point.due),
    SeriesStyle("scheduled or suspended", "sleep", "dots", lambda point: point.later),
)
OLDEST: Final = (SeriesStyle("oldest due", "late", "solid", lambda point: point.oldest_due_s),)


class ChartFrame(Struct, frozen=True, kw_only=True):
    """The common part of the charts of a page: the series, the past moment that the page shows, and the address of a moment."""

    charts: Charts
    shown_at: datetime | None
    link_at: Callable[[datetime], str]

    def place(self, at: datetime) -> float:
        """Return where a moment is, in percent of the drawing."""
        whole = (self.charts.until - self.charts.since).total_seconds()
        return _LEFT + _WIDTH * (at - self.charts.since).total_seconds() / whole


def bars_svg(frame: ChartFrame, key: str, series: Sequence[SeriesStyle] = OUTCOMES) -> Markup:
    """Return stacked bars, one for each span. A bar is a link to its moment. `key` is unique in the page."""
    points = frame.charts.points
    top = nice_top(max((_sum(point, series) for point in points), default=0.0))
    drawn = [_axis(top, wording.count), _patterns(key, series)]
    step = _WIDTH / max(1, len(points))
    for place, point in enumerate(points):
        total = _sum(point, series)
        if not total:
            continue
        x, y = _LEFT + place * step, float(_HEIGHT)
        parts = []
        for each in series:
            height = (_HEIGHT - _TOP) * (each.value(point) or 0.0) / top
            if height > 0:
                height = max(height, 1.0)
                y -= height
                parts.append(_bar(x + step * 0.08, step * 0.84, y, height, each, key))
        title = shown_text(_told(point, series))
        link = shown_text(frame.link_at(_middle(frame.charts, point)))
        drawn.append(f'<a href="{link}" tabindex="-1"><title>{title}</title>{"".join(parts)}</a>')
    return _svg([*drawn, *_marks(frame)])


def areas_svg(frame: ChartFrame, key: str, series: Sequence[SeriesStyle] = DEPTHS) -> Markup:
    """Return stacked areas with a line on top of each. The series that is drawn first is at the bottom."""
    points = frame.charts.points
    top = nice_top(max((_sum(point, series) for point in points), default=0.0))
    drawn = []
    for run in _runs([point.due for point in points]):
        drawn += _areas(points, [place for place, _ in run], key=key, series=series, top=top)
    return _svg([_axis(top, wording.count), _patterns(key, series), _inner(drawn), *_marks(frame)])


def _areas(
    points: Sequence[ChartPoint],
    places: Sequence[int],
    *,
    key: str,
    series: Sequence[SeriesStyle],
    top: float,
) -> list[str]:
    """Return the areas of neighbouring spans. A span between two that were not sampled is as wide as a bar."""
    edges: list[tuple[float, int]] = [(place, place) for place in places]
    if len(places) == 1:
        edges = [(places[0] - 0.4, places[0]), (places[0] + 0.4, places[0])]
    base = [0.0] * len(edges)
    drawn = []
    for each in series:
        upper = [
            low + (each.value(points[place]) or 0.0) for low, (_, place) in zip(base, edges, strict=True)
        ]
        if upper != base:
            above = _path(edges, upper, len(points), top)
            below = _path(edges[::-1], base[::-1], len(points), top)
            drawn.append(f'<path class="f-{each.tone} area" d="M{above}L{below}Z"/>')
            if each.form in _PATTERNS:
                drawn.append(f'<path fill="url(#{key}-{each.form})" d="M{above}L{below}Z"/>')
            drawn.append(f'<path class="l-{each.tone}" d="M{above}"/>')
        base = upper
    return drawn


def _path(edges: Sequence[tuple[float, int]], values: Sequence[float], count: int, top: float) -> str:
    return "L".join(_at(x, value, count, top) for (x, _), value in zip(edges, values, strict=True))


def lines_svg(frame: ChartFrame, series: Sequence[SeriesStyle]) -> Markup:
    """Return lines of durations. A span without a measurement leaves a gap, and one between two gaps is a dot."""
    points = frame.charts.points
    values = [value for each in series for point in points if (value := each.value(point)) is not None]
    top = nice_seconds(max(values, default=0.0))
    drawn, dots = [], []
    for each in series:
        for run in _runs([each.value(point) for point in points]):
            if len(run) == 1:
                place, value = run[0]
                x = _LEFT + _WIDTH * (place + 0.5) / len(points)
                dots.append(f'<circle class="k-{each.tone}" cx="{x:.2f}%" cy="{_y(value, top):.1f}" r="2"/>')
            else:
                path = "L".join(_at(place, value, len(points), top) for place, value in run)
                drawn.append(f'<path class="l-{each.tone} {each.form}" d="M{path}"/>')
    return _svg([_axis(top, brief_duration), _inner(drawn), *dots, *_marks(frame)])


def summary_of(charts: Charts, series: Sequence[SeriesStyle], *, durations: bool) -> str:
    """Return a chart in words: the highest value of each series and the last one. The last span has not ended, so its value is left out."""
    parts = []
    for each in series:
        values = [value for point in charts.points if (value := each.value(point)) is not None]
        highest = max(values, default=0.0)
        if not highest:
            continue
        ended = [value for point in charts.points[:-1] if (value := each.value(point)) is not None]
        show = brief_duration if durations else wording.count
        last = f", last {show(ended[-1])}" if ended else ""
        parts.append(f"{each.words}: at most {show(highest)}{last}")
    return "; ".join(parts) or "nothing was counted"


def _sum(point: ChartPoint, series: Sequence[SeriesStyle]) -> float:
    return sum(each.value(point) or 0.0 for each in series)


def _told(point: ChartPoint, series: Sequence[SeriesStyle]) -> str:
    parts = [f"{value:,.0f} {each.words}" for each in series if (value := each.value(point))]
    return f"{point.at:%Y-%m-%d %H:%M} UTC: {', '.join(parts)}"


def _middle(charts: Charts, point: ChartPoint) -> datetime:
    return point.at + timedelta(seconds=charts.bucket_s / 2)


def _bar(x: float, width: float, y: float, height: float, style: SeriesStyle, key: str) -> str:
    place = f'x="{x:.2f}%" y="{y:.1f}" width="{width:.2f}%" height="{height:.1f}"'
    plain = f'<rect class="f-{style.tone}" {place}/>'
    return plain if style.form == "plain" else f'{plain}<rect fill="url(#{key}-{style.form})" {place}/>'


def _patterns(key: str, series: Sequence[SeriesStyle]) -> str:
    """Return the patterns that distinguish fills without color."""
    found = [
        f'<pattern id="{key}-{each.form}" width="5" height="5" patternUnits="userSpaceOnUse">'
        f'<path class="ink-on" d="{_PATTERNS[each.form]}"/></pattern>'
        for each in series
        if each.form in _PATTERNS
    ]
    return f"<defs>{''.join(found)}</defs>"


_PATTERNS: Final = {"hatch": "M0 5 5 0", "cross": "M0 5 5 0M0 0 5 5", "dots": "M2 2.5h1"}


def _axis(top: float, show: Callable[[float], str]) -> str:
    drawn = []
    for share in (0.0, 0.5, 1.0):
        y = _y(top * share, top)
        drawn.append(
            f'<line class="ax{"0" if not share else ""}" x1="{_LEFT}%" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="e" x="{_LEFT}%" dx="-6" y="{y + 4:.1f}">{shown_text(show(top * share)) if share else "0"}</text>'
        )
    return "".join(drawn)


def _marks(frame: ChartFrame) -> list[str]:
    """Return the moment that the page shows, and the latest events, as vertical lines. The last two events are named in the drawing."""
    drawn = []
    named = 0
    for mark in reversed(frame.charts.marks[-_MOST_MARKS:]):
        x = frame.place(mark.at)
        tone = _MARK_TONES.get(mark.kind, "late")
        dash = "" if mark.kind in ("death", "silence") else " dash"
        line = f'<line class="l-{tone}{dash}" x1="{x:.2f}%" x2="{x:.2f}%" y1="{_TOP}" y2="{_HEIGHT}"/>'
        words = ""
        if named < _WORDED:
            words = _words(mark, x, row=named)
            named += 1
        link = shown_text(frame.link_at(mark.at))
        drawn.append(
            f'<a href="{link}" tabindex="-1"><title>{shown_text(_event(mark))}</title>{line}{words}</a>'
        )
    if frame.shown_at is not None and frame.charts.since <= frame.shown_at < frame.charts.until:
        x = frame.place(frame.shown_at)
        drawn.append(f'<line class="l-ink thick" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{_HEIGHT}"/>')
    return drawn


def _event(mark: ChartMark) -> str:
    return f"{mark.at:%Y-%m-%d %H:%M:%S} UTC: {mark.words}"


def _words(mark: ChartMark, x: float, *, row: int) -> str:
    words = mark.words if len(mark.words) <= _LONGEST else f"{mark.words[: _LONGEST - 1]}…"
    side = ' class="ink-2 e" dx="-4"' if x > _LEFT + _WIDTH / 2 else ' class="ink-2" dx="4"'
    return f'<text{side} x="{x:.2f}%" y="{10 + 13 * row}">{shown_text(words)}</text>'


def _runs(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Return the runs of neighbouring measurements, each with its place."""
    found: list[list[tuple[int, float]]] = []
    before = -2
    for place, value in enumerate(values):
        if value is None:
            continue
        if place != before + 1:
            found.append([])
        found[-1].append((place, value))
        before = place
    return found


def nice_seconds(highest: float) -> float:
    """Return the end of an axis of durations that reads well: a decimal step below a minute, and whole minutes, hours or days above.

    Its half has one unit too, so that the words fit beside a narrow chart.
    """
    bound = math.inf
    for size in (86_400.0, 3_600.0, 60.0):
        if highest > size:
            steps = (size * step for step in (2, 4, 6, 10, 20, 30))
            top = next((each for each in steps if each >= highest), nice_top(highest / size) * size)
            return min(top, bound)
        bound = size
    return min(nice_top(highest), bound)


def _y(value: float, top: float) -> float:
    return _HEIGHT - (_HEIGHT - _TOP) * value / top


def _at(place: float, value: float, count: int, top: float) -> str:
    """Return a point of the inner drawing, whose width is 1,000."""
    return f"{1000 * (place + 0.5) / count:.1f} {_y(value, top):.1f}"


def _inner(drawn: Sequence[str]) -> str:
    """Return paths that stretch with the page, right of the axis."""
    return (
        f'<svg x="{_LEFT}%" y="0" width="{_WIDTH}%" height="{_HEIGHT}" viewBox="0 0 1000 {_HEIGHT}" '
        f'preserveAspectRatio="none">{"".join(drawn)}</svg>'
    )


def _svg(drawn: Sequence[str]) -> Markup:
    return Markup(f'<svg class="chart plot" height="{_HEIGHT + 4}" aria-hidden="true">{"".join(drawn)}</svg>')
