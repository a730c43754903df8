"""Statements that group failed tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from everbeat.domain.inspection import HOURS, FailureGroup, FailurePage
from everbeat.domain.labels import NO_LABELS, encode_labels
from everbeat.domain.settings.units import When
from everbeat.store.inspection import moment_or_age
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_GROUPED: Final = 10_000
"""How many FAILED tasks, and how many of the newest tasks, a list of groups examines. Their errors with tracebacks take some kilobytes each."""


def failure_groups(
    *,
    name: str | None = None,
    queue: str | None = None,
    since: When | None = None,
    before: datetime | None = None,
    labels: Mapping[str, str] = NO_LABELS,
    label_keys: Sequence[str] = (),
    limit: int,
    most: int = MOST_GROUPED,
) -> Statement[FailurePage]:
    """Group the tasks that FAILED or EXPIRED by name, error code and class, the latest group first.

    At most `most` FAILED tasks are examined, and the EXPIRED tasks among the `most` newest tasks. `label_keys` are the keys of labels that
    can have any value.
    """
    parameters = {
        "name": name, "queue": queue, "before": before, "labels": encode_labels(labels), "label_keys": [*label_keys] or None, "limit": limit,
        "most": most,
    }  # fmt: skip

    def read(found: Sequence[Row]) -> FailurePage:
        groups = [FailureGroup(*(*row[:9], _by_hour(row[10]))) for row in found if row[0] is not None]
        before = found[0][9]
        return FailurePage(groups, examined=None if before is None else most, continue_before=before)

    return Statement("inspect/group_failures", parameters | moment_or_age(since), read)


def _by_hour(hours_ago: Sequence[int] | None) -> tuple[int, ...]:
    """Return how many failures each of the last 24 hours had, the latest hour last."""
    counted = Counter(hours_ago or ())
    return tuple(counted[hour] for hour in reversed(range(HOURS)))
