"""Counts over time: events of tasks, and tasks that wait. The classes of durations, and the records that reads return."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from msgspec import Struct

CLASS_BOUNDS_S: Final = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0, 1_800.0, 3_600.0, 14_400.0,
    43_200.0, 86_400.0,
)  # fmt: skip
"""The largest duration of each class, in seconds. The 24th class holds longer durations. Stored counts refer to these bounds: never change them."""
CLASSES: Final = len(CLASS_BOUNDS_S) + 1
OTHER_NAME: Final = "other"
"""The name under which a tree counts all task functions after the first 200."""


def class_of(seconds: float) -> int:
    """Return the index of the class that a duration belongs to."""
    return bisect_left(CLASS_BOUNDS_S, seconds)


def quantile_s(counts: Sequence[int], share: float) -> float | None:
    """Return the duration in seconds below which `share` (0 to 1) of the counted durations lie, or None if none was counted.

    Within its class, the position is interpolated. The result for the 24th class is its lower bound, a day.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = share * total, 0
    for index, count in enumerate(counts[: CLASSES - 1]):
        if count and below + count >= rank:
            lower = CLASS_BOUNDS_S[index - 1] if index else 0.0
            return lower + (CLASS_BOUNDS_S[index] - lower) * max(0.0, rank - below) / count
        below += count
    return CLASS_BOUNDS_S[-1]


class RateBucket(Struct, frozen=True):
    """The events of tasks in one span of time. `queue` and `name` are None if the counts are those of all queues or all task functions.

    `started` counts attempts whose code began, also after a sleep. `waits` counts starts by the seconds since the task was due. `runs` counts
    ends by the seconds since the start. `CLASS_BOUNDS_S` has the bounds of the classes. `wait_s` and `run_s` are the sums of these seconds.
    """

    at: datetime
    queue: str | None
    name: str | None
    started: int
    completed: int
    failed: int
    retried: int
    cancelled: int
    suspended: int
    released: int
    crashed: int
    lost: int
    expired: int
    wait_s: float
    run_s: float
    waits: Sequence[int]
    runs: Sequence[int]


class DepthBucket(Struct, frozen=True):
    """The largest counts of live tasks of a queue in one span of time. `scheduled` are tasks that are not due, without the suspended ones.

    Counting stops at 10,000 of each. `at_least` names the counts that can be too low. `oldest_due_s` is the age of the task that has been due
    for longest, in seconds.
    """

    at: datetime
    queue: str
    due: int
    scheduled: int
    suspended: int
    claimed: int
    running: int
    oldest_due_s: float | None
    at_least: Sequence[str] = ()


class LatestDepths(Struct, frozen=True):
    """The last sample of all queues: when it was taken, and how many seconds ago. Both are None if there is none.

    A queue without live tasks is missing.
    """

    sampled_at: datetime | None = None
    age_s: float | None = None
    queues: Sequence[DepthBucket] = ()


class SizeBucket(Struct, frozen=True):
    """The largest sizes in one span of time.

    `table_bytes` are those of all tables with their indexes. `oldest_transaction_s` is the age of the oldest transaction, in seconds.
    """

    at: datetime
    table_bytes: int
    dead_rows: int
    oldest_transaction_s: float | None
