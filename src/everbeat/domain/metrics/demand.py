"""How many slots the tasks of a queue need."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from everbeat.domain.series import RateBucket

WITHIN_S: Final = 60.0
"""The time within which all due tasks of a queue should start, in seconds."""
RUNS_OF_S: Final = 900.0
"""The mean run time is that of the attempts that ended in the last minutes, in seconds."""


def mean_run_s(buckets: Iterable[RateBucket]) -> dict[str, float]:
    """Return the mean run time of each queue in seconds. A queue in which no attempt ended is missing."""
    seconds: dict[str, float] = {}
    ends: dict[str, int] = {}
    for each in buckets:
        if each.queue is not None:
            seconds[each.queue] = seconds.get(each.queue, 0.0) + each.run_s
            ends[each.queue] = ends.get(each.queue, 0) + sum(each.runs)
    return {queue: seconds[queue] / count for queue, count in ends.items() if count}


def slots_wanted(*, due: int, held: int, run_s: float | None, is_paused: bool = False) -> int:
    """Return with how many slots all due tasks would start within a minute: those in use, and more for the due tasks.

    `run_s` is the mean run time. If it is unknown, one more slot is wanted than is in use, so that a worker starts and the time gets known.
    In a paused queue no due task starts.
    """
    if is_paused or due <= 0:
        return held
    return held + 1 if run_s is None else held + max(1, math.ceil(due * run_s / WITHIN_S))
