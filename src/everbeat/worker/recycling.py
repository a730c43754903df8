"""When a process has done enough: after so many tasks, or grown to such a size, it makes room for a fresh one.

What lives here: the limits, and a worker process's watch on itself. What may not: how it is replaced (`posts`), and how task
processes are (`process_executor`).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Final, Literal, TypeAlias

from msgspec import Struct

from everbeat.config import WorkerConfig
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.identity import rss_bytes

Reason: TypeAlias = Literal["max_tasks_per_process", "max_rss"]

_LOOK_EVERY_S: Final = 1.0
_NEVER_S: Final = 3_600.0


class ProcessRecycled(Event, frozen=True, kw_only=True):
    """A worker or task process reached a limit; it finishes what it has begun, and a fresh one takes its place.

    `tasks`: so many have run in this process, or run in it still.
    """

    room = "worker"
    pid: int
    reason: str
    tasks: int
    rss_bytes: int


class RecyclingOff(Event, frozen=True, kw_only=True):
    """A fresh process is larger than max_rss already, so replacing it would help nothing: the limit is ignored."""

    room = "worker"
    level = logging.ERROR
    pid: int
    max_rss_bytes: int
    rss_bytes: int


class Limits(Struct, frozen=True, kw_only=True):
    """What a process may do before it is replaced; None without a limit."""

    tasks: int | None = None
    rss_bytes: int | None = None

    @classmethod
    def of(cls, config: WorkerConfig) -> Limits:
        """Those of the settings."""
        return cls(tasks=config.max_tasks_per_process, rss_bytes=config.max_rss_bytes)

    def reached(self, *, tasks: int, rss_bytes: int) -> Reason | None:
        """Which of them a process has reached, if any."""
        if self.tasks is not None and tasks >= self.tasks:
            return "max_tasks_per_process"
        if self.rss_bytes is not None and rss_bytes >= self.rss_bytes:
            return "max_rss"
        return None


class Recycling:
    """A service of a worker process. `on_due(reason, tasks, rss_bytes)` is told once, when a limit is reached.

    Not in the midst of a batch that starts: what starts in the same moment is counted too.
    """

    name = "recycling"
    interval_s = _LOOK_EVERY_S

    def __init__(
        self,
        limits: Limits,
        *,
        events: EventBus,
        on_due: Callable[[Reason, int, int], None],
    ) -> None:
        self.wake = asyncio.Event()
        self._limits = limits
        self._events = events
        self._on_due = on_due
        self._tasks = 0
        self._is_fresh = True
        self._is_due = False

    def begun(self, attempts: int = 1) -> None:
        """The code of so many more attempts began in this process."""
        self._tasks += attempts
        if self._limits.tasks is not None and self._tasks >= self._limits.tasks:
            self._look()

    async def tick(self) -> float | None:
        """One look at the size."""
        if self._is_fresh:
            self._is_fresh = False
            self._check_limit()
        self._look()
        return None if self._limits.rss_bytes is not None else _NEVER_S

    def _look(self) -> None:
        size = rss_bytes() or 0
        reason = self._limits.reached(tasks=self._tasks, rss_bytes=size)
        if reason is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(lambda: self._on_due(reason, self._tasks, size))

    def _check_limit(self) -> None:
        """Otherwise processes would follow each other without end."""
        limit, size = self._limits.rss_bytes, rss_bytes() or 0
        if limit is not None and size >= limit:
            self._limits = Limits(tasks=self._limits.tasks)
            self._events.emit(RecyclingOff(pid=os.getpid(), max_rss_bytes=limit, rss_bytes=size))
