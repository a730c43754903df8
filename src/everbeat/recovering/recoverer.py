"""Recover the leases of dead holders: call the hooks, decide, and apply the decisions in batches."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Final, Literal
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import replace

from everbeat.domain.recovery.decision import Charge, RecoveryRules, charge_of
from everbeat.domain.recovery.hooks import (
    CALLS_AT_ONCE,
    DEFAULT,
    HookReply,
    HooksUnreachable,
    RecoveryContext,
    Skip,
    SweepSummary,
)
from everbeat.domain.task.states import TaskState
from everbeat.recovering.counting import count_recovered
from everbeat.recovering.observer import (
    ONE_TRY,
    LeaseQuery,
    RecoveryEnvironment,
    Thresholds,
    collected,
    pages,
)
from everbeat.recovering.orders import (
    AGE,
    PROGRESS,
    STARTUP,
    SWEEP,
    Death,
    LostLease,
    RefusedOrders,
    context_of,
    facts_of,
    is_killed_by_us,
    order_for,
)
from everbeat.recovering.traced import with_traces
from everbeat.runtime.clock import Backoff
from everbeat.runtime.events import Event, TaskRecovered
from everbeat.runtime.failure_log import task_failure
from everbeat.runtime.processes import ExitReport
from everbeat.store import leases, tasks, workers
from everbeat.store.leases import Lease, Recovered, RecoveryOrder
from everbeat.store.tasks import process_ends

ORPHANED: Final = Death(noticed_by=SWEEP, cause="its worker is not registered")
NAMED: Final = 20
_MOST_OF_ONE_WORKER: Final = 10_000
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_BY_SILENCE: Final = frozenset({AGE, SWEEP, PROGRESS})


class RecoveryLeft(Event, frozen=True, kw_only=True):
    """A recovery hook returned `Skip`. The lease is not changed, and is offered to the hook again later."""

    component = "recovering"
    task_id: UUID
    name: str
    worker_id: str


class OrphanedTasksDetected(Event, frozen=True, kw_only=True):
    """Tasks are about to be recovered, because their workers were provably dead when this supervisor started. `task_ids` are the first ids."""

    component = "recovering"
    level = logging.WARNING
    count: int
    task_ids: tuple[UUID, ...]


class StaleTasksDetected(Event, frozen=True, kw_only=True):
    """Tasks are about to be recovered, because their holder or their code was silent for too long.

    `task_ids` contains the ids of the first of the `count` tasks.
    """

    component = "recovering"
    level = logging.WARNING
    count: int
    task_ids: tuple[UUID, ...]


class TaskTypePaused(Event, frozen=True, kw_only=True):
    """A task name was paused because too many of its tasks crashed within the window. `everbeat tasks resume NAME` resumes the name."""

    component = "recovering"
    level = logging.ERROR
    name: str
    crashes: int
    window_s: float
    reason: str


class Recovery(Struct, frozen=True, kw_only=True):
    """The leases to recover, each with its death and charge, and the conditions under which they can be recovered.

    If `rules` is None, the configured rules apply. `last_beat` contains the id of the silent supervisor and the sequence number of its last
    heartbeat. A later heartbeat cancels the recovery. `patience_s` limits how long each statement is retried, in seconds. `None` means
    until it succeeds.
    """

    lost: Sequence[LostLease]
    rules: RecoveryRules | None = None
    last_beat: tuple[str, int] | None = None
    patience_s: float | None = None


class RecoveryResult(Struct):
    """The result of a recovery: recovered tasks, claim ids of orders that were not applied, and leases that were left unchanged.

    A lease is left if a hook returned `Skip`, or if PostgreSQL rejects every recovery of its row. Later sweeps try again.
    """

    landed: list[Recovered] = []
    missed: set[UUID] = field(default_factory=set)
    left: dict[UUID, Lease] = field(default_factory=dict)
    contexts: list[RecoveryContext] = []

    def add(self, other: RecoveryResult) -> None:
        """Add the result of another part of the same recovery pass."""
        self.landed += other.landed
        self.missed |= other.missed
        self.left |= other.left
        self.contexts += other.contexts


class Recoverer:
    """Recovers the leases of dead holders. Every method is idempotent and safe to run concurrently with other calls and processes."""

    def __init__(self, environment: RecoveryEnvironment) -> None:
        config = environment.config
        self.environment = environment
        self.rules = RecoveryRules(
            requeue_claimed=config.auto_requeue_stale_claimed,
            settle_running=config.auto_fail_stale_running,
            delay_ms=config.recovery_delay_ms,
            max_crashes=config.max_crashes,
            max_losses=config.max_losses,
        )
        # These two settings do not apply to an operator's commands or to attempts of a living worker.
        self.unswitched_rules = replace(self.rules, requeue_claimed=True, settle_running=True)
        self._statements = environment.statements
        self._config = config
        self._clock = environment.clock
        self._hooks = environment.hooks
        self._refused = RefusedOrders()
        self._sharers: dict[str, int] = {}
        self._left_at: dict[UUID, float] = {}
        self._in_hand: set[UUID] = set()

    @property
    def hook_time_s(self) -> float:
        """Return the longest time that the hook calls for one batch can take, in seconds."""
        scopes = self._hooks.scopes
        if not (scopes.every_task or scopes.tasks):
            return 0.0
        return -(-self._config.sweep_batch_size // CALLS_AT_ONCE) * self._config.hook_timeout_ms / 1_000

    async def recover_worker(
        self, worker_id: str, report: ExitReport, *, died_at: float, leftover: int = 0
    ) -> int:
        """Recover all leases that a dead worker process held, retrying until this succeeds. Return the number of recovered leases.

        `died_at` is when the process died, on the monotonic clock. `leftover` is the number of attempts that were over while their code was
        still running in the process, and might have killed it. A call after an error continues where the previous call stopped.
        """
        # Count the tasks that shared the process before anything is changed. After a first batch, the remaining tasks would seem to have
        # been alone. Rows that are locked or have just been started are retried until they can be recovered.
        death = Death.by_exit(report, after_s=self._clock.monotonic() - died_at)
        result, backoff = RecoveryResult(), Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while True:
            found = await self._statements.run(leases.leases_of_worker(worker_id, limit=_MOST_OF_ONE_WORKER))
            ran = leftover + sum(lease.state is TaskState.RUNNING and not lease.alone for lease in found)
            sharers = self._sharers[worker_id] = max(self._sharers.get(worker_id, 0), ran)
            lost = [
                LostLease(
                    lease,
                    death,
                    Charge.LOSS if death.is_ours else charge_of(facts_of(lease), sharers=sharers),
                )
                for lease in found
            ]
            part = await self.recover_part(Recovery(lost=lost))
            result.add(part)
            if not part.missed:
                break
            await self._clock.sleep(backoff.next())
        del self._sharers[worker_id]
        await self.announce(result)
        return len(result.landed)

    async def recover_attempt(
        self, task_id: UUID, claim_id: UUID, death: Death, *, died_at: float | None = None
    ) -> Recovered | Literal["left"] | None:
        """Recover one attempt whose task process died or whose code stalled, retrying until this succeeds.

        Return None if the lease was already lost. Return "left" if a hook returned `Skip`. The holder then keeps the lease, and must call
        this method again later. `died_at` is when the process died, on the monotonic clock.
        """
        backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while True:
            found = await self._statements.run(leases.leases_by_id([task_id]))
            after_ms = None if died_at is None else round((self._clock.monotonic() - died_at) * 1_000)
            known = death if after_ms is None else replace(death, noticed_after_ms=after_ms)
            # Only the death of a task process has a pid, and its attempt ran alone in that process.
            lost = [
                LostLease(replace(lease, alone=lease.alone or death.pid is not None), known, Charge.CRASH)
                for lease in found
                if lease.claim_id == claim_id
            ]
            if not lost:
                return None
            result = await self.recover(Recovery(lost=lost, rules=self.unswitched_rules))
            if result.landed:
                return result.landed[0]
            if result.left:
                return "left"
            await self._clock.sleep(backoff.next())  # another transaction holds a lock on the row

    async def recover_supervisor(self, supervisor_id: str, death: Death) -> int:
        """Recover the leases of all workers of an ended supervisor, retrying until this succeeds.

        Return the number of recovered leases.
        """
        query = partial(leases.leases_of_supervisor, supervisor_id)
        return await self._recover_pages(query, lambda _: death, patience_s=None)

    async def bury_supervisor(
        self,
        supervisor_id: str,
        death: Death,
        *,
        beat_seq: int,
        session_at: datetime | None,
        patience_s: float | None = None,
    ) -> int | None:
        """Declare a supervisor and its workers dead, and recover their leases. Return the number of recovered leases.

        Return None if the supervisor was already ended, or has shown a sign of life since `beat_seq` and `session_at` were read.
        """
        end = workers.end_supervisor(
            supervisor_id, how=death.noticed_by, beat_seq=beat_seq, session_at=session_at
        )
        if not await self._statements.run(end, patience_s=patience_s):
            return None
        bury = workers.bury_workers(supervisor_id=supervisor_id, how=death.noticed_by, cause=death.cause)
        await self._statements.run(bury)
        return await self.recover_supervisor(supervisor_id, death)

    async def recover_ended(self) -> int:
        """Declare the workers of ended supervisors dead, and recover the leases of ended workers. Return the number of recovered leases.

        If an ended worker's supervisor is alive, the leases are left to that supervisor until the stale threshold for running tasks
        has passed.
        """
        problems: list[Exception] = []
        with collected(problems):  # workers that are already declared dead are recovered even if this fails
            await self.environment.run_once(workers.bury_orphans())
        claimed = (TaskState.CLAIMED,) if self.rules.requeue_claimed else ()
        running = (TaskState.RUNNING,) if self.rules.settle_running else ()
        query = partial(
            leases.leases_of_ended,
            states=(*claimed, *running),
            owner_ms=self._config.running_stale_threshold_ms,
        )
        recovered = await self._recover_pages(query, Death.on_record)
        if problems:
            raise problems[0]
        return recovered

    async def recover_orphans(self, thresholds: Thresholds) -> int:
        """Recover leases that unregistered workers have held for longer than the threshold, by the database's clock.

        Return the number of recovered leases.
        """
        query = partial(leases.leases_orphaned, silent_ms=thresholds.all_ms()[0])
        return await self._recover_pages(
            query, lambda lease: ORPHANED if thresholds.is_stale(lease) else None
        )

    async def _recover_pages(
        self,
        query: LeaseQuery,
        death_of: Callable[[Lease], Death | None],
        *,
        patience_s: float | None = ONE_TRY,
    ) -> int:
        """Recover the leases of a query in one pass, and return how many were recovered.

        Locked rows are skipped, and so are leases for which `death_of` returns None.
        """
        result = RecoveryResult()
        size = self._config.sweep_batch_size
        async for found in pages(self._statements, query, size=size, patience_s=patience_s):
            deaths = [(lease, death_of(lease)) for lease in found]
            lost = [LostLease(lease, death) for lease, death in deaths if death is not None]
            result.add(await self.recover_part(Recovery(lost=lost, patience_s=patience_s)))
        await self.announce(result)
        return len(result.landed)

    async def recover(self, recovery: Recovery) -> RecoveryResult:
        """Decide what happens to the leases, apply the decisions, and then notify the hooks."""
        result = await self.recover_part(recovery)
        await self.announce(result)
        return result

    async def recover_part(self, recovery: Recovery) -> RecoveryResult:
        """Recover one part of a pass without notifying the hooks. The caller must call `announce` at the end of the pass."""
        result, size = RecoveryResult(), self._config.sweep_batch_size
        for first in range(0, len(recovery.lost), size):
            batch = self._offered(recovery.lost[first : first + size], result)
            in_hand = {each.lease.claim_id for each in batch}
            self._in_hand |= in_hand
            try:
                await self._recover_batch(batch, recovery, result)
            finally:
                self._in_hand -= in_hand
        return result

    async def announce(self, result: RecoveryResult) -> None:
        """Notify the hooks that a pass has finished, if it recovered any tasks."""
        if not result.landed:
            return
        if self._hooks.scopes.interrupted:
            await self._hooks.interrupted(await with_traces(self.environment, result.contexts))
        if self._hooks.scopes.recovered:
            await self._hooks.recovered(
                SweepSummary(
                    worker_ids=tuple(sorted({one.worker_id for one in result.landed})),
                    recovered_count=len(result.landed),
                    task_ids=tuple(one.id for one in result.landed),
                    sweeping_worker_id=self.environment.observer.supervisor_id,
                )
            )

    def _offered(self, batch: Sequence[LostLease], result: RecoveryResult) -> list[LostLease]:
        """Return the leases that were not left recently and that no other pass in this process is recovering.

        Leases that another pass is recovering count as missed, because that pass might fail.
        """
        since = self._clock.monotonic() - self._config.check_interval_ms / 1_000
        self._left_at = {claim_id: at for claim_id, at in self._left_at.items() if at > since}
        offered: list[LostLease] = []
        for each in batch:
            if each.lease.claim_id in self._left_at:
                result.left[each.lease.claim_id] = each.lease
            elif each.lease.claim_id in self._in_hand:
                result.missed.add(each.lease.claim_id)
            else:
                offered.append(each)
        return offered

    async def _recover_batch(
        self, batch: Sequence[LostLease], recovery: Recovery, result: RecoveryResult
    ) -> None:
        rules, decides = recovery.rules or self.rules, self._hooks.scopes.decides
        try:
            answers = await self._ask_hooks(batch, rules)
        except HooksUnreachable:  # a caller that is waiting for these leases will try again
            answers = {}
            result.missed |= {each.lease.claim_id for each in batch if decides(each.lease.name)}
            batch = [each for each in batch if not decides(each.lease.name)]
        process_deaths = await self._earlier_process_deaths(batch, recovery)
        orders = defaultdict[str, list[RecoveryOrder]](list)
        for each in batch:
            order = order_for(
                each, rules=rules, random=self.environment.random, unless_beaten=recovery.last_beat is not None,
                answer=answers.get(each.lease.id, DEFAULT), process_deaths=process_deaths.get(each.lease.id, 0),
            )  # fmt: skip
            if order is not None:
                orders[each.death.noticed_by].append(order)
        skipped = [each.lease for each in batch if isinstance(answers.get(each.lease.id), Skip)]
        await self._leave(skipped, recovery, result)
        for noticed_by, some in orders.items():
            landed = await self._apply(some, recovery, noticed_by=noticed_by)
            ended = {one.id for one in landed}
            count_recovered(self.environment.rates, landed, batch, some, noticed_by=noticed_by)
            left = self._refused.left
            refused = {each.lease.claim_id: each.lease for each in batch if each.lease.claim_id in left}
            self._left_at |= dict.fromkeys(refused, self._clock.monotonic())
            result.landed += landed
            result.left |= refused
            result.missed |= {order.claim_id for order in some if order.id not in ended} - refused.keys()
            result.contexts += [self._context(each) for each in batch if each.lease.id in ended]

    async def _ask_hooks(self, batch: Sequence[LostLease], rules: RecoveryRules) -> Mapping[UUID, HookReply]:
        asked = [
            each
            for each in batch
            if self._hooks.scopes.decides(each.lease.name)
            and not each.lease.cancel_requested
            and (rules.settle_running if each.lease.state is TaskState.RUNNING else rules.requeue_claimed)
        ]
        return await self._hooks.decide([self._context(each) for each in asked]) if asked else {}

    def _context(self, lost: LostLease) -> RecoveryContext:
        return context_of(lost, sweeping_worker_id=self.environment.observer.supervisor_id)

    async def _earlier_process_deaths(
        self, batch: Sequence[LostLease], recovery: Recovery
    ) -> Mapping[UUID, int]:
        """Return, by task id, how many processes have died before while running the task, for tasks whose process has just died.

        Processes that everbeat killed do not count. Processes that exited with one of everbeat's exit codes do count, because user code
        can exit with the same code.
        """
        asked = [
            each.lease.id
            for each in batch
            if each.death.blame.of_the_process
            and each.lease.state is TaskState.RUNNING
            and each.lease.crash_count + each.lease.loss_count
        ]
        if not asked:
            return {}
        found = await self._statements.run(process_ends(asked), patience_s=recovery.patience_s)
        return Counter(task_id for task_id, cause in found if not is_killed_by_us(cause))

    async def _leave(self, skipped: Sequence[Lease], recovery: Recovery, result: RecoveryResult) -> None:
        """Record that a hook left these leases unchanged."""
        if not skipped:
            return
        left = {lease.id: lease for lease in skipped}
        result.left |= {lease.claim_id: lease for lease in skipped}
        self._left_at |= {lease.claim_id: self._clock.monotonic() for lease in skipped}
        leave = leases.leave([(lease.id, lease.claim_id) for lease in skipped])
        for task_id in await self._statements.run(leave, patience_s=recovery.patience_s):
            lease = left[task_id]
            skip = RecoveryLeft(task_id=task_id, name=lease.name, worker_id=lease.worker_id)
            self.environment.events.emit(skip)

    async def _apply(
        self, orders: Sequence[RecoveryOrder], recovery: Recovery, *, noticed_by: str
    ) -> list[Recovered]:
        """Run the recovery statement, report the recovered tasks and return them."""
        emit = self.environment.events.emit
        named = tuple(order.id for order in orders[:NAMED])
        if noticed_by == STARTUP:
            emit(OrphanedTasksDetected(count=len(orders), task_ids=named))
        elif noticed_by in _BY_SILENCE:
            emit(StaleTasksDetected(count=len(orders), task_ids=named))

        def recover(some: Sequence[RecoveryOrder]) -> Awaitable[list[Recovered]]:
            statement = leases.recover(
                some,
                noticed_by=noticed_by,
                recovered_by=self.environment.observer.supervisor_id,
                channel=self.environment.channel,
                last_beat=recovery.last_beat,
            )
            return self._statements.run(statement, patience_s=recovery.patience_s)

        landed = await self._refused.recover(orders, recover)
        errors = {order.id: order.error for order in orders}
        for one in landed:
            if one.action == "fail":
                emit(task_failure(one.id, one.name, attempt=one.attempt, error=errors[one.id] or b"{}"))
            emit(
                TaskRecovered(
                    task_id=one.id,
                    name=one.name,
                    from_state=one.was.value,
                    action=one.action,
                    cause=one.cause,
                    noticed_by=noticed_by,
                    noticed_after_s=(one.noticed_after_ms or 0) / 1_000,
                )
            )
        await self._pause_crashing({one.name for one in landed if one.outcome == "CRASHED"}, recovery)
        return landed

    async def _pause_crashing(self, names: set[str], recovery: Recovery) -> None:
        """Pause each of these task names if too many of its tasks have crashed within the window."""
        crashes, window_ms = self._config.brake_after_crashes, self._config.brake_window_ms
        if crashes is None or not names:
            return
        window_s = window_ms / 1_000
        reason = f"{crashes} or more of its tasks crashed within {window_s:g} s"
        statement = tasks.pause_crashing(names, crashes=crashes, window_ms=window_ms, reason=reason)
        for name, count, why in await self._statements.run(statement, patience_s=recovery.patience_s):
            paused = TaskTypePaused(name=name, crashes=count, window_s=window_s, reason=why)
            self.environment.events.emit(paused)
