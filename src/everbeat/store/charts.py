"""The statements of the charts. Each returns a bounded number of rows, because the server adds up the rows of each span."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.domain.charts import ChartRange
from everbeat.domain.pulse.incidents import OF_MASS
from everbeat.domain.series import SUMS_KEPT_S, DepthBucket, RateBucket
from everbeat.store import rows
from everbeat.store.statement import Statement

MOST_MARKS: Final = 40
"""How many marks of each kind are read, the latest ones."""
_MOST_RECOVERIES: Final = 2_000


class QueueSpan(Struct, frozen=True):
    """A number of one queue in one span of time."""

    queue: str
    at: datetime
    count: int


class MarkRow(Struct, frozen=True):
    """An event for a chart as it is stored: `kind` is an action of the audit log, or deploy, death or silence. `tasks` were recovered."""

    at: datetime
    kind: str
    words: str
    tasks: int | None


def total_depths(
    chosen: ChartRange, *, since: datetime, until: datetime, queue: str | None
) -> Statement[list[DepthBucket]]:
    """List the largest numbers of live tasks in each span, of one queue or of all queues together. A span without a sample has no row."""
    parameters = {
        "since": since, "until": until, "bucket_s": chosen.bucket_s, "levels": _levels(chosen), "seconds": list(chosen.depth_seconds),
        "queue": queue,
    }  # fmt: skip
    return Statement("series/list_total_depths", parameters, rows.each(DepthBucket))


def total_rates(
    chosen: ChartRange, *, since: datetime, until: datetime, queue: str | None
) -> Statement[list[RateBucket]]:
    """List the events of tasks in each span, of one queue or of all queues together. A span without any event can have no row."""
    parameters = {
        "since": since,
        "until": until,
        "bucket_s": chosen.bucket_s,
        "levels": _levels(chosen),
        "queue": queue,
    }
    return Statement("series/list_total_rates", parameters, rows.each(RateBucket))


def busiest_queues(
    chosen: ChartRange, *, since: datetime, until: datetime, limit: int
) -> Statement[list[RateBucket]]:
    """List the queues whose attempts started most often, with their sums."""
    parameters = {"since": since, "until": until, "levels": _levels(chosen), "limit": limit}
    return Statement("series/list_busiest_queues", parameters, rows.each(RateBucket))


def queue_ends(
    chosen: ChartRange, queues: Sequence[str], *, since: datetime, until: datetime
) -> Statement[list[QueueSpan]]:
    """List how many attempts and tasks of these queues ended in each span."""
    parameters = {
        "since": since, "until": until, "bucket_s": chosen.bucket_s, "levels": _levels(chosen), "queues": list(queues),
    }  # fmt: skip
    return Statement("series/list_queue_ends", parameters, rows.each(QueueSpan))


def queue_depths(
    chosen: ChartRange, queues: Sequence[str], *, since: datetime, until: datetime
) -> Statement[list[QueueSpan]]:
    """List the largest numbers of due tasks of these queues in each span."""
    parameters = {
        "since": since, "until": until, "bucket_s": chosen.bucket_s, "levels": _levels(chosen), "seconds": list(chosen.depth_seconds),
        "queues": list(queues),
    }  # fmt: skip
    return Statement("series/list_queue_depths", parameters, rows.each(QueueSpan))


def _levels(chosen: ChartRange) -> list[int]:
    """Return the lengths of the sums and peaks that make up the spans of a range, the longest first."""
    return [seconds for seconds in SUMS_KEPT_S if seconds <= chosen.bucket_s]


def marks(*, since: datetime, until: datetime) -> Statement[list[MarkRow]]:
    """List deploys, pauses, changed limits and deaths between two times, oldest first."""
    parameters = {
        "since": since, "until": until, "limit": MOST_MARKS, "most_recoveries": _MOST_RECOVERIES, "mass": OF_MASS,
    }  # fmt: skip
    return Statement("series/list_marks", parameters, rows.each(MarkRow))
