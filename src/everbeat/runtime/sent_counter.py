"""Count the tasks that an app sends in this process."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

from everbeat.domain.series import OTHER_NAME
from everbeat.runtime.fork import call_in_forked_child

MOST_KEPT: Final = 1_000
"""How many pairs of a queue and a task function are counted separately."""


class SentCounter:
    """Counts the tasks that an app stores in this process. Safe to use from any thread."""

    def __init__(self) -> None:
        self._begin()
        call_in_forked_child(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._totals: Counter[tuple[str, str]] = Counter()
        self._untaken: Counter[tuple[str, str]] = Counter()

    def count(self, queue: str, name: str) -> None:
        """Count one task."""
        with self._lock:
            if (queue, name) not in self._totals and len(self._totals) >= MOST_KEPT:
                queue = name = OTHER_NAME
            self._totals[queue, name] += 1
            self._untaken[queue, name] += 1

    def take(self) -> list[tuple[str, str, int]]:
        """Return the counts since the last call, each with its queue and task function."""
        with self._lock:
            taken, self._untaken = self._untaken, Counter()
        return [(queue, name, count) for (queue, name), count in taken.items()]

    def totals(self) -> dict[tuple[str, str], int]:
        """Return the counts since the start of the process, by queue and task function."""
        with self._lock:
            return dict(self._totals)
