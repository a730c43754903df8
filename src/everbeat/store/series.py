"""Series of counts: `rates` (events of tasks) and `depths` (samples of the queues). Statements that write, add up and read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

import msgspec
from msgspec import Struct

from everbeat.domain.series import (
    LEAST_SETTLE_S,
    SUMS_KEPT_S,
    SUMS_SETTLE_S,
    DepthBucket,
    LatestDepths,
    RateBucket,
    SizeBucket,
)
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

SAMPLER: Final = "depths"
"""The name of the turn of the supervisor that samples."""
SAMPLE_EVERY_MS: Final = 10_000
MOST_COUNTED: Final = 10_000
MOST_SAMPLED: Final = 1_000_000
"""How many tasks of all queues together a sample counts."""
MOST_ROLLED_UP: Final = 5_000


class RatesWritten(Struct, frozen=True):
    """The reply to a write of rates: the server's time, how many rows were in minutes that it accepts, and how many were changed."""

    now: datetime
    accepted: int
    written: int


def write_rates(counts: Sequence[Mapping[str, Any]], *, supervisor: str) -> Statement[RatesWritten]:
    """Store the counts of a supervisor: one mapping for each minute, queue and name, with absolute values under the names of the columns.

    Minutes that began more than five minutes ago are not written. `supervisor` must be an id that no other process uses, and stay the
    same while the counts grow.
    """
    parameters = {"rows": msgspec.json.encode(counts).decode(), "supervisor": supervisor}
    return Statement("series/write_rates", parameters, rows.only(RatesWritten))


def roll_up_rates(*, most: int = MOST_ROLLED_UP) -> Statement[int]:
    """Add up the rates of old minutes and hours. Return how many rows were replaced by sums: 0 if none is left."""
    return Statement("series/roll_up_rates", {"most": most}, rows.only(int))


def sum_minutes() -> Statement[None]:
    """Sum up the rates of the minutes that have ended. Those that supervisors could still write, and some before, are summed again."""
    parameters = {"kept_s": SUMS_KEPT_S[60], "settle_s": LEAST_SETTLE_S}
    return Statement("series/sum_minutes", parameters, rows.nothing)


def sum_rates() -> Statement[bool]:
    """Sum up the rates of the next span that ended long enough ago, the longest spans first. Return False if none is left.

    The sums of minutes are those of `sum_minutes`.
    """
    levels = [each for each in SUMS_KEPT_S if each != 60]
    parameters = {
        "levels": levels, "kept_s": [SUMS_KEPT_S[each] for each in levels],
        "settled_s": [SUMS_SETTLE_S.get(each, LEAST_SETTLE_S) for each in levels],
    }  # fmt: skip
    return Statement("series/sum_rates", parameters, rows.only(bool))


def add_peaks() -> Statement[bool]:
    """Store the peaks of the samples of the next span that ended long enough ago, the longest spans first. Return False if none is left."""
    levels = list(SUMS_KEPT_S)
    parameters = {
        "levels": levels, "kept_s": [SUMS_KEPT_S[each] for each in levels], "settle_s": LEAST_SETTLE_S,
    }  # fmt: skip
    return Statement("series/add_peaks", parameters, rows.only(bool))


def delete_early() -> Statement[None]:
    """Delete the samples, sums and peaks of times that are not over. The clock was set back after they were stored."""
    levels = list(SUMS_KEPT_S)
    parameters = {
        "levels": levels, "peak_settled_s": [LEAST_SETTLE_S] * len(levels),
        "rate_settled_s": [0 if each == 60 else SUMS_SETTLE_S.get(each, LEAST_SETTLE_S) for each in levels],
    }  # fmt: skip
    return Statement("series/delete_early", parameters, rows.nothing)


def sample_depths(
    *, taken_by: str, interval_ms: int = SAMPLE_EVERY_MS, most: int = MOST_COUNTED
) -> Statement[bool | None]:
    """Sample all queues if the tree gets the turn. Return None without a turn, and True for the first sample of a minute."""
    parameters = {
        "service": SAMPLER, "taken_by": taken_by, "interval_ms": interval_ms, "most": most, "most_of_all": MOST_SAMPLED,
    }  # fmt: skip
    return Statement("series/sample_depths", parameters, rows.first(bool))


def rates(
    *,
    since: datetime,
    until: datetime,
    bucket_s: int,
    queue: str | None = None,
    name: str | None = None,
    by_queue: bool = False,
    by_name: bool = False,
) -> Statement[list[RateBucket]]:
    """List the events of tasks in each span of `bucket_s` seconds from `since` to before `until`. A span without any event has no row.

    `queue` and `name` select. `by_queue` and `by_name` return a row for each. `bucket_s` should be a multiple of 60, and of 3,600
    for times more than 48 hours ago. Otherwise, the counts of neighbouring spans are uneven.
    """
    parameters = {
        "since": since, "until": until, "bucket_s": bucket_s, "queue": queue, "name": name, "by_queue": by_queue, "by_name": by_name,
    }  # fmt: skip
    return Statement("series/list_rates", parameters, rows.each(RateBucket))


def depths(
    *, since: datetime, until: datetime, bucket_s: int, queue: str | None = None
) -> Statement[list[DepthBucket]]:
    """List the largest counts of each queue in each span of `bucket_s` seconds from `since` to before `until`.

    A queue without live tasks has no row.
    """
    parameters = {"since": since, "until": until, "bucket_s": bucket_s, "queue": queue}
    return Statement("series/list_depths", parameters, rows.each(DepthBucket))


def latest_depths() -> Statement[LatestDepths]:
    """Return the last sample of all queues."""

    def read(found: Sequence[Row]) -> LatestDepths:
        if not found:
            return LatestDepths()
        return LatestDepths(
            found[0][0], found[0][-1], [DepthBucket(*row[:-1]) for row in found if row[1] is not None]
        )

    return Statement("series/list_latest_depths", {"service": SAMPLER}, read)


def sizes(*, since: datetime, until: datetime, bucket_s: int) -> Statement[list[SizeBucket]]:
    """List the largest sizes of the tables in each span of `bucket_s` seconds from `since` to before `until`."""
    parameters = {"since": since, "until": until, "bucket_s": bucket_s}
    return Statement("series/list_sizes", parameters, rows.each(SizeBucket))
