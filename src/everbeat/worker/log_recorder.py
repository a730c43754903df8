"""Writes the captured logs of attempts: one statement per second for all attempts, on its own session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Final

from everbeat.domain.task.captured_log import UnwrittenPart, level_number
from everbeat.errors import DatabaseError
from everbeat.runtime.log_buffer import LogBuffer, LogMemory
from everbeat.runtime.log_capture import start_capturing, stop_capturing
from everbeat.store.attempt_logs import LogPlace, write_parts
from everbeat.store.refusals import is_refused_row
from everbeat.store.session import Session
from everbeat.worker.attempt import Attempt
from everbeat.worker.environment import WorkerEnvironment, WorkerPlan

WRITE_EVERY_S: Final = 1.0
PORTION_BYTES: Final = 1_048_576
"""From this size of its parts on, a statement contains no further log."""
MOST_WAITING: Final = 10_000
"""The maximum number of logs that wait to be written. The lines of other logs are not kept."""
MOST_WAITING_BYTES: Final = 67_108_864
"""The maximum size of all lines that wait to be written. Further lines are not kept, so that a worker does not run out of memory."""
LAST_S: Final = 1.0
"""How long a worker that exits can take to write the last lines, in seconds."""

_log = logging.getLogger("everbeat.worker")


class AttemptLog(LogBuffer):
    """The log of one attempt of this worker."""

    def __init__(self, attempt: Attempt, recorder: LogRecorder, *, level: int) -> None:
        super().__init__(level, lambda: recorder.note(self), memory=recorder.memory)
        self.place: Final = LogPlace(attempt.id, attempt.number, attempt.claim_id)


class LogRecorder:
    """A service that writes the captured logs.

    A log belongs to a claim, not to a lease. So it is written after the attempt has ended, too, and so is what the code of a lost lease
    still logs. No other statement waits for it.
    """

    name = "captured logs"
    interval_s = 3_600.0

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        plan, identity = environment.plan, environment.identity
        self._levels = captured_levels(plan)
        self._clock = environment.clock
        self._loop = asyncio.get_running_loop()
        self._session = Session(plan.target, identity.session_name, random=environment.random, keyed=True)
        self._waiting: dict[AttemptLog, None] = {}
        self.memory: Final = LogMemory(most_bytes=MOST_WAITING_BYTES)
        self._written_at = float("-inf")
        self._is_refused = False

    @property
    def is_needed(self) -> bool:
        """Return whether the log of any task is captured."""
        return bool(self._levels)

    def open(self, attempt: Attempt) -> None:
        """Begin the log of an attempt whose code is about to start, if it is to be captured."""
        if (level := self._levels.get(attempt.task.name)) is not None:
            attempt.log = AttemptLog(attempt, self, level=level)
            if attempt.executor_name in ("async", "thread"):
                start_capturing()

    def note(self, log: AttemptLog) -> None:
        """Write the log soon. Safe to call from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, because the worker has shut down
            self._loop.call_soon_threadsafe(self._note, log)

    def rename(self, session_name: str) -> None:
        """Give the session another name, because the worker continues with other ids."""
        self._session.rename(session_name)

    async def tick(self) -> float | None:
        """Write what is new, at most once per second."""
        if not self._waiting:
            return None
        wait_s = self._written_at + WRITE_EVERY_S - self._clock.monotonic()
        if wait_s > 0:
            return wait_s
        self._written_at = self._clock.monotonic()
        await self._write_all()
        return None

    async def close(self) -> None:
        """Write the last lines, for a second at most, and close the session."""
        if not self.is_needed:
            return
        stop_capturing()
        await asyncio.sleep(0)  # notes from other threads
        try:
            async with asyncio.timeout(LAST_S):
                await self._write_all()
        except (TimeoutError, DatabaseError) as problem:
            _log.warning("captured_logs_lost logs=%d error=%s", len(self._waiting), problem)
        await self._session.drop()

    def _note(self, log: AttemptLog) -> None:
        if len(self._waiting) < MOST_WAITING:
            self._waiting[log] = None
            self.wake.set()
        else:
            log.forget()  # the next line notes the log again

    async def _write_all(self) -> None:
        """Write the logs that wait now, in portions. A log stays until the database has acknowledged it."""
        waiting = list(reversed(self._waiting))
        while waiting:
            portion: dict[AttemptLog, list[UnwrittenPart]] = {}
            size = 0
            while waiting and size < PORTION_BYTES:
                log = waiting.pop()
                portion[log] = parts = log.unwritten()
                size += sum(
                    len(line.message) + len(line.exception or "") for part in parts for line in part.lines
                )
            await self._write(portion)

    async def _write(self, portion: Mapping[AttemptLog, list[UnwrittenPart]]) -> None:
        parts = [(log.place, part) for log, each in portion.items() for part in each]
        try:
            if parts:
                await self._session.run(write_parts(parts))
        except Exception as problem:
            if not is_refused_row(problem):
                raise
            if len(portion) > 1:
                for log, each in portion.items():
                    await self._write({log: each})
                return
            self._refused(problem)
        for log, each in portion.items():
            log.written(each)
            if not log.has_unwritten:
                self._waiting.pop(log, None)

    def _refused(self, problem: Exception) -> None:
        """Log the first refusal. Lines that the database refuses are lost, but nothing else is."""
        if not self._is_refused:
            self._is_refused = True
            _log.error("captured_log_refused error=%s", problem)


def captured_levels(plan: WorkerPlan) -> dict[str, int]:
    """Return, by task name, the level from which on logs are captured. Other tasks are missing."""
    found: dict[str, int] = {}
    for name, definition in plan.definitions.items():
        own = definition.options.own_capture_level
        level = plan.config.capture_level if own is None else own
        if level:
            found[name] = level_number(level)
    return found
