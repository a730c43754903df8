"""Decides when a worker process must be replaced, and shuts the worker down.

During the shutdown, the worker stops claiming, waits for running code, and settles or releases the remaining attempts.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal, Self, TypeAlias

from msgspec import Struct

from everbeat.config import WorkerConfig
from everbeat.runtime.events import Event
from everbeat.runtime.identity import rss_bytes
from everbeat.runtime.main_loop import EXIT_CODE_RUNS, EXIT_ORDERLY, EXIT_SLOTS_LEAKED, EXIT_UNSETTLED
from everbeat.worker.attempt import ALONE, CODE_RUNS, ExecutorName, Stage
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.executors.executor import Executor
from everbeat.worker.leases import LeaseTable
from everbeat.worker.lifecycle import AttemptLifecycle
from everbeat.worker.messages import DrainStarted, LimitReached

LEAK_PATIENCE_S: Final = 5.0
"""How long abandoned code can occupy all slots of an executor before the process is replaced, in seconds."""
STOP_PATIENCE_S: Final = 5.0
"""How long a worker that must exit immediately keeps trying to settle its attempts, in seconds."""
LAST_S: Final = 1.0
"""How long the resources of a worker can take to close if no grace period is left, in seconds."""
_CHECK_EVERY_S: Final = 1.0

_log = logging.getLogger("everbeat.worker")


class WorkerDrained(Event, frozen=True, kw_only=True):
    """A worker has finished draining.

    The fields count the attempts that the worker held when draining began. `back`: attempts whose tasks are PENDING again, because
    they were released without using up an attempt, were suspended, or will be retried. `failed`: attempts that failed or were
    cancelled. `code_runs`: attempts that are left to the supervisor because their code is still running.
    """

    component = "worker"
    took_s: float
    completed: int
    back: int
    failed: int
    code_runs: int


class Shutdown:
    """Decides when the worker exits, and with which exit code."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        table: LeaseTable,
        lifecycle: AttemptLifecycle,
        executors: Mapping[ExecutorName, Executor],
    ) -> None:
        self._environment = environment
        self._clock = environment.clock
        self._table = table
        self._lifecycle = lifecycle
        self._executors = executors
        self._ordered_at = 0.0
        self._before: Counter[str] = Counter()
        self._unstarted = 0
        self._claimer_closed = False
        self._ordered = asyncio.Event()
        self._changed = asyncio.Event()
        self._leave_at = math.inf
        self._give_up_at = math.inf
        self._exit_code = EXIT_ORDERLY

    def drain(self, *, grace_s: float) -> None:
        """Begin to shut down. Exit when running code has finished, or after `grace_s` seconds at the latest.

        A later call can only shorten the grace period.
        """
        self._leave_at = min(self._leave_at, self._clock.monotonic() + grace_s)
        if not self._ordered.is_set():
            self._ordered.set()
            self._ordered_at = self._clock.monotonic()
            self._before = Counter(self._lifecycle.outcomes)
            self._unstarted = len(self._table.at(Stage.CLAIMED))
            self._environment.send(DrainStarted())
        self._changed.set()

    def claimer_closed(self) -> None:
        """Record that the claimer has released all tasks that had not started, or has failed in the attempt."""
        self._claimer_closed = True
        self._changed.set()

    @property
    def is_urgent(self) -> bool:
        """Return whether the worker must exit within a grace period, even if code has not finished."""
        return math.isfinite(self._leave_at)

    def left_s(self, *, at_most: float) -> float:
        """Return how many seconds of the grace period are left, but at least `LAST_S` and at most this many."""
        return min(at_most, max(LAST_S, self._leave_at - self._clock.monotonic()))

    def retire(self) -> None:
        """Begin to shut down, and exit when running code has finished, however long that takes."""
        self.drain(grace_s=math.inf)

    def stop(self) -> None:
        """Begin to shut down, and exit within seconds, even if the database cannot be reached."""
        self._give_up_at = min(self._give_up_at, self._clock.monotonic() + STOP_PATIENCE_S)
        self.drain(grace_s=0.0)
        self._lifecycle.stop_all("shutting_down")

    def changed(self, executor_name: ExecutorName) -> None:
        """Check an executor for leaked slots, because one of its leases is over or some of its code has finished."""
        self._changed.set()
        # Code in a task process can always be killed. Code on the loop or in a thread might occupy its slot forever.
        if executor_name not in ALONE and self._is_leaked(executor_name):
            asyncio.get_running_loop().call_later(LEAK_PATIENCE_S, self._replace_if_leaked, executor_name)

    async def carried_out(self) -> int:
        """Wait until the worker is asked to shut down, shut it down, and return the exit code.

        EXIT_UNSETTLED: some attempts are still held. EXIT_CODE_RUNS: only attempts whose code does not stop are still held.
        EXIT_SLOTS_LEAKED: the worker is shutting down because of leaked slots. The worker does not wait for attempts that a recovery
        hook left unchanged.
        """
        await self._ordered.wait()
        while self._has_running_code() and self._clock.monotonic() < self._leave_at:
            await self._wait_until(self._leave_at)
        while self._has_unsettled() or not self._claimer_closed:
            self._lifecycle.stop_all("shutting_down")
            if self._clock.monotonic() >= self._give_up_at:
                return EXIT_UNSETTLED
            await self._wait_until(self._give_up_at)
        self._report()
        if self._lifecycle.unstoppable and self._exit_code == EXIT_ORDERLY:
            return EXIT_CODE_RUNS
        return self._exit_code

    def _report(self) -> None:
        since = self._lifecycle.outcomes - self._before
        self._environment.events.emit(
            WorkerDrained(
                took_s=round(self._clock.monotonic() - self._ordered_at, 3),
                completed=since["COMPLETED"],
                back=since["PENDING"] + self._unstarted,
                failed=since["FAILED"] + since["CANCELLED"],
                code_runs=len(self._lifecycle.unstoppable),
            )
        )

    def _has_running_code(self) -> bool:
        return bool(self._table.at(Stage.STARTING, *CODE_RUNS) or self._lifecycle.running_after_commit)

    def _has_unsettled(self) -> bool:
        # An attempt that a recovery hook left needs no settlement here: other supervisors' sweeps offer it to the hook again.
        return any(attempt.stage is not Stage.LEFT and not attempt.is_unstoppable for attempt in self._table)

    async def _wait_until(self, moment: float) -> None:
        seconds = min(max(moment - self._clock.monotonic(), 0.0), _CHECK_EVERY_S)
        await self._clock.wait(self._changed, timeout_s=seconds)
        self._changed.clear()

    def _is_leaked(self, executor_name: ExecutorName) -> bool:
        executor = self._executors[executor_name]
        if executor.occupied < executor.slots:
            return False
        working = (*self._table.at(*CODE_RUNS), *self._lifecycle.running_after_commit)
        return not any(attempt.executor_name == executor_name for attempt in working)

    def _replace_if_leaked(self, executor_name: ExecutorName) -> None:
        if self._is_leaked(executor_name) and not self._ordered.is_set():
            slots = self._executors[executor_name].slots
            _log.error("slots_leaked executor=%s slots=%s", executor_name, slots)
            self._exit_code = EXIT_SLOTS_LEAKED
            self.drain(grace_s=self._environment.plan.config.grace_s)


RecyclingReason: TypeAlias = Literal["max_tasks_per_process", "max_rss"]

_NEVER_S: Final = 3_600.0


class RecyclingOff(Event, frozen=True, kw_only=True):
    """The `max_rss` limit is ignored, because a new process already exceeds it and replacing the process would not help."""

    component = "worker"
    level = logging.ERROR
    pid: int
    max_rss_bytes: int
    rss_bytes: int


class RecyclingLimits(Struct, frozen=True, kw_only=True):
    """The limits at which a process is replaced. `None` means no limit."""

    tasks: int | None = None
    rss_bytes: int | None = None

    @classmethod
    def of(cls, config: WorkerConfig) -> Self:
        """Return the limits in the settings."""
        return cls(tasks=config.max_tasks_per_process, rss_bytes=config.max_rss_bytes)

    def reached(self, *, tasks: int, rss_bytes: int) -> RecyclingReason | None:
        """Return the name of the limit that a process has reached, or None if it has reached no limit."""
        if self.tasks is not None and tasks >= self.tasks:
            return "max_tasks_per_process"
        if self.rss_bytes is not None and rss_bytes >= self.rss_bytes:
            return "max_rss"
        return None


class Recycling:
    """A service that sends `LimitReached` once, when this process has reached its task limit or its memory limit.

    The message is sent after the current batch of tasks has started, so that it counts the whole batch.
    """

    name = "recycling"
    interval_s = _CHECK_EVERY_S

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        self._limits = RecyclingLimits.of(environment.plan.config)
        self._events = environment.events
        self._send = environment.send
        self._tasks = 0
        self._is_fresh = True
        self._is_due = False

    def count_launched(self, attempts: int = 1) -> None:
        """Count attempts whose code has started in this process, and check the limits."""
        self._tasks += attempts
        if self._limits.tasks is not None and self._tasks >= self._limits.tasks:
            self._check()

    async def tick(self) -> float | None:
        """Check the process's memory use and task count against the limits."""
        if self._is_fresh:
            self._is_fresh = False
            self._drop_useless_limit()
        self._check()
        return None if self._limits.rss_bytes is not None else _NEVER_S

    def _check(self) -> None:
        size = rss_bytes() or 0
        reason = self._limits.reached(tasks=self._tasks, rss_bytes=size)
        if reason is not None and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._report, reason, size)

    def _report(self, reason: RecyclingReason, size: int) -> None:
        self._send(LimitReached(reason, self._tasks, size))

    def _drop_useless_limit(self) -> None:
        """Drop a memory limit that a new process has already reached. Otherwise, every new process would be replaced at once."""
        limit, size = self._limits.rss_bytes, rss_bytes() or 0
        if limit is not None and size >= limit:
            self._limits = RecyclingLimits(tasks=self._limits.tasks)
            self._events.emit(RecyclingOff(pid=os.getpid(), max_rss_bytes=limit, rss_bytes=size))
