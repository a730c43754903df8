"""Trees: a supervisor with one worker, what they remember, and their real caretakers on a clock that is turned by hand.

What lives here: a tree and what it is to the database. What may not: what it does next.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Literal, TypeVar

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.events import EventBus
from everbeat.runtime.identity import ProcessIdentity
from everbeat.services.reaper import Reaper
from everbeat.services.recovery import Recoverer
from everbeat.services.startup import Reconciliation
from everbeat.store import workers
from everbeat.store.statement import Statement
from tests.protocol.stateful.ledger import Grant
from tests.protocol.stateful.stage import Stage

T = TypeVar("T")

THRESHOLD_S = 2.0
CONFIG = RecoveryConfig(
    runner_heartbeat_interval_ms=1_000, claimer_heartbeat_interval_ms=1_000, check_interval_ms=1_000,
    running_stale_threshold_ms=2_000, claimed_stale_threshold_ms=2_000, brake_after_crashes=None,
)  # fmt: skip
ME = ProcessIdentity.current()
_ids = count(1)


class StepClock:
    """Time that passes when the machine says so, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> datetime:
        return datetime(2030, 1, 1, tzinfo=UTC)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def wait(self, event: asyncio.Event, *, timeout_s: float) -> bool:
        self.now += 0.0 if event.is_set() else timeout_s
        return event.is_set()


@dataclass
class Line:
    """How a tree's caretakers reach the database. One try, whatever patience they ask for."""

    stage: Stage

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        return self.stage.act(statement)


@dataclass(eq=False)
class Tree:
    """One supervisor and its worker. `muted_s`: for how long it has been silent through a fault of its own."""

    stage: Stage
    clock: StepClock
    number: int
    life: Literal["up", "away", "dead"] = "up"
    supervisor_id: str = ""
    worker_id: str = ""
    held: list[Grant] = field(default_factory=list)
    in_doubt: list[Grant] = field(default_factory=list)
    muted_s: float = 0.0
    is_ended: bool = False
    is_pooled: bool = True
    disturbances: int = 0
    reconnected_at: float | None = None

    def __post_init__(self) -> None:
        self.born()

    async def can_connect(self) -> bool:
        return True

    def born(self) -> None:
        """A process that has seen nothing yet."""
        self.life, self.held, self.in_doubt = "up", [], []
        line, events = Line(self.stage), EventBus()
        self.recoverer = Recoverer(
            line, CONFIG, channel=self.stage.target.channel, observer_id=lambda: self.supervisor_id,
            events=events, clock=self.clock, random=Random(1),
        )  # fmt: skip
        self.reaper = Reaper(
            line, CONFIG, recoverer=self.recoverer, observer=self, events=events, clock=self.clock
        )
        self.reconciliation = Reconciliation(
            line, recoverer=self.recoverer, observer=self, identity=ME, events=events, clock=self.clock
        )
        self.register()

    def register(self) -> None:
        """Known under a new id, and its worker with it."""
        self.supervisor_id = f"host-{self.number}-{next(_ids):08x}"
        self.muted_s, self.is_ended = 0.0, False
        row = workers.SupervisorRow(
            id=self.supervisor_id, hostname=ME.hostname, pid=ME.pid, boot_id=ME.boot_id, pid_namespace=str(ME.pid_namespace),
            process_started=ME.start_ticks, lock_key=self.stage.target.lock_key(self.supervisor_id),
            session_name=f"everbeat-none-{self.number}",
        )  # fmt: skip
        assert self.stage.run(workers.register_supervisor(row))
        self.new_worker()

    def new_worker(self) -> None:
        """A worker process that holds nothing; who cannot register it learns that it was given up, and comes back."""
        self.worker_id = f"host-{self.number}{self.number}-{next(_ids):08x}"
        self.held, self.in_doubt = [], []
        row = workers.WorkerRow(
            id=self.worker_id, supervisor_id=self.supervisor_id, hostname=ME.hostname, pid=ME.pid, process_started=None,
            queues=None,
        )  # fmt: skip
        if not self.stage.run(workers.register_worker(row)):
            self.register()

    def die(self) -> None:
        """Its processes are gone; what the kernel knows of them no longer fits what is recorded."""
        self.life, self.held, self.in_doubt = "dead", [], []
        self.stage.ask(
            "update {schema}.supervisors set process_started = process_started + 1 where id = %s",
            self.supervisor_id,
        )

    async def look(self) -> None:
        """One tick of its reaper; an error of the database ends nothing."""
        try:
            await self.reaper.tick()
        except DatabaseUnreachable:
            self.disturbances += 1
