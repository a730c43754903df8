"""Trees: a supervisor with one worker, their memory, and their real recovery services on a clock that the test controls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count
from random import Random
from typing import Literal, TypeVar

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseUnreachable
from everbeat.recovering.notice.age import Reaper
from everbeat.recovering.notice.startup import Reconciliation, Witness
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.recovering.recoverer import Recoverer
from everbeat.runtime.events import EventBus
from everbeat.runtime.identity import ProcessIdentity
from everbeat.store import workers
from everbeat.store.statement import Statement
from tests.protocol.stateful.database import FaultyDatabase
from tests.protocol.stateful.ledger import Grant

T = TypeVar("T")

THRESHOLD_S = 2.0
CONFIG = RecoveryConfig(
    runner_heartbeat_interval_ms=1_000, claimer_heartbeat_interval_ms=1_000, check_interval_ms=1_000,
    running_stale_threshold_ms=2_000, claimed_stale_threshold_ms=2_000, brake_after_crashes=None,
)  # fmt: skip
ME = ProcessIdentity.current()
_ids = count(1)


class StepClock:
    """Time that passes when the machine advances it, or during a sleep."""

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
class RecoveryStatements:
    """The recovery services' access to the database: one try, even for a patient caller."""

    database: FaultyDatabase

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        return self.database.act(statement)


@dataclass(eq=False)
class Tree:
    """One supervisor and its worker. `muted_s`: for how long it has been silent through its own fault."""

    database: FaultyDatabase
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
        self.reset()

    async def can_connect(self) -> bool:
        return True

    def reset(self) -> None:
        """Start as a process without any memory."""
        self.life, self.held, self.in_doubt = "up", [], []
        environment = RecoveryEnvironment(
            statements=RecoveryStatements(self.database),
            config=CONFIG,
            channel=self.database.target.channel,
            observer=self,
            events=EventBus(),
            clock=self.clock,
            random=Random(1),
        )
        self.recoverer = Recoverer(environment)
        witness = Witness(self.recoverer, identity=ME, proves_deaths=False)
        self.reaper = Reaper(self.recoverer, witness=witness)
        self.reconciliation = Reconciliation(self.recoverer, identity=ME)
        self.register()

    def register(self) -> None:
        """Register under a new id, with the worker."""
        self.supervisor_id = f"host-{self.number}-{next(_ids):08x}"
        self.muted_s, self.is_ended = 0.0, False
        row = workers.SupervisorRow(
            id=self.supervisor_id, hostname=ME.hostname, pid=ME.pid, boot_id=ME.boot_id, pid_namespace=str(ME.pid_namespace),
            process_started=ME.start_ticks, lock_key=self.database.target.lock_key(self.supervisor_id),
            session_name=f"everbeat-none-{self.number}",
        )  # fmt: skip
        assert self.database.run(workers.register_supervisor(row))
        self.new_worker()

    def new_worker(self) -> None:
        """Start a worker process that holds nothing; if it cannot be registered, the supervisor was declared dead and restarts."""
        self.worker_id = f"host-{self.number}{self.number}-{next(_ids):08x}"
        self.held, self.in_doubt = [], []
        row = workers.WorkerRow(
            id=self.worker_id, supervisor_id=self.supervisor_id, hostname=ME.hostname, pid=ME.pid, process_started=None,
            queues=None,
        )  # fmt: skip
        if not self.database.run(workers.register_worker(row)):
            self.register()

    def die(self) -> None:
        """Kill the processes of the tree; the facts of the kernel no longer match the recorded ones."""
        self.life, self.held, self.in_doubt = "dead", [], []
        self.database.ask(
            "update {schema}.supervisors set process_started = process_started + 1 where id = %s",
            self.supervisor_id,
        )

    async def check(self) -> None:
        """Run one tick of the reaper; a database error ends nothing."""
        try:
            await self.reaper.tick()
        except DatabaseUnreachable:
            self.disturbances += 1
