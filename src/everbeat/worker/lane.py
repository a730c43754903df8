"""A lane: the tasks of one mode (async, thread, process) or the suspects of any, their slots, and those that wait for a slot.

What lives here: the arithmetic of how much to claim and to start. What may not: statements.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.worker.attempt import Attempt, LaneName, Stage
from everbeat.worker.executor import Executor

LOWEST_QUEUE_PRIORITY = 100
_LONGEST_PAUSE_S: Final = 30.0


class Lane(Struct, kw_only=True):
    """`has_more`: tasks may be due that nobody looked for yet. `unsettled()`: how many outcomes are on their way.

    `suspects`: True takes only suspects, False leaves them to others, None makes no difference.
    """

    name: LaneName
    names: tuple[str, ...]
    executor: Executor
    prefetch: int
    queue_priorities: Mapping[str, int]
    unsettled: Callable[[], int]
    suspects: bool | None = None
    waiting: list[Attempt] = []
    has_more: bool = True
    is_broken: bool = False
    paused_until: float = 0.0
    failures: int = 0

    @property
    def wanted(self) -> int:
        """How many more to claim: for free slots and a few ahead; fewer, and none ahead, while settling lags behind."""
        held = self.executor.occupied + len(self.waiting) + self._lag
        # What cannot be started for now would be kept from others.
        ahead = 0 if self._lag else self.prefetch
        return max(0, self.executor.slots + ahead - held)

    @property
    def startable(self) -> int:
        """How many of those waiting could begin now."""
        return max(0, min(self.executor.free - self._lag, len(self.waiting)))

    @property
    def spare(self) -> int:
        """How many more could begin right now: none while others wait, which would be overtaken."""
        return 0 if self.waiting else max(0, self.executor.free - self._lag)

    @property
    def _lag(self) -> int:
        # Memory stays bounded by two attempts a slot when outcomes cannot be written.
        return max(0, self.unsettled() - self.executor.slots)

    def rest(self, now: float) -> list[Attempt]:
        """Its processes do not come up: it claims nothing for a while, longer each time. Answers what waited."""
        self.is_broken, self.has_more = False, True
        self.failures += 1
        self.paused_until = now + min(0.5 * 2.0 ** min(self.failures - 1, 10), _LONGEST_PAUSE_S)
        waiting, self.waiting = self.waiting, []
        return waiting

    def add(self, attempt: Attempt) -> None:
        """Queue a claimed attempt in the order of service: a later claim may have brought a more urgent one."""
        insort(self.waiting, attempt, key=self._rank)

    def take(self) -> list[Attempt]:
        """Those to start now; what was lost while it waited falls out."""
        self.waiting = [attempt for attempt in self.waiting if attempt.stage is Stage.CLAIMED]
        self.executor.prepare(len(self.waiting))
        count = self.startable
        taken, self.waiting = self.waiting[:count], self.waiting[count:]
        return taken

    def _rank(self, attempt: Attempt) -> tuple[int, int, datetime, int]:
        task = attempt.task
        queue_priority = self.queue_priorities.get(task.queue, LOWEST_QUEUE_PRIORITY)
        return queue_priority, task.priority, task.enqueued_at, task.id.int
