"""The charts of a page: throughput, waits, runs, live tasks and the oldest due task, of all queues or of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from typing import Any, Final, TypeVar

from markupsafe import Markup
from msgspec import Struct

from everbeat.client.charts import busiest_queues, due_lines, read_charts
from everbeat.client.database_access import database_of
from everbeat.domain.charts import RANGES, BusyQueue, ChartRange, Charts, range_named
from everbeat.store.plan import Plan
from everbeat.web.chart_drawing import (
    DEPTHS,
    OLDEST,
    OUTCOMES,
    RUNS,
    WAITS,
    ChartFrame,
    SeriesStyle,
    areas_svg,
    bars_svg,
    lines_svg,
    summary_of,
)
from everbeat.web.moments import written
from everbeat.web.page import Visit
from everbeat.web.requests import wants_json

T = TypeVar("T")
_BUSIEST: Final = 8
SHARE_BEFORE: Final = 0.75
"""A chart of the past ends so that this share of it lies before the moment."""


class ChartPanel(Struct, frozen=True, kw_only=True):
    """One chart: its title, its drawing, the same in words, and the series for its legend and its table."""

    key: str
    title: str
    more: str
    drawing: Markup
    summary: str
    series: Sequence[SeriesStyle]
    durations: bool


class RangeLink(Struct, frozen=True):
    """A link that chooses a range."""

    words: str
    address: str
    is_chosen: bool


def chosen_range(visit: Visit) -> ChartRange:
    """Return the range that the address names."""
    return range_named(visit.query.get("range"))


def end_of(visit: Visit, chosen: ChartRange) -> datetime:
    """Return the end of the charts: now, or some time after the past moment."""
    if visit.at is None:
        return visit.now
    return min(visit.now, visit.at + timedelta(seconds=chosen.seconds * (1 - SHARE_BEFORE)))


async def charts_of(visit: Visit, *, queue: str | None = None) -> Charts | None:
    """Read the charts of the page, or None if they cannot be read."""
    chosen = chosen_range(visit)

    def plan() -> Plan[Charts]:
        return read_charts(chosen, now=end_of(visit, chosen), queue=queue)

    return await visit.part("The charts", kept(visit, ("charts", queue), plan), None)


async def busiest_of(visit: Visit) -> Sequence[BusyQueue]:
    """Read the busiest queues of the page's range, or none if they cannot be read."""
    chosen = chosen_range(visit)

    def plan() -> Plan[Sequence[BusyQueue]]:
        return busiest_queues(chosen, now=end_of(visit, chosen), limit=_BUSIEST)

    return await visit.part("The busiest queues", kept(visit, ("busiest",), plan), ())


async def due_of(visit: Visit, queues: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
    """Read the numbers of due tasks of these queues in the page's range, or none if they cannot be read."""
    chosen = chosen_range(visit)

    def plan() -> Plan[Mapping[str, tuple[int, ...]]]:
        return due_lines(chosen, queues, now=end_of(visit, chosen))

    return await visit.part("The lines of the queues", kept(visit, ("due", *queues), plan), {})


async def kept(visit: Visit, key: Hashable, plan: Callable[[], Plan[T]]) -> T:
    """Return what a plan reads, or what it has read a short time ago for the same moment."""

    async def reading() -> T:
        return await database_of(visit.app).arun(plan())

    return await visit.web.kept_charts.read((key, visit.at), chosen_range(visit), reading)


def chart_content(visit: Visit, charts: Charts | None, *, path: str) -> dict[str, Any]:
    """Return what the template of the charts shows."""
    chosen, queue = chosen_range(visit), None if charts is None else charts.queue
    ranges = [
        RangeLink(
            each.words, visit.link(path, range=each.name, queue=queue) + "#charts", each.name == chosen.name
        )
        for each in RANGES
    ]
    link = cache(partial(_link_at, visit, path, chosen.name, queue))
    panels = []
    if charts is not None and not charts.is_empty and not wants_json(visit.request):
        panels = _panels(visit, chosen, charts, link)
    return {
        "ranges": ranges,
        "chart_panels": panels,
        "chart_marks": [] if charts is None else charts.marks,
        "chart_points": [] if charts is None else charts.points,
        "chart_range": chosen,
        "chart_queue": queue,
        "charts_read": charts is not None,
        "link_at": link,
    }


def _link_at(visit: Visit, path: str, range_name: str, queue: str | None, at: datetime) -> str:
    """Return the address of a page at a moment, or at the present if the moment lies ahead."""
    moment = written(at.replace(microsecond=0)) if at <= visit.now else None
    return visit.link(path, at=moment, range=range_name, queue=queue)


def _panels(visit: Visit, chosen: ChartRange, charts: Charts, link: Any) -> list[ChartPanel]:
    frame = ChartFrame(charts=charts, shown_at=visit.at, link_at=link)
    whose = "all queues" if charts.queue is None else charts.queue
    drawn = (
        ("ended", f"Ended each {chosen.unit}", OUTCOMES, False, bars_svg(frame, "c-ended")),
        ("waited", "Waited, from due to start", WAITS, True, lines_svg(frame, WAITS)),
        ("ran", "Ran, from start to end", RUNS, True, lines_svg(frame, RUNS)),
        ("depth", "Live tasks", DEPTHS, False, areas_svg(frame, "c-depth")),
        ("oldest", "Oldest due task", OLDEST, True, lines_svg(frame, OLDEST)),
    )
    return [
        ChartPanel(
            key=key,
            title=title,
            more=f"{whose}, {chosen.words}",
            drawing=drawing,
            summary=summary_of(charts, series, durations=durations),
            series=series,
            durations=durations,
        )
        for key, title, series, durations, drawing in drawn
    ]
