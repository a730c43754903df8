"""A supervision: what a supervisor is to the database. It registers, holds its session lock and beats for its workers;
declared dead by mistake, it comes back under a new id.

What lives here: its row, its life, and its part in the lives of its workers. What may not: worker processes, which are
the business of `supervisor`; a worker that is a guest in another program has a supervision too, but no supervisor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import Final, Protocol

import msgspec

from everbeat.config import RecoveryConfig
from everbeat.domain.states import TaskState
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, SupervisorRegistered
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.identity import ProcessIdentity, new_id
from everbeat.runtime.nursery import Nursery, end_process
from everbeat.runtime.service import Service, ServiceRunner
from everbeat.runtime.tree_lock import TreeLock, new_tree_name
from everbeat.store import leases, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.store.workers import SupervisorRow, WorkerState
from everbeat.worker.burial import Burials
from everbeat.worker.heart import Heart
from everbeat.worker.outages import Outages
from everbeat.worker.protocol import Adopt, FromSupervisor, Welcome
from everbeat.worker.seat import Seat
from everbeat.worker.session_lock import SessionLock

START_PATIENCE_S: Final = 10.0
_FAREWELL_PATIENCE_S: Final = 5.0
_LONGEST_REPLY_S: Final = 10.0
_MOST_NAMES: Final = 1_000
_log = logging.getLogger("everbeat.worker")


class Care(Protocol):
    """The caretakers that run beside the beats, put in from above."""

    @property
    def services(self) -> Sequence[Service]:
        """What ticks for as long as the supervision is open."""
        ...

    async def start(self) -> None:
        """Done once, as soon as the supervisor is registered."""
        ...

    async def settle_stopped(self, worker_id: str, *, code_runs: bool = False) -> None:
        """Settles the code that ended with a stopped worker process; of `code_runs` only what never runs again."""
        ...

    async def recover_worker(
        self, worker_id: str, report: ExitReport, *, died_at: float, astray: int
    ) -> None:
        """Settles what a buried worker held."""
        ...


class Supervision:
    """One supervisor's life in the database. `care` makes the caretakers, which observe in its name and on its session.

    `lock` is the lock file that all of its tree holds; it is let go of at the end, and removed if nobody needs its proof.
    """

    def __init__(
        self,
        target: Target,
        config: RecoveryConfig,
        *,
        care: Callable[[Supervision], Care],
        events: EventBus,
        clock: Clock,
        random: Random,
        metadata: Mapping[str, object] | None = None,
        lock: TreeLock | None = None,
        on_fatal: Callable[[str, BaseException], None] = end_process,
    ) -> None:
        self.target = target
        self.config = config
        self.events = events
        self.clock = clock
        self.random = random
        self.identity = ProcessIdentity.current()
        self.supervisor_id = new_id()
        # Both are kept over a re-registration: they tell what is left of this tree, which is still the same.
        self._tree_lock = lock
        self.session_name = new_tree_name() if lock is None else lock.name
        self.seats: list[Seat] = []
        self.reconnected_at: float | None = None
        self._outages = Outages(events=events, clock=clock)
        self.session = self._new_session()
        # Of their own: no caretaker's statement, burial or slow line is in the way of a beat.
        self._beats = self._new_session("supervisor beats")
        self._lock = SessionLock(self._new_session(patient=True), clock=clock)
        self._metadata = None if metadata is None else msgspec.json.encode(metadata).decode()
        self._is_open = False
        self._losses = 0
        self._nursery = Nursery(name="supervision", on_fatal=on_fatal)
        self._services = Nursery(name="caretakers", on_fatal=on_fatal)
        self._lock_task: asyncio.Task[None] | None = None
        self._coming_back = asyncio.Lock()
        self._heart = Heart(
            self._beats,
            interval_s=self.beat_interval_s,
            supervisor_id=lambda: self.supervisor_id,
            seats=lambda: self.seats,
            on_ended=self._come_back,
            on_worker_ended=self._adopt_anew,
            clock=clock,
        )
        self._heart_runner = self._runner(self._heart)
        self._care = care(self)
        self.burials = Burials(
            self.session, config, settle_stopped=self._care.settle_stopped, recover_worker=self._care.recover_worker, clock=clock
        )  # fmt: skip

    @property
    def beat_interval_s(self) -> float:
        """Seconds between two beats, which speak for both roles."""
        return self.config.beat_interval_ms / 1_000

    @property
    def is_pooled(self) -> bool:
        """Whether a transaction pooler stands before the database, so that sessions prove nothing."""
        return self.session.pooled

    @property
    def disturbances(self) -> int:
        """How often a beat failed or a session was lost, so far."""
        return self._losses + self._heart.failures

    async def open(self, *, patience_s: float = START_PATIENCE_S) -> None:
        """Registers and begins to beat; raises DatabaseError when the database cannot be reached or refuses."""
        await self.session.run(workers.register_supervisor(self._row()), patience_s=patience_s)
        self._is_open = True
        self._registered()
        self._nursery.start(self._heart_runner.run(), name="heart", critical=True)
        self._services.start(self._care.start(), name="start-up")
        for service in self._care.services:
            self._services.start(self._runner(service).run(), name=service.name, critical=True)

    def new_seat(
        self,
        *,
        pid: int,
        queues: Sequence[str] | None,
        metadata: Mapping[str, object],
        tell: Callable[[FromSupervisor], None],
        on_loop: Collection[str] = (),
    ) -> Seat:
        """A seat for a worker that was just started; `register` makes it known."""
        return Seat(pid=pid, queues=queues, metadata=metadata, tell=tell, clock=self.clock, on_loop=on_loop)

    async def register(self, seat: Seat) -> Welcome:
        """Makes a worker known and beats for it from now on; answers what the worker must be told."""
        await self._register(seat)
        seat.is_quiet = self._heart.is_quiet
        self.seats.append(seat)
        return self.welcome(seat)

    def welcome(self, seat: Seat) -> Welcome:
        """Who the worker is."""
        return Welcome(
            worker_id=seat.worker_id, supervisor_id=self.supervisor_id, session_name=self.session_name, quiet=seat.is_quiet
        )  # fmt: skip

    def dismiss(self, seat: Seat) -> None:
        """No beat speaks for the worker any more."""
        if seat in self.seats:
            self.seats.remove(seat)

    def drain(self) -> None:
        """Says with the next beat, which is now, that these workers claim no more."""
        self._heart.draining = True
        self._heart_runner.wake_now()

    def beat_now(self) -> None:
        """Makes the next beat start at once; its answer carries an operator's orders."""
        self._heart_runner.wake_now()

    async def can_connect(self) -> bool:
        """Whether a new connection is to be had now.

        A refusal is not a disturbance: what it excuses is for the caller to say, and several callers ask.
        """
        reply_s = min(_LONGEST_REPLY_S, self.beat_interval_s)
        session = Session(self.target, f"{self.session_name} supervisor", reply_timeout_s=reply_s)
        try:
            await session.run(leases.check_leases([]), patience_s=0)
        except (DatabaseError, OSError):
            return False
        finally:
            await session.drop()
        return True

    async def running(self, worker_id: str) -> list[str]:
        """The tasks whose code had begun in a worker, name and id; raises a DatabaseError."""
        held = await self.session.run(leases.leases_of_worker(worker_id, limit=_MOST_NAMES), patience_s=0)
        return [f"{lease.name} {lease.id}" for lease in held if lease.state is TaskState.RUNNING]

    def states(self) -> list[WorkerState]:
        """What each worker that has ticked was doing."""
        return [state for state in (seat.state() for seat in self.seats) if state is not None]

    async def close(self) -> None:
        """Ends the supervisor in good order, or what there is of one that could not be opened. The beats stop last."""
        await self._services.close()
        await self._nursery.close()
        is_known_to_end = not self._is_open
        try:
            if self._is_open:
                end = workers.end_supervisor(self.supervisor_id, how="left")
                await self.session.run(end, patience_s=_FAREWELL_PATIENCE_S)
                is_known_to_end = True
        except DatabaseError as problem:
            _log.warning("farewell_failed supervisor_id=%s problem=%s", self.supervisor_id, problem)
        await self._lock.close()
        await self._beats.drop()
        await self.session.drop()
        if self._tree_lock is not None:
            self._tree_lock.release(remove=is_known_to_end)

    async def _register(self, seat: Seat) -> None:
        row = seat.row(self.supervisor_id, self.identity.hostname)
        while not await self.session.run(workers.register_worker(row)):
            await self._come_back(row.supervisor_id)
            row = seat.row(self.supervisor_id, self.identity.hostname)

    async def _come_back(self, ended_id: str) -> None:
        """Declared dead and yet alive: goes on under a new id, and all workers with it. What they held is lost."""
        async with self._coming_back:
            if self.supervisor_id != ended_id:
                return
            row = self._row(new_id())
            await self.session.run(workers.register_supervisor(row))
            _log.warning("declared_dead supervisor_id=%s new_id=%s", ended_id, row.id)
            self.supervisor_id = row.id
            self._registered()
            for seat in list(self.seats):
                seat.rename()
                if await self.session.run(
                    workers.register_worker(seat.row(self.supervisor_id, self.identity.hostname))
                ):
                    seat.tell(Adopt(self.welcome(seat)))

    async def _adopt_anew(self, worker_id: str) -> None:
        """A worker that lives was ended by an operator: what it held is lost, and it goes on under a new id."""
        for seat in [seat for seat in self.seats if seat.worker_id == worker_id]:
            seat.rename()
            _log.warning("worker_released worker_id=%s new_id=%s", worker_id, seat.worker_id)
            await self._register(seat)
            seat.tell(Adopt(self.welcome(seat)))

    def _registered(self) -> None:
        if self._lock_task is not None:
            self._lock_task.cancel()
        lock_key = self.target.lock_key(self.supervisor_id)
        self._lock_task = self._nursery.start(
            self._lock.keep(self.supervisor_id, lock_key), name=f"session lock of {self.supervisor_id}"
        )
        self.events.emit(
            SupervisorRegistered(
                supervisor_id=self.supervisor_id, hostname=self.identity.hostname, pid=self.identity.pid
            )
        )

    def _row(self, supervisor_id: str | None = None) -> SupervisorRow:
        identity = self.identity
        name = supervisor_id or self.supervisor_id
        return SupervisorRow(
            id=name,
            hostname=identity.hostname,
            pid=identity.pid,
            boot_id=identity.boot_id,
            pid_namespace=None if identity.pid_namespace is None else str(identity.pid_namespace),
            process_started=identity.start_ticks,
            lock_key=self.target.lock_key(name),
            session_name=self.session_name,
            machine_id=identity.machine_id,
            lock_file=None if self._tree_lock is None else str(self._tree_lock.path),
            metadata=self._metadata,
            quiet=self._heart.is_quiet,
            beat_ms=self.config.beat_interval_ms,
            claimed_stale_ms=self.config.claimed_stale_threshold_ms,
            running_stale_ms=self.config.running_stale_threshold_ms,
        )

    def _new_session(self, purpose: str = "supervisor", *, patient: bool = False) -> Session:
        return Session(
            self.target,
            f"{self.session_name} {purpose}",
            random=self.random,
            on_state=self._on_state,
            statement_timeout_ms=round(_LONGEST_REPLY_S * 1_000),
            reply_timeout_s=min(_LONGEST_REPLY_S, self.beat_interval_s),
            longest_pause_s=min(1.0, self.beat_interval_s / 4),
            patient=patient,
            on_try=None if patient else self._outages.observer_of(purpose),
        )

    def _on_state(self, connected: bool) -> None:
        if not connected:
            self._losses += 1
        elif self._losses:
            self.reconnected_at = self.clock.monotonic()
            self._lock.renew()

    def _runner(self, service: Service) -> ServiceRunner:
        return ServiceRunner(service, clock=self.clock, random=self.random, emit=self.events.emit)
