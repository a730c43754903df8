"""The sessions that dead trees leave on the server: frozen processes keep theirs, with the locks of their statements.

They are ended after the death was recorded, by any of the ways to notice it.
"""

from __future__ import annotations

import logging
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Statements
from everbeat.store import sweeping

_LONGEST_INTERVAL_S: Final = 5.0
_ONE_TRY: Final = 0.0


class SessionsEnded(Event, frozen=True, kw_only=True):
    """Sessions of dead trees were ended; `sessions` are their application names."""

    room = "services"
    level = logging.WARNING
    sessions: tuple[str, ...]


class SessionsLeft(Event, frozen=True, kw_only=True):
    """Sessions of dead trees belong to roles whose sessions this role must not end. They keep their connections and locks."""

    room = "services"
    level = logging.WARNING
    sessions: tuple[str, ...]
    roles: tuple[str, ...]
    fix: str


class Leftovers:
    """A service of every supervisor. Behind a transaction pooler, sessions are not a tree's own, and the statement does nothing."""

    name = "leftovers"

    def __init__(self, statements: Statements, config: RecoveryConfig, *, events: EventBus) -> None:
        self.interval_s = min(config.check_interval_ms / 1_000, _LONGEST_INTERVAL_S)
        self._statements = statements
        self._events = events
        self._told: set[tuple[int, str]] = set()
        self._ended: set[tuple[int, str]] = set()

    async def tick(self) -> float | None:
        """End what is left, and report what cannot be ended, once for each session."""
        found = await self._statements.run(sweeping.end_sessions(), patience_s=_ONE_TRY)
        ended = {(each.pid, each.session) for each in found if each.ended}
        if gone := sorted(ended - self._ended):  # a backend takes a moment to end
            self._events.emit(SessionsEnded(sessions=tuple(name for _, name in gone)))
        left = {(each.pid, each.session): each.role for each in found if not each.ended}
        if new := sorted(left.keys() - self._told):
            roles = tuple(sorted({left[key] for key in new}))
            fix = "let all workers connect as one role, or grant pg_signal_backend and pg_read_all_stats to this one"
            self._events.emit(SessionsLeft(sessions=tuple(name for _, name in new), roles=roles, fix=fix))
        self._told, self._ended = set(left), ended
        return None
