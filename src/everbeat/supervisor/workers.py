"""A supervisor's workers: their reports, the heartbeats and snapshots that the supervisor writes, and the cleanup after exits."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, Protocol
from uuid import UUID

import msgspec

from everbeat.config import RecoveryConfig
from everbeat.domain.schedule.model import Declared
from everbeat.domain.series import AttemptResult, RateCounter
from everbeat.domain.task.states import TaskState
from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseUnreachable
from everbeat.protocol import (
    REPORT_EVERY_S,
    Beaten,
    CancelAttempts,
    DropLeases,
    FromSupervisor,
    Held,
    LeaseKey,
    Phantoms,
    Quiet,
    Tick,
)
from everbeat.recovering.observer import RecoveryEnvironment, pages
from everbeat.recovering.orders import facts_of
from everbeat.recovering.recoverer import Recoverer
from everbeat.runtime.clock import Clock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.failure_log import task_failure
from everbeat.runtime.identity import cpu_seconds, new_id, rss_bytes, start_ticks
from everbeat.runtime.processes import ExitReport
from everbeat.store import leases, workers
from everbeat.store.leases import Settlement
from everbeat.store.refusals import divided
from everbeat.store.session import Session
from everbeat.store.workers import BeatAnswer, WorkerRow, WorkerState


class SupervisedWorker:
    """A worker, as seen by its supervisor. `send` queues a message to the worker, and never blocks or raises.

    `on_loop`: the task functions whose code runs on the worker's event loop, and stands still while the loop is blocked. `heard_at`:
    when the worker last sent a message, on the supervisor's monotonic clock. `ticked_at`: when it last sent a `Tick`. `declared`: the
    schedules that the worker's code declares. `starts_version`: the worker is not just the successor of another one with this declaration.
    `relays_hints`: the supervisor passes hints on to the worker. `rates` receives the worker's counts.
    """

    def __init__(
        self,
        *,
        pid: int,
        queues: Sequence[str] | None,
        metadata: Mapping[str, object],
        send: Callable[[FromSupervisor], None],
        clock: Clock,
        on_loop: Collection[str] = (),
        declared: Declared | None = None,
        relays_hints: bool = False,
        rates: RateCounter | None = None,
    ) -> None:
        self.pid = pid
        self.relays_hints = relays_hints
        self.declared = declared
        self.starts_version = True
        self.on_loop = frozenset(on_loop)
        self.heard_at = clock.monotonic()
        self.send = send
        self.worker_id = new_id(pid)
        self.is_registered = False
        self.held: dict[UUID, UUID] = {}
        self.is_quiet = False
        self.tick: Tick | None = None
        self.ticked_at = self.heard_at
        self._cpu_s: float | None = None
        self._lost_since = 0
        self._rates = RateCounter() if rates is None else rates
        self._clock = clock
        self.queues = queues
        self._metadata = msgspec.json.encode(metadata).decode()
        self._process_started = start_ticks(pid)

    def rename(self) -> None:
        """Give the worker a new id and no leases, because it was declared dead under the old id."""
        self.worker_id = new_id(self.pid)
        self.is_registered = False
        self.starts_version = False
        self._lost_since += len(self.held)
        self.held.clear()

    @property
    def leftover(self) -> int:
        """Return how many attempts might be over while their code is still running in the worker's process.

        The number can be too high, but never too low.
        """
        return self._lost_since + (0 if self.tick is None else self.tick.leftover)

    def lose(self, leases: list[LeaseKey]) -> None:
        """Notify the worker that it no longer holds these leases."""
        for _, claim_id in leases:
            self.held.pop(claim_id, None)
        self._lost_since += len(leases)
        self.send(DropLeases(leases))

    def set_quiet(self, on: bool) -> None:
        """Turn the worker's quiet mode on or off. The worker is notified only of a change."""
        if self.is_quiet is not on:
            self.is_quiet = on
            self.send(Quiet(on))

    def receive(self, message: Held | Tick) -> None:
        """Store a report from the worker about its leases or its state."""
        self.heard_at = self._clock.monotonic()
        match message:
            case Held(added=added, removed=removed):
                self.held.update((claim_id, task_id) for task_id, claim_id in added)
                for claim_id in removed:
                    self.held.pop(claim_id, None)
            case Tick():
                self.tick, self._lost_since = message, 0
                self._rates.add(message.rates)
                if message.events is not None:
                    self._rates.events.add(message.events)
                self.ticked_at, self._cpu_s = self.heard_at, cpu_seconds(self.pid)

    def row(self, supervisor_id: str, hostname: str) -> WorkerRow:
        """Return the row with which the worker is registered."""
        return WorkerRow(
            id=self.worker_id,
            supervisor_id=supervisor_id,
            hostname=hostname,
            pid=self.pid,
            process_started=self._process_started,
            queues=self.queues,
            metadata=self._metadata,
            declared=self.declared,
            starts_version=self.starts_version,
        )

    def state(self) -> WorkerState | None:
        """Return a snapshot of the worker's state, or None before its first `Tick`.

        A worker whose event loop is blocked sends no reports. Its silence is then used as the loop lag, and its CPU time is read from
        the operating system.
        """
        tick = self.tick
        if tick is None:
            return None
        lag_ms, cpu_percent = tick.loop_lag_ms, tick.cpu_percent
        now = self._clock.monotonic()
        overdue_s = now - self.heard_at - REPORT_EVERY_S
        if overdue_s > 0:
            lag_ms = max(lag_ms, overdue_s * 1_000)
            cpu_percent = self._cpu_percent_since_tick(now)
        return WorkerState(
            worker_id=self.worker_id,
            running=tick.running,
            claimed=tick.claimed,
            slots=tick.slots,
            rss_bytes=rss_bytes(self.pid) or 0,
            cpu_percent=cpu_percent,
            loop_lag_ms=lag_ms,
            messages=None if tick.messages is None else msgspec.json.encode(tick.messages).decode(),
        )

    def _cpu_percent_since_tick(self, now: float) -> float:
        """Return the CPU usage since the last `Tick` as a percentage of one core, or 0 if it is unknown."""
        used_s = cpu_seconds(self.pid)
        if used_s is None or self._cpu_s is None:
            return 0.0
        return 100.0 * max(0.0, used_s - self._cpu_s) / (now - self.ticked_at)


class BeatingSupervisor(Protocol):
    """The interface of a supervisor for which heartbeats are sent."""

    config: RecoveryConfig
    environment: ProcessEnvironment
    supervisor_id: str
    workers: list[SupervisedWorker]

    async def come_back(self, ended_id: str) -> None:
        """Continue under a new id, because the supervisor was declared dead under the id `ended_id`."""
        ...

    async def adopt_anew(self, worker_id: str) -> None:
        """Continue a worker under a new id, because an operator has declared it dead."""
        ...


_BEAT_AGAIN_S: Final = 0.05
_log = logging.getLogger("everbeat.supervisor")


class Heartbeat:
    """A service that sends heartbeats for a supervisor and its workers, and forwards the replies to the workers.

    `on_acknowledged` is called with the time that each written heartbeat took, in seconds.
    """

    name = "heartbeat"

    def __init__(self, session: Session, supervisor: BeatingSupervisor) -> None:
        self.interval_s = supervisor.config.beat_interval_ms / 1_000
        self.draining = False
        self.is_quiet = False
        self.failures = 0
        self.acknowledged = 0
        self.on_acknowledged: Callable[[float], object] = float
        self._session = session
        self._supervisor = supervisor

    async def tick(self) -> float | None:
        """Send one heartbeat, and retry it for at most one interval.

        After a failure, the next tick sends a new heartbeat, which renews the leases that are held by then.
        """
        supervisor_id = self._supervisor.supervisor_id
        beating = list(self._supervisor.workers)
        held = [(task_id, claim_id) for worker in beating for claim_id, task_id in worker.held.items()]
        holders = {claim_id: worker for worker in beating for claim_id in worker.held}
        asked_at = self._supervisor.environment.clock.monotonic()
        try:
            answer = await self._session.run(
                workers.beat(
                    supervisor_id,
                    held,
                    draining=self.draining,
                    worker_ids=[worker.worker_id for worker in beating if worker.is_registered],
                ),
                patience_s=self.interval_s,
            )
        except Exception as problem:
            # Count failures of every type. A supervisor whose own heartbeat was not acknowledged must not declare silent
            # supervisors dead.
            self.failures += 1
            if not isinstance(problem, DatabaseUnreachable | DatabaseReadOnly):
                raise
            return _BEAT_AGAIN_S
        if answer.seq is None:
            await self._supervisor.come_back(supervisor_id)
            return 0.0
        self.acknowledged += 1
        self.on_acknowledged(self._supervisor.environment.clock.monotonic() - asked_at)
        _pass_on(answer, beating, holders, sent_at=asked_at)
        if self.is_quiet is not answer.quiet:
            self.is_quiet = answer.quiet
            _log.info("claims=%s by=operator", "none" if answer.quiet else "resumed")
        for worker in self._supervisor.workers:  # including workers that were registered during the heartbeat
            worker.set_quiet(answer.quiet)
        for worker_id in answer.ended:
            await self._supervisor.adopt_anew(worker_id)
        return None


def _pass_on(
    answer: BeatAnswer,
    beating: Sequence[SupervisedWorker],
    holders: Mapping[UUID, SupervisedWorker],
    *,
    sent_at: float,
) -> None:
    """Send each worker its part of the reply to a heartbeat, and notify it that the heartbeat was acknowledged."""
    lost, cancelled, phantoms = (defaultdict[SupervisedWorker, list[LeaseKey]](list) for _ in range(3))
    by_id = {worker.worker_id: worker for worker in beating}
    for lease in answer.lost:
        lost[holders[lease[1]]].append(lease)
    for lease in answer.cancel:
        cancelled[holders[lease[1]]].append(lease)
    for task_id, claim_id, worker_id in answer.phantoms:
        if worker_id in by_id:
            phantoms[by_id[worker_id]].append((task_id, claim_id))
    for worker in beating:
        if worker in lost:
            worker.lose(lost[worker])
        if worker in cancelled:
            worker.send(CancelAttempts(cancelled[worker]))
        if worker in phantoms:
            worker.send(Phantoms(phantoms[worker]))
        worker.send(Beaten(answer.seq or 0, sent_at))


_SOON_S: Final = 1.0
_READING_S: Final = 0.1
_PAUSE_S: Final = 1.0


class Snapshots:
    """A service of every supervisor that stores snapshots of its workers' state."""

    name = "snapshots"

    def __init__(self, environment: RecoveryEnvironment, supervisor: BeatingSupervisor) -> None:
        self.interval_s = environment.config.worker_state_snapshot_interval_ms / 1_000
        self._environment = environment
        self._supervisor = supervisor

    async def tick(self) -> float | None:
        """Store one row for each worker that has sent a `Tick`."""
        states = await self._states()
        if states:
            await self._environment.run_once(workers.record_states(states))
            return None
        # A worker sends its first `Tick` a second after its start, and its first snapshot should not wait for a whole interval.
        return min(_SOON_S, self.interval_s)

    async def _states(self) -> list[WorkerState]:
        """Return a snapshot of each worker, taken when this process has read the workers' messages.

        While this process is suspended or blocked, the messages of its workers wait, and the workers appear to be silent. Their states
        count only if the messages had time to be read, and this process was not suspended in that time.
        """
        clock = self._environment.clock
        while True:
            began_at = clock.monotonic()
            await clock.sleep(_READING_S)
            states = [state for worker in self._supervisor.workers if (state := worker.state()) is not None]
            if clock.monotonic() - began_at <= _READING_S + _PAUSE_S:
                return states


_BURIAL_AGAIN_S: Final = 1.0
_MOST_STOPPED_AT_ONCE: Final = 500
_LONGEST_PROBLEM: Final = 500


class WorkerBurial:
    """Ends the rows of workers that are gone, and settles their attempts.

    Each step is repeated until it succeeds in the database. Heartbeats for the worker must have stopped before.
    """

    def __init__(self, recoverer: Recoverer) -> None:
        config = recoverer.environment.config
        self._recoverer = recoverer
        self._environment = recoverer.environment
        self._threshold_s = max(config.claimed_stale_threshold_ms, config.running_stale_threshold_ms) / 1_000

    async def by_exit(self, worker: SupervisedWorker, report: ExitReport, *, died_at: float) -> None:
        """End the row of a worker whose process exit was observed, and settle its attempts."""
        # Settle stopped attempts before the row ends. Once the row has ended, a sweep could mistake the shutdown for a death.
        if report.stopped:
            await self._until_answered(partial(self.settle_stopped, worker.worker_id))
        await self._until_answered(partial(self._end, worker, how="child_exit", report=report))
        recover = partial(
            self._recoverer.recover_worker,
            worker.worker_id,
            report,
            died_at=died_at,
            leftover=worker.leftover,
        )
        await self._until_answered(recover)

    async def by_age(self, worker: SupervisedWorker, report: ExitReport) -> None:
        """End the row of a worker after waiting for a whole stale threshold, because its exit is not used as proof of its death.

        The next sweep settles the worker's attempts.
        """
        await self._environment.clock.sleep(self._threshold_s)
        await self._until_answered(partial(self._end, worker, how="age", report=report))

    async def in_order(self, worker: SupervisedWorker) -> None:
        """End the row of a worker that has settled or released all of its attempts.

        Attempts that a recovery hook left unchanged may remain. Sweeps offer these to the hook again.
        """
        await self._until_answered(partial(self._end, worker, how="left"))

    async def with_running_code(self, worker: SupervisedWorker) -> None:
        """Settle attempts of a worker that has shut down while some of its code is still running in its process.

        Only attempts that will not run again are settled.
        """
        await self._until_answered(partial(self.settle_stopped, worker.worker_id, code_runs=True))

    async def after_code(self, worker: SupervisedWorker, settle: Callable[[], Awaitable[None]]) -> None:
        """Settle the remaining attempts of a worker that has shut down, once its code has finished, and end its row.

        `settle` is awaited first. It must return once the worker's code has finished.
        """
        await self._until_answered(settle)
        await self._until_answered(partial(self.settle_stopped, worker.worker_id))
        await self._until_answered(partial(self._end, worker, how="left"))

    async def _end(self, worker: SupervisedWorker, *, how: str, report: ExitReport | None = None) -> None:
        await self._environment.statements.run(
            workers.bury_workers(
                worker_ids=[worker.worker_id],
                how=how,
                cause=None if report is None else report.cause,
                exit_code=None if report is None else report.exit_code,
                signal=None if report is None else report.signal_number,
            )
        )

    async def _until_answered(self, step: Callable[[], Awaitable[object]]) -> None:
        while True:
            try:
                await step()
                return
            except DatabaseError as problem:
                _log.error("burial_refused problem=%s", problem)
                await self._environment.clock.sleep(_BURIAL_AGAIN_S)

    async def settle_stopped(self, worker_id: str, *, code_runs: bool = False) -> None:
        """Settle the attempts whose code stopped with its worker process, following each task's policy for a shutdown.

        If `code_runs` is true, some of the code is still running. Then only attempts that will not run again and belong to no serial
        line are settled. Otherwise, another run of the task or the next run of the line could overlap with the running code.

        A lease that a recovery hook left is not changed. If the database refuses a settlement, the lease stays held, and recovery
        decides what happens to it.
        """
        verdicts: Counter[str] = Counter()
        query = partial(leases.leases_of_worker, worker_id)
        async for found in pages(self._environment.statements, query, size=_MOST_STOPPED_AT_ONCE):
            left = await self._environment.statements.run(leases.left_by_hooks([lease.id for lease in found]))
            ran = [
                leases.stop_settlement(lease.id, lease.claim_id, policy=facts_of(lease).policy)
                for lease in found
                if lease.state is TaskState.RUNNING
                and lease.id not in left
                and not (code_runs and (lease.serial is not None or facts_of(lease).policy.retries_stop))
            ]
            landed = dict(await divided(ran, self._settle, _settlement_refused)) if ran else {}
            verdicts.update(landed.values())
            errors = {one.claim_id: one.error or b"{}" for one in ran}
            for lease in found:
                if (state := landed.get(lease.claim_id)) in ("FAILED", "PENDING"):
                    result: AttemptResult = "failed" if state == "FAILED" else "released"
                    self._environment.rates.ended(lease.queue, lease.name, result)
                if state == "FAILED":
                    error = errors[lease.claim_id]
                    self._environment.events.emit(
                        task_failure(lease.id, lease.name, attempt=lease.attempt, error=error)
                    )
        _log.info(
            "stopped_code_settled worker_id=%s handed_back=%d failed=%d",
            worker_id,
            verdicts["PENDING"],
            verdicts["FAILED"],
        )

    async def _settle(self, part: Sequence[Settlement]) -> list[tuple[UUID, str]]:
        channel = self._environment.channel
        return list((await self._environment.statements.run(leases.settle(part, channel=channel))).items())


async def _settlement_refused(settlement: Settlement, problem: Exception) -> list[tuple[UUID, str]]:
    _log.error("settlement_refused task_id=%s problem=%s", settlement.id, str(problem)[:_LONGEST_PROBLEM])
    return []
