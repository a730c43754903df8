"""Keeps the series of charts for all viewers of a process, because their numbers change slowly and a long range reads many rows."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, Final, TypeVar

from everbeat.domain.charts import ChartRange
from everbeat.runtime.clock import Clock, SystemClock

T = TypeVar("T")
_MOST_KEPT: Final = 64
_SHORTEST_S: Final = 10.0
"""Supervisors write rates and depths at this interval."""
_LONGEST_S: Final = 300.0
_SHARE: Final = 1 / 6
"""For which share of a span its chart is kept."""


class _Kept:
    """One reading: its value, until when it is fresh, and a lock, so that viewers who come together share it."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.until = float("-inf")
        self.value: Any = None


class KeptCharts:
    """Reads series at most once in a sixth of their spans. The readings that were used last are kept."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()

    async def read(self, key: Hashable, chosen: ChartRange, reading: Callable[[], Awaitable[T]]) -> T:
        """Return what `reading` returned last for this key and range, if that is fresh. An error of `reading` is raised and not kept."""
        fresh_s = min(_LONGEST_S, max(_SHORTEST_S, chosen.bucket_s * _SHARE))
        return await self.read_for((chosen.name, key), fresh_s, reading)

    async def read_for(self, key: Hashable, fresh_s: float, reading: Callable[[], Awaitable[T]]) -> T:
        """Return what `reading` returned last for this key, if that was less than `fresh_s` seconds ago."""
        kept = self._kept.setdefault(key, _Kept())
        self._kept.move_to_end(key)
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        async with kept.lock:
            if self._clock.monotonic() >= kept.until:
                kept.value = await reading()
                kept.until = self._clock.monotonic() + fresh_s
            value: T = kept.value
        return value
