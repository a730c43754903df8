"""The brake of a task type: where many of its runs crash within a minute, none is claimed until an operator says so.

What lives here: when it is asked for. What may not: claims, which skip what is paused, and the silence of many (`brake`).
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from everbeat.config import RecoveryConfig
from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Statements
from everbeat.store import pauses


class TaskTypePaused(Event, frozen=True, kw_only=True):
    """So many tasks of one name crashed within the window that the name is paused: `everbeat tasks resume NAME` ends it."""

    room = "services"
    level = logging.ERROR
    name: str
    crashes: int
    window_s: float
    reason: str


class TypeBrake:
    """Looks at the recoveries of the names that just crashed."""

    def __init__(self, statements: Statements, config: RecoveryConfig, *, events: EventBus) -> None:
        self._statements = statements
        self._crashes = config.brake_after_crashes
        self._window_ms = config.brake_window_ms
        self._events = events

    async def look(self, names: Collection[str], *, patience_s: float | None) -> None:
        """Pauses those of these names that crashed too often."""
        if self._crashes is None or not names:
            return
        window_s = self._window_ms / 1_000
        statement = pauses.pause_crashing(
            names,
            crashes=self._crashes,
            window_ms=self._window_ms,
            reason=f"{self._crashes} or more of its tasks crashed within {window_s:g} s",
        )
        for name, crashes, reason in await self._statements.run(statement, patience_s=patience_s):
            self._events.emit(TaskTypePaused(name=name, crashes=crashes, window_s=window_s, reason=reason))
