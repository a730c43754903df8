"""What a worker tells its supervisor once a second: which leases came and went, and how it looks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sized
from typing import Any, Final

from everbeat.runtime.clock import Clock
from everbeat.runtime.identity import cpu_seconds
from everbeat.worker.attempt import LaneName, Stage
from everbeat.worker.executor import Executor
from everbeat.worker.leases import LeaseTable
from everbeat.worker.link import Link
from everbeat.worker.protocol import REPORT_EVERY_S, Held, Tick

MOST_NAMES: Final = 20


def _no_messages() -> None:
    """A worker that the database tells of tasks."""


class Reporter:
    """A service."""

    name = "reporter"
    interval_s = REPORT_EVERY_S

    def __init__(
        self,
        link: Link,
        *,
        table: LeaseTable,
        executors: Mapping[LaneName, Executor],
        clock: Clock,
        loop_lag_s: Callable[[], float],
        cut_off_s: Callable[[], float],
        astray: Sized,
        wake: asyncio.Event,
        messages: Callable[[], dict[str, Any] | None] = _no_messages,
    ) -> None:
        self.wake = wake
        self._link = link
        self._table = table
        self._executors = executors
        self._clock = clock
        self._loop_lag_s = loop_lag_s
        self._cut_off_s = cut_off_s
        self._astray = astray
        self._messages = messages
        self._looked_at = clock.monotonic()
        self._cpu_s = cpu_seconds() or 0.0

    async def tick(self) -> float | None:
        """Tell both."""
        self.tell_held()
        self._link.tell(self._look())
        return None

    def tell_held(self) -> None:
        """Tell which leases came and went since the last time."""
        added, removed = self._table.changes()
        if added or removed:
            self._link.tell(Held(added, removed))

    def _look(self) -> Tick:
        now, cpu_s = self._clock.monotonic(), cpu_seconds() or 0.0
        elapsed_s, used_s = max(now - self._looked_at, 0.001), cpu_s - self._cpu_s
        self._looked_at, self._cpu_s = now, cpu_s
        running = self._table.at(Stage.RUNNING)
        names = sorted({attempt.task.name for attempt in running})
        return Tick(
            running=len(running),
            claimed=len(self._table.at(Stage.CLAIMED, Stage.STARTING)),
            slots=sum(each.slots for lane, each in self._executors.items() if lane != "solo"),
            cpu_percent=100.0 * used_s / elapsed_s,
            loop_lag_ms=self._loop_lag_s() * 1_000,
            names=names[:MOST_NAMES],
            cut_off_s=self._cut_off_s(),
            astray=len(self._astray),
            messages=self._messages(),
        )
