"""The figures of a worker over time: a line of its last snapshots, and the same in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from markupsafe import Markup
from msgspec import Struct

from everbeat.domain.inspection import WorkerStateInfo
from everbeat.errors.wording import brief_duration
from everbeat.web.strip_drawing import sparkline

_MIB: Final = 2**20


class SnapshotLine(Struct, frozen=True):
    """One figure: its name, its line, its last value, and the lowest and the highest value in words."""

    name: str
    drawing: Markup
    last: str
    range: str


class _Figure(Struct, frozen=True):
    name: str
    unit: str
    value: Callable[[WorkerStateInfo], float]


_FIGURES: Final = (
    _Figure("RSS", " MiB", lambda each: each.rss_bytes / _MIB),
    _Figure("CPU", " %", lambda each: each.cpu_percent),
    _Figure("Loop lag", " ms", lambda each: each.loop_lag_ms),
    _Figure("Running", "", lambda each: each.running),
)
NAMES: Final = tuple(figure.name for figure in _FIGURES)


def lines_of(newest_first: Sequence[WorkerStateInfo]) -> list[SnapshotLine]:
    """Return the figures of the snapshots of one worker, or none without a snapshot."""
    snapshots = [*reversed(newest_first)]
    return [_line(figure, snapshots) for figure in _FIGURES] if snapshots else []


def _line(figure: _Figure, snapshots: Sequence[WorkerStateInfo]) -> SnapshotLine:
    values = [value for each in snapshots if math.isfinite(value := figure.value(each))]
    if not values:
        return SnapshotLine(figure.name, Markup(""), "unknown", "")
    last = f"{values[-1]:.0f}{figure.unit}"
    if figure.name == "Running":
        last = f"{last} of {snapshots[-1].slots}"
    if len(values) == 1:
        return SnapshotLine(figure.name, Markup(""), last, "")
    span = brief_duration((snapshots[-1].at - snapshots[0].at).total_seconds())
    between = f"{min(values):.0f} to {max(values):.0f}{figure.unit} in {span}"
    return SnapshotLine(
        figure.name, sparkline(values, label=f"{figure.name}, {between}, now {last}"), last, between
    )
