"""Detect the death of a whole process tree by its session lock, which PostgreSQL releases when the client is gone."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import Final

from msgspec import Struct

from everbeat.domain.doctor.findings import SWEEP
from everbeat.domain.recovery.liveness import is_session_lost
from everbeat.recovering.notice.startup import Witness
from everbeat.recovering.observer import CALM_S, ONE_TRY, Calm, Thresholds, collected
from everbeat.recovering.orders import SESSION, Death
from everbeat.recovering.recoverer import Recoverer
from everbeat.recovering.watch_turn import WatchTurn
from everbeat.runtime.events import Event
from everbeat.store import workers
from everbeat.store.statement import Statement
from everbeat.store.workers import WatchedSession

CHECK_EVERY_S: Final = 1.0
"""The longest interval between two checks, in seconds. Checks are more frequent if the stale thresholds are short."""
TOGETHER_S: Final = 5.0
_CAUSE: Final = "its database session ended: the whole tree is gone"
_SOONEST_S: Final = 0.02
_CHECKS_PER_THRESHOLD: Final = 5
_CHECKS_MISSED: Final = 4


class LostSession(Struct):
    """A supervisor's session whose lock has been released.

    `since` is when the lock was found missing, and `held_until` is the time of the check before. Both are on the observer's clock.
    `session_at` is when the session was opened.
    """

    since: float
    held_until: float
    session_at: datetime


class _Away(Struct):
    lost: LostSession
    alive_at: float


class MassLoss:
    """The supervisors that lost their sessions in one mass loss.

    After `wait_s` seconds without a sign of life, a supervisor counts as dead. If `wait_s` is None, it never does.
    """

    def __init__(self, *, wait_s: float | None) -> None:
        self.wait_s = wait_s
        self._away: dict[str, _Away] = {}
        self._returned: set[str] = set()
        self._not_before = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._away

    def __bool__(self) -> bool:
        return bool(self._away)

    @property
    def lost(self) -> Mapping[str, LostSession]:
        """Return the lost session of each absent supervisor, by supervisor id."""
        return {name: away.lost for name, away in self._away.items()}

    def has_returned(self, name: str) -> bool:
        """Return whether supervisor `name` was away and has shown a sign of life while others are still away."""
        return name in self._returned

    def join(self, lost: Mapping[str, LostSession]) -> None:
        """Add supervisors that lost their sessions together with the others."""
        self._away |= {name: _Away(each, each.since) for name, each in lost.items()}

    def keep(self, names: Collection[str]) -> None:
        """Forget all supervisors except those in `names`. The mass loss is over when no supervisor is away."""
        self._away = {name: away for name, away in self._away.items() if name in names}
        if not self._away:
            self._returned.clear()

    def see(self, name: str, session_at: datetime, *, is_held: bool, has_sessions: bool, at: float) -> None:
        """Record the state of supervisor `name`. It is back if it holds its lock, or has held its lock since the loss.

        Any session of the supervisor's tree is a sign of life. The first sign of each supervisor restarts the wait of all others, because
        the network might be recovering. Later signs do not, so a supervisor that comes and goes cannot postpone the others forever.
        """
        away = self._away.get(name)
        if away is None:
            return
        is_back = is_held or session_at != away.lost.session_at
        if not (is_back or has_sessions):
            return
        if name not in self._returned:
            self._returned.add(name)
            self._not_before = at
        away.alive_at = at
        if is_back:
            del self._away[name]

    def disturbed(self, until: float) -> None:
        """Record that the observer or the server was disturbed. Until `until`, a missing session proves nothing."""
        self._not_before = max(self._not_before, until)

    def is_over(self, name: str, *, at: float) -> bool:
        """Return whether supervisor `name` has stayed away for the whole wait."""
        away = self._away.get(name)
        if away is None or self.wait_s is None:
            return False
        return at - max(away.alive_at, self._not_before) >= self.wait_s

    def next_in(self, at: float) -> float | None:
        """Return the number of seconds until the first wait is over, or None if no wait is running."""
        if self.wait_s is None or not self._away:
            return None
        first = min(away.alive_at for away in self._away.values())
        return max(first, self._not_before) + self.wait_s - at


class MassSessionLoss(Event, frozen=True, kw_only=True):
    """Many supervisors lost their sessions together, so the network or the server is the suspected cause.

    Supervisors that stay away for `wait_s` seconds are declared dead. If `wait_s` is None, the age of their heartbeats decides. `fix` is
    the command for an operator who knows that the supervisors are dead.
    """

    component = "recovering"
    level = logging.WARNING
    gone: int
    known: int
    wait_s: float | None
    fix: str


class MassSessionLossRecovered(Event, frozen=True, kw_only=True):
    """A supervisor that lost its session in a mass session loss was declared dead, because it stayed away for the whole wait."""

    component = "recovering"
    level = logging.WARNING
    supervisor_id: str
    waited_s: float


class LivingTreesCutOff(Event, frozen=True, kw_only=True):
    """These supervisors have no session, but this machine proves that they are alive or frozen.

    Whether they are declared dead depends only on the age of their heartbeats.
    """

    component = "recovering"
    level = logging.WARNING
    supervisor_ids: tuple[str, ...]
    fix: str


class SessionWatch:
    """A service in every supervisor that declares other supervisors dead when their session lock has been released.

    `witness` proves that a tree is alive or, in a mass loss, that it is dead. `command` is the command for an operator who knows that the
    silent trees are dead. `turn` is the turn that its checks renew.
    """

    name = "session_watch"

    def __init__(
        self,
        recoverer: Recoverer,
        *,
        witness: Witness,
        command: str = SWEEP,
        turn: WatchTurn | None = None,
    ) -> None:
        environment = recoverer.environment
        config = environment.config
        self._turn = turn
        self._environment = environment
        self._recoverer = recoverer
        self._observer = environment.observer
        self._clock = environment.clock
        self._witness = witness
        self._command = command
        self._grace_s = config.session_grace_ms / 1_000
        stale_s = min(Thresholds.automatic(config).all_ms(), default=math.inf) / 1_000
        self.interval_s = min(CHECK_EVERY_S, stale_s / _CHECKS_PER_THRESHOLD)
        wait_ms = config.mass_session_grace_ms
        self._gone: dict[str, LostSession] = {}
        self._unjudged = 0
        self._seen_held: set[str] = set()
        self._living_reported: set[str] = set()
        self._mass = MassLoss(wait_s=None if wait_ms is None else wait_ms / 1_000)
        self._disturbances = 0
        self._is_refused = False
        self._calm = Calm(environment.observer)
        self._looked_at: float | None = None
        self._known = 0

    async def tick(self) -> float | None:
        """Judge all lost sessions once. Return the seconds until the next grace period is over, if that is soon."""
        if self._observer.is_pooled:
            return None
        if (self._gone or self._mass) and not await self._observer.can_connect():
            # A living tree could not reconnect either, so its grace period restarts when it can. Others might be able to connect.
            self._is_refused = True
            await self._pass_on()
            return None
        asked_at = self._clock.monotonic()
        sessions = await self._environment.run_once(self._question())
        answered_at = self._clock.monotonic()
        if self._turn is not None:
            if not sessions:
                self._turn.lose()
                return None
            self._turn.confirm(asked_at=asked_at)
        held_until = asked_at if self._looked_at is None else self._looked_at
        self._calm.record(answered_at)
        await self._discard_doubtful(asked_at=asked_at, answered_at=answered_at, held_until=held_until)
        self._looked_at, self._known = answered_at, len(sessions)
        self._see(sessions, held_until=held_until, at=answered_at)
        living = await self._living(at=asked_at)
        problems: list[Exception] = []
        for session in sessions:
            gone = self._gone.get(session.supervisor_id)
            if session.supervisor_id in living:
                continue  # the tree is cut off from the database or frozen, so the age of its heartbeats decides
            if gone is not None and asked_at - gone.since >= self._grace_s:
                with collected(problems):
                    await self._judge(session, gone, known=len(sessions))
            elif self._mass.is_over(session.supervisor_id, at=asked_at) and _was_closed(session):
                with collected(problems):
                    await self._end_absent(session)
        if problems:
            raise problems[0]
        return self._next_check()

    async def _discard_doubtful(self, *, asked_at: float, answered_at: float, held_until: float) -> None:
        """Discard earlier observations if this observer or its connection was disturbed since then."""
        if self._is_refused or self._observer.disturbances != self._disturbances:
            self._is_refused, self._disturbances = False, self._observer.disturbances
            self._seen_held.clear()
            self._gone.clear()
            self._mass.disturbed(answered_at + CALM_S)
        elif asked_at - held_until > _CHECKS_MISSED * self.interval_s + self._grace_s:
            if self._gone:
                await self._pass_on()  # this observer was suspended or busy, and others might not be
            self._gone.clear()
            self._mass.disturbed(answered_at)

    async def _pass_on(self) -> None:
        if self._turn is not None:
            await self._turn.pass_on(known=self._known)

    def _question(self) -> Statement[list[WatchedSession]]:
        if self._turn is None:
            return workers.watch_sessions()
        return workers.watch_sessions(
            turn=self._turn.turn,
            taken_by=self._observer.supervisor_id,
            turn_ms=round(self._turn.turn_s * 1_000),
        )

    def _see(self, sessions: Iterable[WatchedSession], *, held_until: float, at: float) -> None:
        suspects: dict[str, LostSession] = {}
        unjudged = 0
        self._mass.keep({session.supervisor_id for session in sessions})
        for session in sessions:
            name = session.supervisor_id
            if session.locked:
                self._seen_held.add(name)
            self._mass.see(
                name, session.session_at, is_held=session.locked, has_sessions=session.sessions > 0, at=at
            )
            if name in self._mass or not is_session_lost(
                held_here=session.held_here, is_locked=session.locked, sessions=session.sessions
            ):
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
                suspects[name] = LostSession(at, held_until, session.session_at)
        self._gone, self._unjudged = suspects, unjudged

    def _may_be_on_its_way_back(self, session: WatchedSession, *, at: float) -> bool:
        """Return whether the supervisor might be about to reconnect, because an outage might have closed its session.

        This is false if the session was seen held after the outage.
        """
        is_calm = self._calm.covers(lost_in_crash=session.lost_in_crash, at=at)
        return is_calm and session.supervisor_id not in self._seen_held

    async def _living(self, *, at: float) -> set[str]:
        """Return the ids of supervisors that are due to be judged but that this machine proves to be alive or frozen."""
        due = {name for name, gone in self._gone.items() if at - gone.since >= self._grace_s}
        due |= {name for name in self._mass.lost if self._mass.is_over(name, at=at)}
        living = await self._witness.living(due) if due else set()
        if new := living - self._living_reported:
            fix = "check their logs for why they cannot connect, for example because of an outdated password"
            self._environment.events.emit(LivingTreesCutOff(supervisor_ids=tuple(sorted(new)), fix=fix))
        self._living_reported = living
        return living

    async def _judge(self, session: WatchedSession, gone: LostSession, *, known: int) -> None:
        lost = {**self._mass.lost, **self._gone}.values()
        # Supervisors that might be about to reconnect might have been lost together with this one, so count them too.
        together = self._unjudged + sum(abs(other.since - gone.since) <= TOGETHER_S for other in lost)
        is_few = together < 2 or 2 * together < known
        # A supervisor that came back and is cut off again while others are still away does not count as a single loss.
        if is_few and not self._mass.has_returned(session.supervisor_id):
            await self._end(session, gone, cause=_CAUSE)
            return
        buried = await self._witness.bury_proven(self._gone, noticed_by=SESSION)
        self._gone = {name: lost for name, lost in self._gone.items() if name not in buried}
        if not self._gone:
            return
        if not self._mass:
            wait_s = self._mass.wait_s
            self._environment.events.emit(
                MassSessionLoss(gone=together, known=known, wait_s=wait_s, fix=self._command)
            )
        # When other supervisors come back, only a few remain. That does not make these few more likely to be dead.
        self._mass.join(self._gone)
        self._gone = {}

    async def _end_absent(self, session: WatchedSession) -> None:
        """Declare a supervisor of a mass loss dead, because it stayed away for the whole wait."""
        gone = self._mass.lost[session.supervisor_id]
        waited_s = self._clock.monotonic() - gone.since
        cause = f"{_CAUSE}; many were lost together, and it did not come back within {waited_s:.0f} s"
        if await self._end(session, gone, cause=cause):
            self._environment.events.emit(
                MassSessionLossRecovered(supervisor_id=session.supervisor_id, waited_s=waited_s)
            )

    async def _end(self, session: WatchedSession, gone: LostSession, *, cause: str) -> bool:
        """Declare a supervisor dead and recover its leases. Return False if it was already ended or has shown a sign of life."""
        after_ms = round((self._clock.monotonic() - gone.held_until) * 1_000)
        death = Death(noticed_by=SESSION, cause=cause, noticed_after_ms=after_ms)
        recovered = await self._recoverer.bury_supervisor(
            session.supervisor_id,
            death,
            beat_seq=session.beat_seq,
            session_at=session.session_at,
            patience_s=ONE_TRY,
        )
        return recovered is not None

    def _next_check(self) -> float | None:
        now = self._clock.monotonic()
        waits = [gone.since + self._grace_s - now for gone in self._gone.values()]
        if (mass_in := self._mass.next_in(now)) is not None:
            waits.append(mass_in)
        soonest = min((wait for wait in waits if wait > 0), default=self.interval_s)
        return max(_SOONEST_S, soonest) if soonest < self.interval_s else None


def _was_closed(session: WatchedSession) -> bool:
    """Return whether the current server released the session because the socket was closed, not because the network was silent."""
    return session.held_here and session.beat_lately
