"""Fixtures: recovery services with a manual clock on a real database, so that tests do not have to wait."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from everbeat.config import RecoveryConfig
from everbeat.domain.inspection import SweepResult
from everbeat.domain.recovery.hooks import HookRunner, NoHooks
from everbeat.recovering.notice.age import Reaper
from everbeat.recovering.notice.session import SessionWatch
from everbeat.recovering.notice.startup import Witness
from everbeat.recovering.observer import RecoveryEnvironment, Statements
from everbeat.recovering.recoverer import Recoverer
from everbeat.recovering.sweep import Sweep
from everbeat.recovering.watch_turn import WatchTurn
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.identity import ProcessIdentity
from everbeat.store import workers
from everbeat.store.session import Session
from everbeat.testing.clock import ManualClock
from tests.store.conftest import StoreHarness, db

__all__ = ["StoreHarness", "db"]


@dataclass
class ManualObserver:
    """An observer that a test controls: a supervisor with its recovery services."""

    db: StoreHarness
    session: Session
    supervisor_id: str = "me"
    is_pooled: bool = False
    is_served: bool = True
    disturbances: int = 0
    reconnected_at: float | None = None
    clock: ManualClock = field(default_factory=ManualClock)
    seen: list[Event] = field(default_factory=list)
    events: EventBus = field(default_factory=EventBus)
    hooks: HookRunner = field(default_factory=NoHooks)

    def __post_init__(self) -> None:
        self.events.subscribe(self.seen.append)

    async def can_connect(self) -> bool:
        return self.is_served

    def environment(self, **settings: Any) -> RecoveryEnvironment:
        return RecoveryEnvironment(
            statements=self.session,
            config=RecoveryConfig(**settings),
            channel=self.db.target.channel,
            observer=self,
            events=self.events,
            clock=self.clock,
            random=Random(1),
            hooks=self.hooks,
        )

    def recoverer(self, **settings: Any) -> Recoverer:
        return Recoverer(self.environment(**settings))

    def witness(self, statements: Statements | None = None, **settings: Any) -> Witness:
        """Return a witness for this host. If `statements` is None, it proves no deaths."""
        environment = self.environment(**settings)
        if statements is not None:
            environment = replace(environment, statements=statements)
        return Witness(
            Recoverer(environment), identity=ProcessIdentity.current(), proves_deaths=statements is not None
        )

    def reaper(
        self, *, witness: Statements | None = None, turn: WatchTurn | None = None, **settings: Any
    ) -> Reaper:
        """Return a reaper. `witness` runs the statements of its witness. If it is None, the witness proves no deaths."""
        return Reaper(self.recoverer(**settings), witness=self.witness(witness, **settings), turn=turn)

    def session_watch(self, *, turn: WatchTurn | None = None, **settings: Any) -> SessionWatch:
        return SessionWatch(self.recoverer(**settings), witness=self.witness(**settings), turn=turn)

    def beat(self, *supervisors: str) -> None:
        for supervisor in supervisors:
            assert self.db.run(workers.beat(supervisor, [], draining=False)).seq is not None

    def living(self) -> set[str]:
        return {beat.supervisor_id for beat in self.db.run(workers.watch_beats())}

    def told(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.seen if isinstance(event, kind)]


async def sweep(
    recoverer: Recoverer, *, threshold_ms: int | None = None, dry_run: bool = False
) -> SweepResult:
    """Run or preview an operator's sweep, and return the result."""
    once = Sweep(recoverer, threshold_ms=threshold_ms)
    return await (once.preview() if dry_run else once.run())


@pytest.fixture
async def observer(db: StoreHarness) -> AsyncIterator[ManualObserver]:
    """Yield an observer, which is supervisor `me`. Another supervisor, `s1`, has the workers `w1` and `w2`."""
    db.supervisor("me")
    session = Session(db.target, "everbeat test caretakers")
    yield ManualObserver(db, session)
    await session.drop()
