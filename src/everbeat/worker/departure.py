"""How a worker leaves: no further claims, running code finishes within the grace, the rest is handed back, all is settled.

What lives here: the order of these steps, and the reasons to leave by itself. What may not: how code is stopped or
settled.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event
from everbeat.worker.attempt import ALONE, LaneName, Stage
from everbeat.worker.conductor import Conductor
from everbeat.worker.executor import Executor
from everbeat.worker.farewell import EXIT_CODE_RUNS, EXIT_ORDERLY, EXIT_SLOTS_LEAKED, EXIT_UNSETTLED
from everbeat.worker.leases import LeaseTable

LEAK_PATIENCE_S: Final = 5.0
"""Given-up code that ends within this time is no reason to replace the process."""
STOP_PATIENCE_S: Final = 5.0
"""How long a worker that was told to leave at once tries to settle."""
_LOOK_EVERY_S: Final = 1.0

_log = logging.getLogger("everbeat.worker")


class WorkerDrained(Event, frozen=True, kw_only=True):
    """A worker leaves: what became of the attempts it held when it was told to, and of those that `code_runs` left to its supervisor.

    `back`: PENDING again, handed back at no cost, suspended or to be retried. `failed`: also CANCELLED ones.
    """

    room = "worker"
    took_s: float
    completed: int
    back: int
    failed: int
    code_runs: int


class Departure:
    """`give_back()` begins to give back what waits unstarted, and answers the task that does."""

    def __init__(
        self,
        *,
        table: LeaseTable,
        conductor: Conductor,
        executors: Mapping[LaneName, Executor],
        clock: Clock,
        own_grace_s: float,
        give_back: Callable[[], asyncio.Task[None]],
        emit: Callable[[Event], None],
    ) -> None:
        self._table = table
        self._conductor = conductor
        self._executors = executors
        self._clock = clock
        self._own_grace_s = own_grace_s
        self._give_back = give_back
        self._emit = emit
        self._ordered_at = 0.0
        self._before: Counter[str] = Counter()
        self._unstarted = 0
        self._giving_back: asyncio.Task[None] | None = None
        self._ordered = asyncio.Event()
        self._changed = asyncio.Event()
        self._leave_at = math.inf
        self._give_up_at = math.inf
        self._exit_code = EXIT_ORDERLY

    def drain(self, *, grace_s: float) -> None:
        """Leave when running code has ended, at the latest after the grace; a second order can only shorten it."""
        self._leave_at = min(self._leave_at, self._clock.monotonic() + grace_s)
        if self._giving_back is None:
            self._ordered_at = self._clock.monotonic()
            self._before = Counter(self._conductor.outcomes)
            self._unstarted = len(self._table.at(Stage.CLAIMED))
            self._giving_back = self._give_back()
            self._giving_back.add_done_callback(lambda _: self._changed.set())
        self._ordered.set()
        self._changed.set()

    @property
    def is_urgent(self) -> bool:
        """Whether it is to leave within a grace, and not only when all has ended."""
        return math.isfinite(self._leave_at)

    def retire(self) -> None:
        """Leave when running code has ended, however long that takes."""
        self.drain(grace_s=math.inf)

    def stop(self) -> None:
        """Leave at once, within seconds even if the database cannot be reached."""
        self._give_up_at = min(self._give_up_at, self._clock.monotonic() + STOP_PATIENCE_S)
        self.drain(grace_s=0.0)
        self._conductor.stop_all("shutting_down")

    def changed(self, lane: LaneName) -> None:
        """A lease is over, or the code of an attempt has ended."""
        self._changed.set()
        # The code of a process can always be ended; that of the other two may keep its slot for ever.
        if lane not in ALONE and self._is_leaked(lane):
            asyncio.get_running_loop().call_later(LEAK_PATIENCE_S, self._replace_if_leaked, lane)

    async def carried_out(self) -> int:
        """Wait for the order, then leave; answers the exit code. EXIT_UNSETTLED: something is still held.

        What a recovery hook left is not waited for. EXIT_CODE_RUNS: code that does not end is all that is held;
        after leaked slots the code stays EXIT_SLOTS_LEAKED.
        """
        await self._ordered.wait()
        while self._has_running_code() and self._clock.monotonic() < self._leave_at:
            await self._wait_until(self._leave_at)
        while self._has_unsettled() or not (self._giving_back and self._giving_back.done()):
            self._conductor.stop_all("shutting_down")
            if self._clock.monotonic() >= self._give_up_at:
                return EXIT_UNSETTLED
            await self._wait_until(self._give_up_at)
        self._tell()
        if self._conductor.unstoppable and self._exit_code == EXIT_ORDERLY:
            return EXIT_CODE_RUNS
        return self._exit_code

    def _tell(self) -> None:
        since = self._conductor.outcomes - self._before
        self._emit(
            WorkerDrained(
                took_s=round(self._clock.monotonic() - self._ordered_at, 3),
                completed=since["COMPLETED"],
                back=since["PENDING"] + self._unstarted,
                failed=since["FAILED"] + since["CANCELLED"],
                code_runs=len(self._conductor.unstoppable),
            )
        )

    def _has_running_code(self) -> bool:
        return bool(self._table.at(Stage.RUNNING, Stage.STARTING) or self._conductor.trailing)

    def _has_unsettled(self) -> bool:
        # What a recovery hook left stays as it is: the sweeps of others offer it again.
        return any(
            attempt.stage is not Stage.LEFT and attempt not in self._conductor.unstoppable
            for attempt in self._table
        )

    async def _wait_until(self, moment: float) -> None:
        seconds = min(max(moment - self._clock.monotonic(), 0.0), _LOOK_EVERY_S)
        await self._clock.wait(self._changed, timeout_s=seconds)
        self._changed.clear()

    def _is_leaked(self, lane: LaneName) -> bool:
        executor = self._executors[lane]
        if executor.occupied < executor.slots:
            return False
        working = (*self._table.at(Stage.RUNNING), *self._conductor.trailing)
        return not any(attempt.lane == lane for attempt in working)

    def _replace_if_leaked(self, lane: LaneName) -> None:
        if self._is_leaked(lane) and not self._ordered.is_set():
            _log.error("slots_leaked lane=%s slots=%s", lane, self._executors[lane].slots)
            self._exit_code = EXIT_SLOTS_LEAKED
            self.drain(grace_s=self._own_grace_s)
