"""Caretakers with a clock that is turned by hand, on a real database: silence costs no time here."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from everbeat.config import RecoveryConfig
from everbeat.domain.hooks import HookRunner
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.identity import ProcessIdentity
from everbeat.services.observer import Statements
from everbeat.services.reaper import Reaper
from everbeat.services.recovery import Recoverer
from everbeat.services.session_watch import SessionWatch
from everbeat.services.witness import Witness
from everbeat.store import workers
from everbeat.store.session import Session
from everbeat.testing.clock import ManualClock
from tests.store.conftest import Hands, hands

__all__ = ["Hands", "hands"]


@dataclass
class Onlooker:
    """A supervisor in whose name a test observes, and its caretakers."""

    hands: Hands
    session: Session
    supervisor_id: str = "me"
    is_pooled: bool = False
    is_served: bool = True
    disturbances: int = 0
    reconnected_at: float | None = None
    clock: ManualClock = field(default_factory=ManualClock)
    seen: list[Event] = field(default_factory=list)
    events: EventBus = field(default_factory=EventBus)
    hooks: HookRunner | None = None

    def __post_init__(self) -> None:
        self.events.subscribe(self.seen.append)

    async def can_connect(self) -> bool:
        return self.is_served

    def recoverer(self, **settings: Any) -> Recoverer:
        return Recoverer(
            self.session, RecoveryConfig(**settings), channel=self.hands.target.channel,
            observer_id=lambda: self.supervisor_id, events=self.events, clock=self.clock, random=Random(1),
            hooks=self.hooks,
        )  # fmt: skip

    def reaper(self, *, witness: Statements | None = None, **settings: Any) -> Reaper:
        """`witness`: what a witness of this machine asks by; None: there is none."""
        recoverer = self.recoverer(**settings)
        return Reaper(
            self.session, RecoveryConfig(**settings), recoverer=recoverer, observer=self, events=self.events, clock=self.clock,
            witness=None if witness is None else Witness(witness, recoverer=recoverer, observer=self, identity=ProcessIdentity.current()),
        )  # fmt: skip

    def session_watch(self, **settings: Any) -> SessionWatch:
        return SessionWatch(
            self.session, RecoveryConfig(**settings), recoverer=self.recoverer(**settings), observer=self,
            events=self.events, clock=self.clock,
        )  # fmt: skip

    def beat(self, *supervisors: str) -> None:
        for supervisor in supervisors:
            assert self.hands.run(workers.beat(supervisor, [], draining=False)).seq is not None

    def living(self) -> set[str]:
        return {beat.supervisor_id for beat in self.hands.run(workers.watch_beats())}

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kind)]


@pytest.fixture
async def onlooker(hands: Hands) -> AsyncIterator[Onlooker]:
    """Observes `s1`, whose workers are `w1` and `w2`; itself it is the supervisor `me`."""
    hands.supervisor("me")
    session = Session(hands.target, "everbeat test caretakers")
    yield Onlooker(hands, session)
    await session.drop()
