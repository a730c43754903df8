"""A stream that has no room for messages: reported once a minute, for as long as it lasts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus

AGAIN_S: Final = 60.0


class MessagesNotPublished(Event, frozen=True, kw_only=True):
    """The stream does not take messages, though the link is up: it is full, has no leader, or the user may not publish.

    PostgreSQL tells workers of tasks meanwhile, and it is tried again. `problem`: what NATS answered.
    """

    room = "worker"
    level = logging.WARNING
    worker_id: str
    problem: str


class Fullness:
    """What the last publications said of the room in the stream. `on_full` is called for each that found none."""

    def __init__(self, *, worker_id: Callable[[], str], events: EventBus, clock: Clock) -> None:
        self.on_full: Callable[[], None] = lambda: None
        self._worker_id = worker_id
        self._events = events
        self._clock = clock
        self._refusal: str | None = None
        self._refused_at = self._told_at = -AGAIN_S

    @property
    def refusal(self) -> str | None:
        """Why the stream had no room for messages within the last minute, None where it had."""
        return self._refusal if self._clock.monotonic() - self._refused_at < AGAIN_S else None

    def judge(self, refusal: str | None) -> None:
        """Note the answer to a publication. Messages without room are not carried: the database tells workers of their tasks."""
        self._refusal = refusal
        if refusal is None:
            return
        now = self._refused_at = self._clock.monotonic()
        self.on_full()
        if now - self._told_at >= AGAIN_S:
            self._told_at = now
            self._events.emit(MessagesNotPublished(worker_id=self._worker_id(), problem=refusal))
