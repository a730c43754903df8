"""A slot: a name that one living supervisor bears at a time, such as the pod of a stateful set.

What lives here: taking it, and burying the supervisor that bore it and is gone. What may not: robbing one that lives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Calm, Observer, Statements
from everbeat.services.recovery import Recoverer
from everbeat.services.startup import bury
from everbeat.services.witness import Witness
from everbeat.store.predecessors import Predecessor, is_slot_race, predecessors, take_slot

LOOK_EVERY_S: Final = 0.3
PATIENCE_S: Final = 3.0
"""How long the one who had the slot may take to vanish before it is believed to live."""


class SlotTaken(Event, frozen=True, kw_only=True):
    """Another supervisor has the slot and seems to live: this one works without it, and tries again every check interval."""

    room = "services"
    level = logging.ERROR
    slot: str
    holder: str
    hostname: str
    pid: int
    fix: str


class SlotHeld(Event, frozen=True, kw_only=True):
    """This supervisor has the slot."""

    room = "services"
    slot: str
    supervisor_id: str


class SlotKeeper:
    """A service of a supervisor that was given a slot.

    Whoever had the slot is dead if its session lock is free and nothing of its tree is connected, at two looks in a row:
    the operator asserts that a slot has one holder, so there is no grace, unless this observer or the server lost all sessions lately.
    Behind a pooler sessions prove nothing, and age decides. Age also decides about one that this machine proves alive.
    """

    name = "slot"

    def __init__(
        self,
        statements: Statements,
        config: RecoveryConfig,
        *,
        slot: str,
        recoverer: Recoverer,
        observer: Observer,
        events: EventBus,
        clock: Clock,
        witness: Witness | None = None,
    ) -> None:
        self.interval_s = config.check_interval_ms / 1_000
        self._statements = statements
        self._slot = slot
        self._recoverer = recoverer
        self._observer = observer
        self._events = events
        self._clock = clock
        self._witness = witness
        self._borne_as: str | None = None
        self._wanted_since: float | None = None
        self._is_told = False
        self._gone: dict[str, datetime] = {}
        self._calm = Calm(observer)

    async def tick(self) -> float | None:
        """One look; the next one soon, while the one who had the slot may be about to vanish."""
        me = self._observer.supervisor_id
        if self._borne_as == me:
            return None
        now = self._clock.monotonic()
        since = self._wanted_since = now if self._wanted_since is None else self._wanted_since
        bearers = await self._bearers(me)
        self._calm.look(now)
        if any(self._may_return(bearer, at=now) for bearer in bearers):
            since = self._wanted_since = now
        for bearer in await self._vanished(bearers, at=now):
            cause = f"its session ended, and slot {self._slot!r} was taken over by {me}"
            await bury(self._statements, bearer, recoverer=self._recoverer, cause=cause)
        if await self._take(me):
            return None
        if now - since < PATIENCE_S:
            return LOOK_EVERY_S
        self._tell(bearers)
        return None

    async def _bearers(self, me: str) -> list[Predecessor]:
        found = await self._statements.run(predecessors(me, boot_id=None, machine_id=None, slot=self._slot))
        return [each for each in found if each.slot == self._slot]

    def _may_return(self, bearer: Predecessor, *, at: float) -> bool:
        return not bearer.has_sessions and self._calm.covers(lost_in_crash=bearer.lost_in_crash, at=at)

    async def _vanished(self, bearers: Sequence[Predecessor], *, at: float) -> list[Predecessor]:
        """Those whose sessions were gone at the last look too, with none in between, while the server accepted new ones."""
        before, self._gone = self._gone, {}
        if self._observer.is_pooled:
            return []
        for bearer in bearers:
            # A session of an earlier incarnation of the server is missing here whether or not the bearer lives.
            is_missing = bearer.held_here and not bearer.has_sessions
            if is_missing and not self._may_return(bearer, at=at) and not self._lives(bearer):
                self._gone[bearer.id] = bearer.session_at
        if self._gone and not await self._observer.can_connect():
            self._gone = {}  # a living bearer could not come back either
        return [each for each in bearers if each.id in self._gone and before.get(each.id) == each.session_at]

    def _lives(self, bearer: Predecessor) -> bool:
        return self._witness is not None and self._witness.sees(bearer)

    async def _take(self, me: str) -> bool:
        try:
            if not await self._statements.run(take_slot(me, self._slot)):
                return False
        except DatabaseError as problem:
            if is_slot_race(problem):
                return False
            raise
        self._borne_as, self._wanted_since, self._is_told = me, None, False
        self._events.emit(SlotHeld(slot=self._slot, supervisor_id=me))
        return True

    def _tell(self, bearers: Sequence[Predecessor]) -> None:
        if self._is_told or not bearers:
            return
        self._is_told = True
        bearer = bearers[0]
        self._events.emit(
            SlotTaken(
                slot=self._slot,
                holder=bearer.id,
                hostname=bearer.hostname,
                pid=bearer.pid,
                fix="give every supervisor that runs at the same time a slot of its own",
            )
        )
