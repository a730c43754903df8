"""A supervisor's presence in the database: its registration, session lock, heartbeats and periodic services."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.domain.doctor.findings import sweep_command
from everbeat.domain.recovery.hooks import HookRunner, NoHooks
from everbeat.domain.task.states import TaskState
from everbeat.errors import DatabaseError
from everbeat.maintenance.bulk import BulkActor
from everbeat.maintenance.cleanup import Expirer, Pruner, UselessSessionWatch
from everbeat.maintenance.history import HistoryKeeper
from everbeat.maintenance.reconciler import Reconciler
from everbeat.maintenance.reruns import RerunWatch
from everbeat.maintenance.scheduler import Declarations, Scheduler
from everbeat.maintenance.series import DepthSampler, RatesWriter
from everbeat.protocol import Adopt, Welcome
from everbeat.recovering.notice.age import Reaper
from everbeat.recovering.notice.session import MassSessionLoss, SessionWatch
from everbeat.recovering.notice.stall import BlockedLoopWatch
from everbeat.recovering.notice.startup import Reconciliation, SlotKeeper, Witness
from everbeat.recovering.observer import RecoveryEnvironment
from everbeat.recovering.orders import SESSION
from everbeat.recovering.recoverer import Recoverer
from everbeat.recovering.watch_turn import Watching, WatchTurn
from everbeat.runtime.clock import Backoff, Clock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, MassSilence, SupervisorRegistered
from everbeat.runtime.identity import ProcessIdentity, TreeLock, new_id, new_tree_name
from everbeat.runtime.task_scope import Service, ServiceRunner, TaskScope, end_process
from everbeat.store import leases, workers
from everbeat.store.session import Session
from everbeat.store.target import Target
from everbeat.store.workers import SupervisorRow
from everbeat.supervisor.outages import Outages
from everbeat.supervisor.workers import Heartbeat, Snapshots, SupervisedWorker, WorkerBurial

_log = logging.getLogger("everbeat.supervisor")


class SessionLock:
    """Holds the supervisor's session lock. Behind a transaction pooler, no session can hold a lock, so none is taken."""

    def __init__(self, session: Session, *, clock: Clock) -> None:
        self._session = session
        self._clock = clock
        self._is_due = asyncio.Event()

    def renew(self) -> None:
        """Take the lock again, because the supervisor might have reconnected to a different server."""
        self._is_due.set()

    async def keep(self, supervisor_id: str, lock_key: int) -> None:
        """Hold the lock until this coroutine is cancelled or the supervisor's row has ended."""
        backoff = Backoff(first_s=0.05, longest_s=1.0)
        while True:
            try:
                connection = await self._session.open()
                self._is_due.clear()
                if self._session.pooled:
                    _log.warning("session_lock_off reason=%r", "connections go through a transaction pooler")
                    await self._session.drop()
                    return
                match await self._session.run(workers.hold_session(supervisor_id, lock_key), patience_s=0):
                    case None:
                        return
                    case True if await self._session.open() is connection:
                        backoff.reset()
                        await _until_readable(connection.fileno(), self._is_due)
                        continue  # the connection has usually closed, and the next statement detects that
                    case _:
                        pass  # the server has not noticed yet that the old connection has closed
            except (DatabaseError, OSError) as problem:
                _log.debug("session_lock_lost problem=%s", problem)
            await self._clock.sleep(backoff.next())

    async def close(self) -> None:
        """Release the lock by closing its connection."""
        await self._session.drop()


async def _until_readable(descriptor: int, is_due: asyncio.Event) -> None:
    """Wait until the server sends data on an idle connection or closes it, or until `is_due` is set."""
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, is_due.set)
    try:
        await is_due.wait()
    finally:
        loop.remove_reader(descriptor)


START_PATIENCE_S: Final = 10.0
_END_PATIENCE_S: Final = 5.0
_LONGEST_REPLY_S: Final = 10.0
_MOST_NAMES: Final = 1_000


class Supervision:
    """One supervisor's presence in the database. It is the `Observer` for the services that detect deaths and recover leases.

    `lock`: the lock file that all processes of the tree hold. It is released on close, and removed if it is not needed as proof.
    `slot`: a name that at most one living supervisor has at a time. `hooks` calls the app's recovery hooks. `identity`: the process in
    whose name the supervisor registers, by default this one.
    """

    def __init__(
        self,
        target: Target,
        config: RecoveryConfig,
        *,
        environment: ProcessEnvironment,
        lock: TreeLock | None = None,
        slot: str | None = None,
        hooks: HookRunner | None = None,
        identity: ProcessIdentity | None = None,
        on_fatal: Callable[[str, BaseException], None] = end_process,
    ) -> None:
        self.target = target
        self.config = config
        self.environment = environment
        self.identity = identity or ProcessIdentity.current()
        self.supervisor_id = new_id()
        # The lock and the session name identify the process tree, so they are kept when the supervisor registers again
        # under a new id.
        self._tree_lock = lock
        self.session_name = new_tree_name() if lock is None else lock.name
        self.workers: list[SupervisedWorker] = []
        self.reconnected_at: float | None = None
        self.outages = Outages(events=environment.events, clock=environment.clock)
        self.session = self._new_session()
        # Use a separate session, so that no statement of a service or of the cleanup delays a heartbeat.
        self._beats = self._new_session("supervisor beats")
        self._lock = SessionLock(self._new_session(patient=True), clock=environment.clock)
        self._is_open = False
        self._losses = 0
        self._scope = TaskScope(name="supervision", on_fatal=on_fatal)
        self._services_scope = TaskScope(name="services", on_fatal=on_fatal)
        self._lock_task: asyncio.Task[None] | None = None
        self._coming_back = asyncio.Lock()
        self._declared_last: tuple[str, str] | None = None
        self.heartbeat = Heartbeat(self._beats, self)
        self._heartbeat_runner = self._runner(self.heartbeat)
        self.recovery = RecoveryEnvironment(
            statements=self.session,
            config=config,
            channel=target.channel,
            observer=self,
            events=environment.events,
            clock=environment.clock,
            random=environment.random,
            hooks=hooks or NoHooks(),
        )
        recoverer = Recoverer(self.recovery)
        self.burial = WorkerBurial(recoverer)
        self._reconciliation = Reconciliation(recoverer, identity=self.identity)
        self._witness = Witness(recoverer, identity=self.identity, proves_deaths=self._is_reconciling)
        self._turn = WatchTurn(
            self.recovery,
            on_taken=self._watch_now,
            prove_deaths=partial(self._witness.bury_all_proven, noticed_by=SESSION),
        )
        self._turn_runner = self._runner(self._turn)
        self._unsubscribe = environment.events.subscribe(self._report_mass, listens=_is_mass)
        self._watches: list[ServiceRunner] = []
        self._scheduler = self._runner(Scheduler(self.recovery, pace_s=self._pace_s))
        self._declarations = Declarations(self.recovery, on_change=self._scheduler.wake_now)
        self._declarations_runner = self._runner(self._declarations)
        self.rates = RatesWriter(self.recovery)
        self.services = self._services_with(recoverer, slot=slot)

    def _services_with(self, recoverer: Recoverer, *, slot: str | None) -> list[Service]:
        """Return the periodic services that the settings require."""
        config, recovery, witness, turn = self.config, self.recovery, self._witness, self._turn
        command = sweep_command(beat_interval_ms=config.beat_interval_ms, schema=self.target.schema)
        services: list[Service] = []
        if self._is_recovering and config.detect_session_loss:
            watch = partial(SessionWatch, recoverer, witness=witness, command=command, turn=turn)
            services.append(Watching(watch, turn))
        if self._is_recovering:
            services.append(
                Watching(partial(Reaper, recoverer, witness=witness, command=command, turn=turn), turn)
            )
            services.append(Watching(partial(UselessSessionWatch, recovery), turn))
        if config.auto_fail_stale_running:
            services.append(BlockedLoopWatch(recoverer, supervisor=self))
        if self._is_reconciling and slot is not None:
            services.append(SlotKeeper(recoverer, slot=slot, witness=witness))
        services += [
            Expirer(recovery),
            Reconciler(recovery, transactions=self.session),
            BulkActor(recovery, open_spare=self._open_spare, pace_s=self._pace_s),
            Snapshots(recovery, self),
            HistoryKeeper(recovery, open_spare=self._open_spare),
            Pruner(recovery, open_spare=self._open_spare),
            self.rates,
            RerunWatch(recovery, self.rates),
            DepthSampler(recovery, pace_s=self._pace_s),
        ]
        return services

    @property
    def _is_recovering(self) -> bool:
        """Return whether any part of automatic recovery is on. If none is on, this supervisor declares no other supervisor dead."""
        return self.config.auto_requeue_stale_claimed or self.config.auto_fail_stale_running

    @property
    def _is_reconciling(self) -> bool:
        """Return whether this supervisor searches its host for proof that processes have died."""
        return self._is_recovering and self.config.startup_reconciliation

    @property
    def is_pooled(self) -> bool:
        """Return whether a transaction pooler is in front of the database. A lost session then does not prove a death."""
        return self.session.pooled

    @property
    def is_watching(self) -> bool:
        """Return whether this supervisor has a turn to watch the other supervisors."""
        return self._turn.is_held

    @property
    def disturbances(self) -> int:
        """Return the number of failed heartbeats plus the number of lost sessions since the start."""
        return self._losses + self.heartbeat.failures

    async def open(self, *, patience_s: float = START_PATIENCE_S) -> None:
        """Register the supervisor, and start its heartbeats and services.

        Raises DatabaseError if the database cannot be reached within `patience_s` seconds or refuses the registration.
        """
        await self.session.run(workers.register_supervisor(self._row()), patience_s=patience_s)
        self._is_open = True
        self._registered()
        self._scope.start(self._heartbeat_runner.run(), name="heartbeat", critical=True)
        with suppress(DatabaseError):  # the service tries again
            await self._turn.tick()
        if self._is_reconciling:
            self._services_scope.start(self._reconciliation.run(), name="start-up")
        runners = [
            self._turn_runner,
            self._scheduler,
            self._declarations_runner,
            *map(self._runner, self.services),
        ]
        self._watches = [each for each in runners if isinstance(each.service, Watching | Scheduler)]
        for runner in runners:
            self._services_scope.start(runner.run(), name=runner.service.name, critical=True)

    async def register(self, worker: SupervisedWorker) -> Welcome:
        """Register a worker, start sending heartbeats for it, and return its welcome message."""
        if worker.declared is not None:
            version = worker.declared.owner, worker.declared.version
            worker.starts_version, self._declared_last = version != self._declared_last, version
        await self._register(worker)
        worker.is_quiet = self.heartbeat.is_quiet
        self.workers.append(worker)
        return self.welcome(worker)

    def welcome(self, worker: SupervisedWorker) -> Welcome:
        """Return the welcome message for a worker, which contains its ids."""
        return Welcome(
            worker_id=worker.worker_id,
            supervisor_id=self.supervisor_id,
            session_name=self.session_name,
            quiet=worker.is_quiet,
            relays_hints=worker.relays_hints,
        )

    def dismiss(self, worker: SupervisedWorker) -> None:
        """Stop sending heartbeats for a worker."""
        if worker in self.workers:
            self.workers.remove(worker)

    def drain(self) -> None:
        """Send a heartbeat at once to record that this supervisor is draining."""
        self.heartbeat.draining = True
        self._heartbeat_runner.wake_now()

    def beat_now(self) -> None:
        """Send the next heartbeat at once, because its reply contains the operator's orders."""
        self._heartbeat_runner.wake_now()

    async def can_connect(self) -> bool:
        """Return whether the server accepts a new connection now.

        A refused connection is not counted in `disturbances`, because each caller decides what the refusal means.
        """
        session = Session(
            self.target, f"{self.session_name} supervisor", reply_timeout_s=self._longest_reply_s
        )
        try:
            await session.run(leases.check_leases([]), patience_s=0)
        except (DatabaseError, OSError):
            return False
        finally:
            await session.drop()
        return True

    async def running(self, worker_id: str) -> list[str]:
        """Return the name and id of each task whose code is running in a worker.

        Raises DatabaseError if the database cannot be reached.
        """
        held = await self.session.run(leases.leases_of_worker(worker_id, limit=_MOST_NAMES), patience_s=0)
        return [f"{lease.name} {lease.id}" for lease in held if lease.state is TaskState.RUNNING]

    async def close(self) -> None:
        """Stop the services and then the heartbeats, and record that the supervisor has left. Safe to call even if `open` failed."""
        await self._stop()
        is_known_to_end = not self._is_open
        try:
            if self._is_open:
                await self.rates.flush()
                end = workers.end_supervisor(self.supervisor_id, how="left")
                await self.session.run(end, patience_s=_END_PATIENCE_S)
                is_known_to_end = True
        except DatabaseError as problem:
            _log.warning(
                "supervisor_end_not_recorded supervisor_id=%s problem=%s", self.supervisor_id, problem
            )
        await self._disconnect()
        if self._tree_lock is not None:
            self._tree_lock.release(remove=is_known_to_end)

    async def abandon(self) -> None:
        """Stop without a trace in the database, as if the process had been killed. Used by simulations."""
        await self._stop()
        await self._disconnect()

    async def _stop(self) -> None:
        self._unsubscribe()
        await self._services_scope.close()
        await self._scope.close()

    async def _disconnect(self) -> None:
        await self._lock.close()
        await self._beats.drop()
        await self.session.drop()

    async def come_back(self, ended_id: str) -> None:
        """Register this supervisor and all its workers under new ids after it was declared dead. The workers' leases are lost."""
        async with self._coming_back:
            if self.supervisor_id != ended_id:
                return
            row = self._row(new_id())
            await self.session.run(workers.register_supervisor(row))
            _log.warning("declared_dead supervisor_id=%s new_id=%s", ended_id, row.id)
            self.supervisor_id = row.id
            self._registered()
            for worker in list(self.workers):
                worker.rename()
                if await self.session.run(workers.register_worker(self._worker_row(worker))):
                    worker.is_registered = True
                    worker.send(Adopt(self.welcome(worker)))

    async def adopt_anew(self, worker_id: str) -> None:
        """Register a living worker under a new id, because its row has ended or is missing. The worker's leases are lost."""
        for worker in [worker for worker in self.workers if worker.worker_id == worker_id]:
            worker.rename()
            _log.warning("worker_registered_again worker_id=%s new_id=%s", worker_id, worker.worker_id)
            await self._register(worker)
            worker.send(Adopt(self.welcome(worker)))

    async def _register(self, worker: SupervisedWorker) -> None:
        row = self._worker_row(worker)
        while not await self.session.run(workers.register_worker(row)):
            await self.come_back(row.supervisor_id)
            row = self._worker_row(worker)
        worker.is_registered = row.id == worker.worker_id
        if worker.declared is not None:
            self._declarations.apply_now()
            self._declarations_runner.wake_now()

    def _worker_row(self, worker: SupervisedWorker) -> workers.WorkerRow:
        return worker.row(self.supervisor_id, self.identity.hostname)

    def _registered(self) -> None:
        if self._lock_task is not None:
            self._lock_task.cancel()
        lock_key = self.target.lock_key(self.supervisor_id)
        self._lock_task = self._scope.start(
            self._lock.keep(self.supervisor_id, lock_key), name=f"session lock of {self.supervisor_id}"
        )
        self.environment.events.emit(
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
            quiet=self.heartbeat.is_quiet,
            beat_ms=self.config.beat_interval_ms,
            claimed_stale_ms=self.config.claimed_stale_threshold_ms,
            running_stale_ms=self.config.running_stale_threshold_ms,
        )

    @property
    def _longest_reply_s(self) -> float:
        return min(_LONGEST_REPLY_S, self.config.beat_interval_ms / 1_000)

    def _open_spare(self) -> Session:
        return Session(self.target, f"{self.session_name} pruner", random=self.environment.random)

    def _new_session(self, purpose: str = "supervisor", *, patient: bool = False) -> Session:
        return Session(
            self.target,
            f"{self.session_name} {purpose}",
            random=self.environment.random,
            on_state=self._on_state,
            statement_timeout_ms=round(_LONGEST_REPLY_S * 1_000),
            reply_timeout_s=self._longest_reply_s,
            longest_pause_s=min(1.0, self.config.beat_interval_ms / 4_000),
            patient=patient,
            on_try=None if patient else partial(self.outages.observe, purpose),
        )

    def _on_state(self, connected: bool) -> None:
        if not connected:
            self._losses += 1
        elif self._losses:
            self.reconnected_at = self.environment.clock.monotonic()
            self._lock.renew()
            self._turn_runner.wake_now()  # others might take the turn, because its lock was released

    def _pace_s(self) -> float:
        return 0.0 if self._turn.is_held else self._turn.pace_s

    def _watch_now(self) -> None:
        for runner in self._watches:
            runner.wake_now()

    def _report_mass(self, event: Event) -> None:
        if _is_mass(type(event)):
            self._turn.report_mass()

    def _runner(self, service: Service) -> ServiceRunner:
        environment = self.environment
        return ServiceRunner(
            service, clock=environment.clock, random=environment.random, emit=environment.events.emit
        )


def _is_mass(kind: type[Event]) -> bool:
    return issubclass(kind, MassSilence | MassSessionLoss)
