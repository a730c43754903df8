"""Writes the items that running code emits, in portions, in order, and before the attempt is settled."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

from everbeat.domain.task.context_backend import EmittedItem
from everbeat.errors import DatabaseError
from everbeat.store.refusals import is_refused_data
from everbeat.store.streams import MOST_LEASES, insert_items
from everbeat.worker.attempt import CODE_RUNS, OVER, Attempt, Stage
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import AttemptLost

WRITE_EVERY_S: Final = 0.05
PORTION_ITEMS: Final = 500
PORTION_BYTES: Final = 262_144
"""The maximum number of items, and of bytes of JSON, in one statement. A single larger item is written alone."""
_COMMIT_PAUSE_S: Final = 0.05
_INSUFFICIENT_PRIVILEGE: Final = "42501"


class StreamRecorder:
    """A service that stores emitted items. One statement contains the items of many attempts."""

    name = "streams"
    interval_s = 3_600.0

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        self._session = environment.session
        self._clock = environment.clock
        self._send = environment.send
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Attempt, None] = {}
        self._turn = asyncio.Lock()
        self._written_at = float("-inf")

    def note(self, attempt: Attempt) -> None:
        """Store the attempt's items soon. Safe to call from any thread."""
        attempt.reported_at = self._clock.monotonic()
        if not attempt.items_noted:
            attempt.items_noted = True
            self._loop.call_soon_threadsafe(self._note, attempt)

    async def tick(self) -> float | None:
        """Store the next portion, unless the last one was stored a moment ago."""
        if not self._waiting:
            return None
        wait_s = self._written_at + WRITE_EVERY_S - self._clock.monotonic()
        if wait_s > 0:
            return wait_s
        await self._write(self._writable)
        if not self._waiting:
            return None
        # Another portion is waiting, or the code's own commit has locked the task's row.
        return 0.0 if self._writable() else WRITE_EVERY_S

    async def flush(self, attempt: Attempt) -> None:
        """Store all items that the attempt has emitted so far, unless it loses its lease.

        Raises DatabaseError if the database is away or has refused an item.
        """
        while attempt.items and attempt.stage not in OVER:
            if attempt.stage is Stage.COMMITTING:
                await self._clock.sleep(_COMMIT_PAUSE_S)
            else:
                await self._write(lambda: [attempt])

    def forget(self, attempt: Attempt) -> None:
        """Discard the items of an attempt whose lease is over."""
        if attempt.items is not None:
            self._waiting.pop(attempt, None)
            attempt.items = None

    def _writable(self) -> list[Attempt]:
        return [attempt for attempt in self._waiting if attempt.stage is not Stage.COMMITTING]

    def _note(self, attempt: Attempt) -> None:
        attempt.items_noted = False
        if attempt.items and attempt.stage not in OVER:
            self._waiting[attempt] = None
            self.wake.set()

    async def _write(self, chosen: Callable[[], list[Attempt]]) -> None:
        """Store one portion. The items stay in memory until the database has acknowledged them, so that no failure loses one."""
        async with self._turn:
            portions = _portions(chosen())
            if not portions:
                return
            self._written_at = self._clock.monotonic()
            try:
                await self._store(portions)
            except Exception as problem:
                if not _is_refused(problem):
                    raise
                await self._store_separately(portions)

    async def _store(self, portions: dict[Attempt, list[EmittedItem]]) -> None:
        given = [(attempt.lease, items) for attempt, items in portions.items()]
        held = await self._session.run(insert_items(given, channel=self._session.target.items_channel))
        for attempt, items in portions.items():
            if attempt.claim_id in held:
                self._stored(attempt, len(items))
                continue
            self.forget(attempt)
            if attempt.stage in CODE_RUNS:
                self._send(AttemptLost(attempt, in_write=True))

    async def _store_separately(self, portions: dict[Attempt, list[EmittedItem]]) -> None:
        """Store the items of each attempt alone. An attempt with an item that the database refuses stores no more items."""
        for attempt, items in portions.items():
            try:
                await self._store({attempt: items})
            except Exception as problem:
                if not _is_refused(problem):
                    raise
                attempt.items_refused = (
                    f"PostgreSQL cannot store an item of its streams: {str(problem).strip()}"
                )
                self.forget(attempt)

    def _stored(self, attempt: Attempt, count: int) -> None:
        left = attempt.items
        if left is None:
            return
        for _ in range(count):
            left.popleft()
        if not left:
            self._waiting.pop(attempt, None)


def _is_refused(problem: Exception) -> bool:
    """Return whether the same items would be refused again: because of their data, or because the role lacks a right on the table."""
    cause = problem.__cause__ if isinstance(problem, DatabaseError) else problem
    return is_refused_data(problem) or getattr(cause, "sqlstate", None) == _INSUFFICIENT_PRIVILEGE


def _portions(attempts: list[Attempt]) -> dict[Attempt, list[EmittedItem]]:
    """Return the oldest items of the attempts, as many as fit into one statement."""
    portions: dict[Attempt, list[EmittedItem]] = {}
    items_left, bytes_left = PORTION_ITEMS, PORTION_BYTES
    for attempt in attempts[:MOST_LEASES]:
        waiting: deque[EmittedItem] = attempt.items or deque()
        chosen: list[EmittedItem] = []
        for item in tuple(waiting):
            bytes_left -= len(item.value)
            if items_left == 0 or (bytes_left < 0 and (portions or chosen)):
                break
            chosen.append(item)
            items_left -= 1
        if chosen:
            portions[attempt] = chosen
        if items_left == 0 or bytes_left < 0:
            break
    return portions
