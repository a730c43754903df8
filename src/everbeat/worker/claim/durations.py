"""How long the code of each function usually runs, which decides how many tasks to claim ahead."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from typing import Final

from everbeat.runtime.clock import Clock

PREFETCH_WITHIN_S: Final = 0.25
"""The maximum time until a prefetched task is expected to start, in seconds."""
NO_PREFETCH_S: Final = 5.0
"""How long a function's tasks are not prefetched after some of them waited too long and were released, in seconds."""
LAST_RUNS: Final = 100
FEWEST_RUNS: Final = 10
"""A function with fewer recorded runs is treated as slow, because the 90th percentile of fewer than ten runs is their maximum."""
_SHORTEST_S: Final = 1e-6


class RunDurations:
    """Estimates how long each function runs: the 90th percentile of its last 100 runs.

    A function is treated as slow until it has been measured, and for a while after `stop_prefetch`.
    """

    def __init__(self, clock: Clock) -> None:
        self.now = clock.monotonic
        self._runs: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LAST_RUNS))
        self._known: dict[str, float] = {}
        self._no_prefetch_until: dict[str, float] = {}

    def ran(self, name: str, took_s: float) -> None:
        """Record that a run of this function held its slot for `took_s` seconds."""
        self._runs[name].append(took_s)
        self._known.pop(name, None)

    def stop_prefetch(self, names: Iterable[str]) -> None:
        """Treat these functions as slow for `NO_PREFETCH_S` seconds, because some of their tasks waited too long for a slot."""
        self._no_prefetch_until |= dict.fromkeys(names, self.now() + NO_PREFETCH_S)

    def slowest_s(self, names: Iterable[str]) -> float:
        """Return the longest estimate for these functions, in seconds.

        The estimate is infinite if one of the functions is treated as slow, or if `names` is empty.
        """
        return max(map(self._of, names), default=math.inf)

    def is_fast(self, name: str) -> bool:
        """Return whether runs of this function are short enough for its tasks to be prefetched."""
        return self._of(name) <= PREFETCH_WITHIN_S

    def runs_within(self, names: Iterable[str], seconds: float) -> int:
        """Return how many consecutive runs of the slowest of these functions fit into this many seconds."""
        return int(seconds / max(_SHORTEST_S, self.slowest_s(names)))

    def _of(self, name: str) -> float:
        if name in self._no_prefetch_until:
            if self.now() < self._no_prefetch_until[name]:
                return math.inf
            del self._no_prefetch_until[name]
        if name not in self._known:
            runs = sorted(self._runs.get(name, ()))
            self._known[name] = runs[math.ceil(0.9 * len(runs)) - 1] if len(runs) >= FEWEST_RUNS else math.inf
        return self._known[name]
