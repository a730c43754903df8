"""Reads the series that charts show: of the whole installation, of one queue, and of the busiest queues."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from everbeat.domain.charts import (
    BusyQueue,
    ChartMark,
    ChartRange,
    Charts,
    ended_of,
    points_of,
    spans_of,
)
from everbeat.domain.series import quantile_s
from everbeat.errors.wording import amount
from everbeat.store import charts
from everbeat.store.charts import MarkRow, QueueSpan
from everbeat.store.plan import Plan, ask

_KINDS: Final = {"set_limit": "limit", "clear_limit": "limit"}
_VERBS: Final = {
    "pause": "paused:",
    "resume": "resumed:",
    "set_limit": "limit set:",
    "clear_limit": "limit cleared:",
}


def read_charts(chosen: ChartRange, *, now: datetime, queue: str | None = None) -> Plan[Charts]:
    """Return a plan that reads the series of a range that ends with the span of `now`."""
    spans = spans_of(chosen, now=now)
    since, until = spans[0], spans[-1] + timedelta(seconds=chosen.bucket_s)
    rates = yield from ask(charts.total_rates(chosen, since=since, until=until, queue=queue))
    depths = yield from ask(charts.total_depths(chosen, since=since, until=until, queue=queue))
    found = yield from ask(charts.marks(since=since, until=until))
    return Charts(
        range=chosen.name,
        bucket_s=chosen.bucket_s,
        since=since,
        until=until,
        queue=queue,
        points=points_of(spans, rates, depths),
        marks=[_mark(each) for each in found if queue is None or _is_about(each, queue)],
    )


def busiest_queues(chosen: ChartRange, *, now: datetime, limit: int) -> Plan[list[BusyQueue]]:
    """Return a plan that reads the queues whose attempts started most often in a range, with the ends of each span."""
    spans = spans_of(chosen, now=now)
    since, until = spans[0], spans[-1] + timedelta(seconds=chosen.bucket_s)
    found = yield from ask(charts.busiest_queues(chosen, since=since, until=until, limit=limit))
    names = [each.queue or "" for each in found]
    ends = yield from ask(charts.queue_ends(chosen, names, since=since, until=until))
    lines = _lines(spans, names, ends)
    return [
        BusyQueue(
            queue=each.queue or "",
            started=each.started,
            ended=ended_of(each),
            wait_p95=quantile_s(each.waits, 0.95),
            run_p95=quantile_s(each.runs, 0.95),
            line=lines[each.queue or ""],
        )
        for each in found
    ]


def due_lines(
    chosen: ChartRange, queues: Sequence[str], *, now: datetime
) -> Plan[Mapping[str, tuple[int, ...]]]:
    """Return a plan that reads the numbers of due tasks of these queues in each span of a range."""
    spans = spans_of(chosen, now=now)
    until = spans[-1] + timedelta(seconds=chosen.bucket_s)
    found = yield from ask(charts.queue_depths(chosen, queues, since=spans[0], until=until))
    return _lines(spans, queues, found)


def _lines(
    spans: Sequence[datetime], queues: Iterable[str], found: Iterable[QueueSpan]
) -> dict[str, tuple[int, ...]]:
    counts = {(each.queue, each.at): each.count for each in found}
    return {queue: tuple(counts.get((queue, at), 0) for at in spans) for queue in queues}


def _is_about(row: MarkRow, queue: str) -> bool:
    """Return whether an event concerns this queue. An event without a queue concerns all of them."""
    return row.kind not in ("pause", "resume") or row.words.startswith((f"queue {queue} by ", "everything"))


def _mark(row: MarkRow) -> ChartMark:
    match row.kind:
        case "deploy":
            words = f"new code, first on {row.words.rsplit('-', 2)[0]}"
        case "death":
            words = f"{row.words} died, {amount(row.tasks or 0, 'task')} recovered"
        case "silence":
            words = f"{row.words} was lost with others, {amount(row.tasks or 0, 'task')} recovered"
        case kind:
            words = f"{_VERBS.get(kind, kind)} {row.words}"
    return ChartMark(at=row.at, kind=_KINDS.get(row.kind, row.kind), words=words)
