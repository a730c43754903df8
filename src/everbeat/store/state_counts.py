"""Statements that count tasks by state for the tabs of the dashboard. Each reads a bounded number of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from everbeat.domain.task.states import OVERDUE_MS
from everbeat.store import rows
from everbeat.store.rows import Row
from everbeat.store.statement import Statement

MOST_COUNTED: Final = 10_000
"""Up to how many tasks of a state are counted exactly."""


class NewestCounts(Struct, frozen=True):
    """The numbers of the newest tasks, `examined` of them, by state and virtual state."""

    examined: int
    pending: int
    running: int
    completed: int
    failed: int
    cancelled: int
    expired: int
    retrying: int
    scheduled: int
    suspended: int
    overdue: int
    suspect: int


class LiveCounts(Struct, frozen=True):
    """The numbers of live tasks and of failures by state and virtual state. Those in `at_least` can be too low, because counting stopped early."""

    pending: int
    running: int
    failed: int
    retrying: int
    scheduled: int
    suspended: int
    overdue: int
    suspect: int
    at_least: Sequence[str]


class Estimates(Struct, frozen=True):
    """About how many tasks there are, and how many in each state. A state that is rare can be missing."""

    tasks: int
    by_state: Mapping[str, int]


def newest(*, most: int = MOST_COUNTED) -> Statement[NewestCounts]:
    """Count the newest tasks. If `examined` is at most `most`, these are all tasks."""
    return Statement("inspect/count_newest", _limits(most), rows.only(NewestCounts))


def live(*, most: int = MOST_COUNTED) -> Statement[LiveCounts]:
    """Count the live tasks and the failures. Counting stops above `most` tasks of a kind."""
    return Statement("inspect/count_live", _limits(most), rows.only(LiveCounts))


def estimates(schema: str) -> Statement[Estimates]:
    """Return the estimates that the server's statistics allow."""

    def read(found: Sequence[Row]) -> Estimates:
        by_state = {state: count for state, count in found if state is not None}
        return Estimates(next(count for state, count in found if state is None), by_state)

    return Statement("inspect/estimate_states", {"schema": schema}, read)


def _limits(most: int) -> dict[str, int]:
    return {"most": most, "overdue_ms": OVERDUE_MS}
