"""Outages of the database as a tree sees them: reported once while no repetition succeeds, and once when they are over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import DatabaseBack, DatabaseUnreachable, EventBus
from everbeat.store.session import OnTry

TOLD_AFTER_S: Final = 3.0
"""A shorter trouble, such as a session that was ended, is over when its statement is repeated."""


class Outages:
    """Collects the tries of several sessions. An outage lasts while one of them fails: one might read where another cannot write."""

    def __init__(self, *, events: EventBus, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._failing: dict[str, float] = {}
        self._since: float | None = None

    def observer_of(self, session: str) -> OnTry:
        """Return what the session `session` calls after each try."""
        observe: Callable[[Exception | None, float], None] = partial(self._observe, session)
        return observe

    def _observe(self, session: str, problem: Exception | None, took_s: float) -> None:
        now = self._clock.monotonic()
        if problem is None:
            self._failing.pop(session, None)
            if self._since is not None and not self._failing:
                self._events.emit(DatabaseBack(after_s=now - self._since))
                self._since = None
            return
        since = self._failing.setdefault(session, now - took_s)
        if self._since is None and now - since >= TOLD_AFTER_S:
            self._since = min(self._failing.values())
            self._events.emit(DatabaseUnreachable(reason=str(problem)))
