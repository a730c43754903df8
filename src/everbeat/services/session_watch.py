"""Notices a whole tree that died, by the session lock that PostgreSQL frees when its client is gone.

What lives here: one look at all session locks and what follows. What may not: judging by age.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from functools import partial
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.domain.commands import SWEEP
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.services.death import SESSION, Death
from everbeat.services.mass_loss import Lost, MassLoss
from everbeat.services.observer import CALM_S, Calm, Observer, Statements
from everbeat.services.problems import problem_of
from everbeat.services.recovery import Recoverer
from everbeat.services.thresholds import Thresholds
from everbeat.services.witness import Witness
from everbeat.store import workers
from everbeat.store.workers import WatchedSession

LOOK_EVERY_S: Final = 1.0
"""More often where leases are stale so soon that age would be faster than a session's end."""
TOGETHER_S: Final = 5.0

_CAUSE: Final = "its database session ended: the whole tree is gone"
_ONE_TRY: Final = 0.0
_SOONEST_S: Final = 0.02
_LOOKS_PER_THRESHOLD: Final = 5
_LOOKS_MISSED: Final = 4


class MassSessionLoss(Event, frozen=True, kw_only=True):
    """So many supervisors lost their sessions together that the network or the server is suspected.

    Those that stay away for `wait_s` seconds are recovered; None: age decides. `fix`: the command for an operator who knows them dead.
    """

    room = "services"
    level = logging.WARNING
    gone: int
    known: int
    wait_s: float | None
    fix: str


class MassSessionLossRecovered(Event, frozen=True, kw_only=True):
    """A supervisor of a mass session loss stayed away for the whole wait, so it was ended."""

    room = "services"
    level = logging.WARNING
    supervisor_id: str
    waited_s: float


class LivingTreesCutOff(Event, frozen=True, kw_only=True):
    """These supervisors have no session, but this machine proves that they live or are frozen. Only age can tell against them."""

    room = "services"
    level = logging.WARNING
    supervisor_ids: tuple[str, ...]
    fix: str


class SessionWatch:
    """A service of every supervisor. It never judges its own.

    `witness`, if there is one, proves deaths in a mass loss, and that a tree lives.
    `command`: what an operator runs if the silent trees are known to be dead.
    """

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
        command: str = SWEEP,
    ) -> None:
        self._statements = statements
        self._recoverer = recoverer
        self._observer = observer
        self._events = events
        self._clock = clock
        self._witness = witness
        self._command = command
        self._grace_s = config.session_grace_ms / 1_000
        stale_s = min(Thresholds.automatic(config).all_ms(), default=math.inf) / 1_000
        self.interval_s = min(LOOK_EVERY_S, stale_s / _LOOKS_PER_THRESHOLD)
        wait_ms = config.mass_session_grace_ms
        self._gone: dict[str, Lost] = {}
        self._unjudged = 0
        self._seen_held: set[str] = set()
        self._living_told: set[str] = set()
        self._mass = MassLoss(wait_s=None if wait_ms is None else wait_ms / 1_000)
        self._disturbances = 0
        self._is_refused = False
        self._calm = Calm(observer)
        self._looked_at: float | None = None

    async def tick(self) -> float | None:
        """One look. Asks for the next one at the very moment in which somebody's grace is over."""
        if self._observer.is_pooled:
            return None
        if (self._gone or self._mass) and not await self._observer.can_connect():
            self._is_refused = True
            return None  # a living tree could not come back either; its grace begins anew when it can
        asked_at = self._clock.monotonic()
        sessions = await self._statements.run(workers.watch_sessions(), patience_s=_ONE_TRY)
        answered_at = self._clock.monotonic()
        held_until = asked_at if self._looked_at is None else self._looked_at
        self._calm.look(answered_at)
        if self._is_refused or self._observer.disturbances != self._disturbances:
            self._is_refused, self._disturbances = False, self._observer.disturbances
            self._seen_held.clear()
            self._gone.clear()
            self._mass.disturbed(answered_at + CALM_S)
        elif asked_at - held_until > _LOOKS_MISSED * self.interval_s + self._grace_s:
            self._gone.clear()  # this observer was away
            self._mass.disturbed(answered_at)
        self._looked_at = answered_at
        self._see(sessions, held_until=held_until, at=answered_at)
        living = await self._living(at=asked_at)
        problems: list[Exception | None] = []
        for session in sessions:
            gone = self._gone.get(session.supervisor_id)
            if session.supervisor_id in living:
                continue  # age decides: it has lost its way to the database, or it is frozen
            if gone is not None and asked_at - gone.since >= self._grace_s:
                judge = partial(self._judge, session, gone, known=len(sessions))
                problems.append(await problem_of(judge))
            elif self._mass.is_over(session.supervisor_id, at=asked_at) and _was_closed(session):
                problems.append(await problem_of(partial(self._give_up, session)))
        for problem in filter(None, problems):
            raise problem
        return self._next_look()

    def _see(self, sessions: Iterable[WatchedSession], *, held_until: float, at: float) -> None:
        suspects: dict[str, Lost] = {}
        unjudged = 0
        self._mass.keep({session.supervisor_id for session in sessions})
        for session in sessions:
            name = session.supervisor_id
            if session.locked:
                self._seen_held.add(name)
            self._mass.see(
                name, session.session_at, is_held=session.locked, has_sessions=session.sessions > 0, at=at
            )
            if session.locked or session.sessions or not session.held_here or name in self._mass:
                continue
            if name == self._observer.supervisor_id:
                continue
            if self._may_be_on_its_way_back(session, at=at):
                unjudged += 1
                continue
            before = self._gone.get(name)
            if before is not None and before.session_at == session.session_at:
                suspects[name] = before
            else:
                suspects[name] = Lost(at, held_until, session.session_at)
        self._gone, self._unjudged = suspects, unjudged

    def _may_be_on_its_way_back(self, session: WatchedSession, *, at: float) -> bool:
        """Whether an outage of this observer or the server may have cost this session too: not if the observer saw it held since then."""
        is_calm = self._calm.covers(lost_in_crash=session.lost_in_crash, at=at)
        return is_calm and session.supervisor_id not in self._seen_held

    async def _living(self, *, at: float) -> set[str]:
        """Those that are due to be judged but that this machine proves alive."""
        due = {name for name, gone in self._gone.items() if at - gone.since >= self._grace_s}
        due |= {name for name in self._mass.lost if self._mass.is_over(name, at=at)}
        living = await self._witness.living(due) if due and self._witness is not None else set()
        if new := living - self._living_told:
            fix = "look in their logs for why they cannot connect, for example with a former password"
            self._events.emit(LivingTreesCutOff(supervisor_ids=tuple(sorted(new)), fix=fix))
        self._living_told = living
        return living

    async def _judge(self, session: WatchedSession, gone: Lost, *, known: int) -> None:
        lost = {**self._mass.lost, **self._gone}.values()
        # When those that may be on their way back were lost is not known: it may have been together with this one.
        together = self._unjudged + sum(abs(other.since - gone.since) <= TOGETHER_S for other in lost)
        is_few = together < 2 or 2 * together < known
        # One that came back, and whose line is cut again while others are still away, is no single loss.
        if is_few and not self._mass.has_returned(session.supervisor_id):
            await self._end(session, gone, cause=_CAUSE)
            return
        buried = await self._bury_proven()
        self._gone = {name: lost for name, lost in self._gone.items() if name not in buried}
        if not self._gone:
            return
        if not self._mass:
            wait_s = self._mass.wait_s
            self._events.emit(MassSessionLoss(gone=together, known=known, wait_s=wait_s, fix=self._command))
        # As the others come back they will be few, and no more dead than before.
        self._mass.join(self._gone)
        self._gone = {}

    async def _give_up(self, session: WatchedSession) -> None:
        """It was lost with many, its connections were closed, and it stayed away for the whole wait."""
        gone = self._mass.lost[session.supervisor_id]
        waited_s = self._clock.monotonic() - gone.since
        cause = f"{_CAUSE}; many were lost together, and it did not come back within {waited_s:.0f} s"
        if await self._end(session, gone, cause=cause):
            self._events.emit(
                MassSessionLossRecovered(supervisor_id=session.supervisor_id, waited_s=waited_s)
            )

    async def _end(self, session: WatchedSession, gone: Lost, *, cause: str) -> bool:
        """End it and recover what it held, unless another supervisor did or it gave a sign of life meanwhile."""
        end = workers.end_supervisor(
            session.supervisor_id, how=SESSION, beat_seq=session.beat_seq, session_at=session.session_at
        )
        if not await self._statements.run(end, patience_s=_ONE_TRY):
            return False
        await self._statements.run(
            workers.bury_workers(supervisor_id=session.supervisor_id, how=SESSION, cause=cause)
        )
        after_ms = round((self._clock.monotonic() - gone.held_until) * 1_000)
        death = Death(noticed_by=SESSION, cause=cause, noticed_after_ms=after_ms)
        await self._recoverer.recover_supervisor(session.supervisor_id, death)
        return True

    async def _bury_proven(self) -> set[str]:
        """Those of a mass loss that this machine proves dead, however many go with them: they are buried."""
        if self._witness is None:
            return set()
        return await self._witness.bury_proven(self._gone, noticed_by=SESSION)

    def _next_look(self) -> float | None:
        now = self._clock.monotonic()
        waits = [gone.since + self._grace_s - now for gone in self._gone.values()]
        if (mass_in := self._mass.next_in(now)) is not None:
            waits.append(mass_in)
        soonest = min((wait for wait in waits if wait > 0), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None


def _was_closed(session: WatchedSession) -> bool:
    """Whether this very server ended the session because its socket was closed, and not for a silent network."""
    return session.held_here and session.beat_lately
