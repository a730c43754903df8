"""Report outages of the database from the results of a supervisor's statements."""

from __future__ import annotations

from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import DatabaseBack, DatabaseUnreachable, EventBus

REPORTED_AFTER_S: Final = 3.0
"""How long statements must keep failing before an outage is reported, in seconds. Shorter failures end when a statement is retried."""


class Outages:
    """Reports database outages from the results of several sessions.

    An outage lasts while any session fails, because one session might read while another cannot write. `reason`: its last problem.
    """

    def __init__(self, *, events: EventBus, clock: Clock) -> None:
        self._events = events
        self._clock = clock
        self._failing: dict[str, float] = {}
        self._since: float | None = None
        self.reason: str | None = None

    def observe(self, session: str, problem: Exception | None, took_s: float) -> None:
        """Record the result of one statement in the named session. `problem` is the error, or None on success."""
        now = self._clock.monotonic()
        if problem is None:
            self._failing.pop(session, None)
            self.reason = self.reason if self._failing else None
            if self._since is not None and not self._failing:
                self._events.emit(DatabaseBack(after_s=now - self._since))
                self._since = None
            return
        since = self._failing.setdefault(session, now - took_s)
        self.reason = str(problem)
        if self._since is None and now - since >= REPORTED_AFTER_S:
            self._since = min(self._failing.values())
            self._events.emit(DatabaseUnreachable(reason=str(problem)))
