"""The rates of each queue in the last ten minutes: starts, ends, failures, and the durations of waits and runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Final

from msgspec import Struct

from everbeat.client.database_access import database_of
from everbeat.domain.charts import RANGES, ended_of
from everbeat.domain.series import RateBucket, quantile_s
from everbeat.store import charts
from everbeat.store.plan import ask
from everbeat.web.page import Visit

MINUTES: Final = 10
_MOST_QUEUES: Final = 2_000
_SHARE: Final = 0.95


class QueueRates(Struct, frozen=True, kw_only=True):
    """The events of a queue. `bad` of the `ended` attempts failed or lost their worker. 95 % of the waits and runs were shorter than these."""

    queue: str
    started: int
    ended: int
    bad: int
    wait_p95_s: float | None
    run_p95_s: float | None


async def read_rates(visit: Visit) -> dict[str, QueueRates]:
    """Return the rates by queue, which are kept for ten seconds. A queue without events has none. Raises DatabaseError."""
    since = visit.now - timedelta(minutes=MINUTES)
    asked = charts.busiest_queues(RANGES[0], since=_whole(since), until=visit.now, limit=_MOST_QUEUES)

    async def reading() -> dict[str, QueueRates]:
        found = await database_of(visit.app).arun(ask(asked))
        return rates_of(found)

    return await visit.web.kept_charts.read(("rates",), RANGES[0], reading)


def _whole(moment: datetime) -> datetime:
    return moment.replace(second=0, microsecond=0)


def rates_of(found: Iterable[RateBucket]) -> dict[str, QueueRates]:
    """Return the sums by queue."""
    by_queue: dict[str, list[RateBucket]] = {}
    for each in found:
        by_queue.setdefault(each.queue or "", []).append(each)
    return {queue: _sum(queue, buckets) for queue, buckets in by_queue.items()}


def _sum(queue: str, buckets: Sequence[RateBucket]) -> QueueRates:
    waits = [sum(counts) for counts in zip(*(each.waits for each in buckets), strict=True)]
    runs = [sum(counts) for counts in zip(*(each.runs for each in buckets), strict=True)]
    return QueueRates(
        queue=queue,
        started=sum(each.started for each in buckets),
        ended=sum(ended_of(each) for each in buckets),
        bad=sum(each.failed + each.crashed + each.lost for each in buckets),
        wait_p95_s=quantile_s(waits, _SHARE),
        run_p95_s=quantile_s(runs, _SHARE),
    )
