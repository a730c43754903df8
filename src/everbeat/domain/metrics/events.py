"""Totals of a tree that are not counts of attempts: recovered leases, refused writes and sent tasks."""

from __future__ import annotations

from collections import Counter, deque
from typing import Final

from everbeat.domain.metrics.text import Histogram
from everbeat.domain.series import CLASS_BOUNDS_S, EventCounts, RecoveredLease

MOST_RECENT: Final = 1_000
"""How many recovered tasks a supervisor remembers until it has read when they ran again."""


class EventTotals:
    """The counts of a tree since its start, by the labels of the metrics. `recent` are recovered tasks that might run again."""

    def __init__(self) -> None:
        self.recoveries: Counter[tuple[str, str, str, str]] = Counter()
        self.notices: dict[tuple[str], Histogram] = {}
        self.reruns: dict[tuple[str], Histogram] = {}
        self.poisoned: Counter[tuple[str]] = Counter()
        self.refused: Counter[tuple[str]] = Counter()
        self.sent: Counter[tuple[str, str]] = Counter()
        self.recent: deque[RecoveredLease] = deque(maxlen=MOST_RECENT)

    def add(self, counts: EventCounts) -> None:
        """Add counts that were taken from a process."""
        for each in counts.recovered:
            self.recoveries[each.queue, each.was, each.noticed_by, each.action] += 1
            _observe(self.notices, each.noticed_by, each.notice_s)
            if each.is_poison:
                self.poisoned[(each.name,)] += 1
            if each.action not in ("fail", "cancel"):
                self.recent.append(each)
        for verb, count in counts.refused.items():
            self.refused[(verb,)] += count
        for queue, name, count in counts.sent:
            self.sent[queue, name] += count

    def ran_again(self, noticed_by: str, after_s: float) -> None:
        """Count a recovered task whose code began again `after_s` seconds after the dead holder's last sign of life."""
        _observe(self.reruns, noticed_by, after_s)


def _observe(histograms: dict[tuple[str], Histogram], label: str, seconds: float) -> None:
    if (label,) not in histograms:
        histograms[(label,)] = Histogram.empty(CLASS_BOUNDS_S)
    histograms[(label,)].observe(max(0.0, seconds))
