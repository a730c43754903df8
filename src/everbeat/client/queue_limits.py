"""Refuses sends into queues that have reached their `max_waiting`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Final

from msgspec import Struct

from everbeat.config import QueueConfig
from everbeat.errors import QueueFull
from everbeat.runtime.clock import Clock
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store.plan import Action, Plan, ask
from everbeat.store.tasks import count_waiting

COUNT_EVERY_S: Final = 0.5
"""How long a process uses a count of the waiting tasks, in seconds. In this time, it adds only the tasks that it sends itself."""


FULL_FOR_S: Final = 0.1
"""How long a process uses a count that leaves no room, in seconds. Shorter, because workers might have claimed tasks since."""


class _Count(Struct):
    at: float
    waiting: int


class QueueLimits:
    """The limits of an app's queues, and this process's latest count of each queue. Thread-safe.

    The limit is approximate. Senders must not write a row that other senders need, so each process counts for itself, twice per second at
    most. In between, it does not see the tasks that other processes send or claim.
    """

    def __init__(self, queues: Iterable[QueueConfig], *, clock: Clock) -> None:
        self._limited: Mapping[str, QueueConfig] = {
            each.name: each for each in queues if each.max_waiting is not None
        }
        self._clock = clock
        self._forget()
        if self._limited:
            call_in_forked_child(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, _Count] = {}

    def __bool__(self) -> bool:
        return bool(self._limited)

    def admit(self, sending: Mapping[str, int], *, patience_s: float | None) -> Plan[None]:
        """Return if there is room for the tasks to send, given by queue. Otherwise, wait or raise QueueFull.

        `patience_s` is how long to wait for room in queues with `when_full="wait"`, or None if the send must not wait.
        """
        began = self._clock.monotonic()
        for queue, tasks in sending.items():
            if (config := self._limited.get(queue)) is not None:
                waits_s = (patience_s or 0.0) if config.when_full == "wait" else 0.0
                yield from self._admit(config, tasks, began=began, until=began + waits_s)

    def _admit(self, config: QueueConfig, sending: int, *, began: float, until: float) -> Plan[None]:
        most = config.max_waiting or 0
        while True:
            waiting = yield from self._waiting(config.name, room_for=sending, limit=most)
            if waiting + sending <= most:
                break
            now = self._clock.monotonic()
            if now >= until or sending > most:
                waited_s = 0.0 if until == began else now - began
                raise QueueFull(
                    config.name, waiting=waiting, max_waiting=most, sending=sending, waited_s=waited_s
                )
            pause_s = min(COUNT_EVERY_S, until - now)
            yield Action(run=partial(time.sleep, pause_s), arun=partial(asyncio.sleep, pause_s))
        with self._lock:
            if (known := self._counts.get(config.name)) is not None:
                known.waiting += sending

    def _waiting(self, queue: str, *, room_for: int, limit: int) -> Plan[int]:
        """Return the number of waiting tasks, counted up to `limit` unless the latest count is recent."""
        now = self._clock.monotonic()
        with self._lock:
            if (known := self._counts.get(queue)) is not None:
                has_room = known.waiting + room_for <= limit
                if now - known.at < (COUNT_EVERY_S if has_room else FULL_FOR_S):
                    return known.waiting
        waiting = yield from ask(count_waiting(queue, limit=limit))
        with self._lock:
            self._counts[queue] = _Count(now, waiting)
        return waiting
