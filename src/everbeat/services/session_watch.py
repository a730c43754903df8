"""Notices a whole tree that died, by the session lock that PostgreSQL frees when its client is gone.

What lives here: one look at all session locks and what follows. What may not: judging by age.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.config import RecoveryConfig
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.services.death import SESSION, Death
from everbeat.services.observer import Observer, Statements
from everbeat.services.recovery import Recoverer
from everbeat.services.thresholds import Thresholds
from everbeat.services.witness import Witness
from everbeat.store import workers
from everbeat.store.workers import WatchedSession

LOOK_EVERY_S: Final = 1.0
"""More often where leases are stale so soon that age would be faster than a session's end."""
CALM_S: Final = 10.0
"""For this long after a reconnect of the observer, a missing session proves nothing, unless the observer has itself seen it held
since then: what cut the observer off may have cut off others."""
TOGETHER_S: Final = 5.0

_ONE_TRY: Final = 0.0
_SOONEST_S: Final = 0.02
_LOOKS_PER_THRESHOLD: Final = 5
_LOOKS_MISSED: Final = 4


class MassSessionLoss(Event, frozen=True, kw_only=True):
    """So many supervisors lost their sessions together that the server is suspected: age decides about them."""

    room = "services"
    level = logging.WARNING
    gone: int
    known: int


class _Gone(Struct):
    since: float
    held_until: float
    session_at: datetime


class SessionWatch:
    """A service of every supervisor. It never judges its own. `witness`: who proves deaths in a mass loss; None: nobody."""

    name = "session_watch"

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        recoverer: Recoverer,
        observer: Observer,
        events: EventBus,
        clock: Clock,
        witness: Witness | None = None,
    ) -> None:
        self._statements = statements
        self._recoverer = recoverer
        self._observer = observer
        self._events = events
        self._clock = clock
        self._witness = witness
        self._grace_s = config.session_grace_ms / 1_000
        stale_s = min(Thresholds.automatic(config).all_ms(), default=math.inf) / 1_000
        self.interval_s = min(LOOK_EVERY_S, stale_s / _LOOKS_PER_THRESHOLD)
        self._gone: dict[str, _Gone] = {}
        self._seen_held: set[str] = set()
        self._left_to_age: dict[str, _Gone] = {}
        self._disturbances = 0
        self._looked_at: float | None = None
        self._mass_told = False

    async def tick(self) -> float | None:
        """One look. Asks for the next one at the very moment in which somebody's grace is over."""
        if self._observer.is_pooled:
            return None
        asked_at = self._clock.monotonic()
        sessions = await self._statements.run(workers.watch_sessions(), patience_s=_ONE_TRY)
        answered_at = self._clock.monotonic()
        held_until = asked_at if self._looked_at is None else self._looked_at
        if self._observer.disturbances != self._disturbances:
            self._disturbances = self._observer.disturbances
            self._seen_held.clear()
            self._gone.clear()
        elif asked_at - held_until > _LOOKS_MISSED * self.interval_s + self._grace_s:
            self._gone.clear()  # this observer was away
        self._looked_at = answered_at
        self._see(sessions, held_until=held_until, at=answered_at)
        for session in sessions:
            gone = self._gone.get(session.supervisor_id)
            if gone is not None and asked_at - gone.since >= self._grace_s:
                await self._judge(session, gone, known=len(sessions))
        return self._next_look()

    def _see(self, sessions: Iterable[WatchedSession], *, held_until: float, at: float) -> None:
        suspects: dict[str, _Gone] = {}
        known = {session.supervisor_id for session in sessions}
        self._left_to_age = {name: gone for name, gone in self._left_to_age.items() if name in known}
        for session in sessions:
            name = session.supervisor_id
            if session.locked:
                self._seen_held.add(name)
            left = self._left_to_age.get(name)
            if left is not None and (session.locked or left.session_at != session.session_at):
                del self._left_to_age[name]  # it is back
            if session.locked or session.sessions or not session.held_here or name in self._left_to_age:
                continue
            if name == self._observer.supervisor_id or self._may_be_on_its_way_back(session, at=at):
                continue
            before = self._gone.get(name)
            if before is not None and before.session_at == session.session_at:
                suspects[name] = before
            else:
                suspects[name] = _Gone(at, held_until, session.session_at)
        self._gone = suspects

    def _may_be_on_its_way_back(self, session: WatchedSession, *, at: float) -> bool:
        """Whether the outage of this observer may have cost this session too: not if the observer saw it held since then."""
        if session.supervisor_id in self._seen_held:
            return False
        reconnected_at = self._observer.reconnected_at
        return reconnected_at is not None and at - reconnected_at < CALM_S

    async def _judge(self, session: WatchedSession, gone: _Gone, *, known: int) -> None:
        lost = (self._left_to_age | self._gone).values()
        together = sum(abs(other.since - gone.since) <= TOGETHER_S for other in lost)
        if together >= 2 and 2 * together >= known:
            if await self._is_proven(session.supervisor_id):
                return
            if not self._mass_told:
                self._events.emit(MassSessionLoss(gone=together, known=known))
            self._mass_told = True
            # As the others come back they will be few, and no more dead than before.
            self._left_to_age |= self._gone
            return
        self._mass_told = False
        ended = await self._statements.run(
            workers.end_supervisor(
                session.supervisor_id, how=SESSION, beat_seq=session.beat_seq, session_at=session.session_at
            ),
            patience_s=_ONE_TRY,
        )
        if not ended:
            return
        cause = "its database session ended: the whole tree is gone"
        await self._statements.run(
            workers.bury_workers(supervisor_id=session.supervisor_id, how=SESSION, cause=cause)
        )
        after_ms = round((self._clock.monotonic() - gone.held_until) * 1_000)
        death = Death(noticed_by=SESSION, cause=cause, noticed_after_ms=after_ms)
        await self._recoverer.recover_supervisor(session.supervisor_id, death)

    async def _is_proven(self, supervisor_id: str) -> bool:
        """Whether this machine proves its death, however many go with it; then it is buried."""
        if self._witness is None:
            return False
        return bool(await self._witness.bury_proven([supervisor_id], noticed_by=SESSION))

    def _next_look(self) -> float | None:
        now = self._clock.monotonic()
        waits = [gone.since + self._grace_s - now for gone in self._gone.values()]
        soonest = min((wait for wait in waits if wait > 0), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None
