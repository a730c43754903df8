"""Chooses the ids of the tasks that this process sends."""

from __future__ import annotations

import os
import threading
from uuid import UUID

from everbeat.domain.identifiers import RANDOM_BYTES, uuid7
from everbeat.runtime.clock import Clock
from everbeat.runtime.fork import call_in_forked_child


class TaskIds:
    """Generates the task ids of this process. Each id is greater than the previous one, even if the clock moves backward."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._last: UUID | None = None

    def next(self) -> UUID:
        """Return a new UUIDv7."""
        unix_ms = int(self._clock.wall().timestamp() * 1_000)
        with self._lock:
            self._last = uuid7(unix_ms=unix_ms, random=os.urandom(RANDOM_BYTES), previous=self._last)
            return self._last
