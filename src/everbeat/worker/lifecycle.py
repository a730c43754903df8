"""Launches, stops and settles attempts by carrying out the effects listed in the state table of `worker/attempt.py`."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from everbeat.domain.recovery.decision import Stall
from everbeat.domain.series import AttemptResult
from everbeat.errors import EverbeatError, StopReason
from everbeat.protocol import LeaseKey
from everbeat.runtime.events import LeasesLost, TaskFinished, ZombieRefused
from everbeat.runtime.processes import ExitReport
from everbeat.store.leases import Settlement
from everbeat.worker.attempt import (
    ALONE,
    CODE_RUNS,
    UNSETTLED,
    Attempt,
    AttemptEnd,
    CodeCancelled,
    CodeFailed,
    CodePostponed,
    Declined,
    Died,
    ExecutorName,
    StageEvent,
    StopRequest,
)
from everbeat.worker.attempt_events import emit_failed, emit_finished, emit_postponed, emit_started
from everbeat.worker.declines import Declines
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.executors.executor import Executor
from everbeat.worker.leases import LeaseTable
from everbeat.worker.log_recorder import LogRecorder
from everbeat.worker.messages import ExecutorBroken, ExecutorsChanged
from everbeat.worker.progress import ProgressRecorder, StallWatch, TaskStalled
from everbeat.worker.settlement import (
    Settler,
    cancel_what_it_started,
    cancels_its_children,
    failed_after_commit,
    rate_of,
    refused_result,
    settlement_of,
    state_after,
)
from everbeat.worker.streams import StreamRecorder
from everbeat.worker.traced_attempts import next_context
from everbeat.worker.workflow_advancer import Advancer

RecoverAttempt: TypeAlias = Callable[[LeaseKey, ExitReport | Stall, float], Awaitable[bool]]
"""Settles an attempt whose task process exited or whose code stalled, the way a supervisor would.

Returns False if a recovery hook left the attempt unchanged. The last argument is when the attempt was lost, on the monotonic clock.
"""

SETTLE_AFTER_S: Final[Mapping[ExecutorName, float]] = {
    "async": 0.5,
    "thread": 0.5,
    "process": 0.9,
    "solo": 0.9,
}
"""How long code that was asked to stop can take before its attempt is settled without waiting for the code, in seconds."""
_RETRY_PAUSE_S: Final = 1.0

_log = logging.getLogger("everbeat.worker")


class AttemptLifecycle:
    """Launches attempts, stops their code and settles them."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        table: LeaseTable,
        executors: Mapping[ExecutorName, Executor],
        settler: Settler,
        progress: ProgressRecorder,
        streams: StreamRecorder,
        logs: LogRecorder,
        stalls: StallWatch,
        advancer: Advancer,
        recover: RecoverAttempt,
    ) -> None:
        self.running_after_commit: set[Attempt] = set()
        """Attempts that were completed by their own code's commit and whose code is still running."""
        self.leftover: set[Attempt] = set()
        """Attempts whose outcome is decided but whose code is still running in this process, and might still break the process."""
        self.leftover_added = asyncio.Event()
        """Set when an attempt is added to `leftover`."""
        self.outcomes: Counter[str] = Counter()
        self.unsettled: Counter[ExecutorName] = Counter()
        self.declines = Declines(environment.events)
        self._environment = environment
        self._events = environment.events
        self._clock = environment.clock
        self._random = environment.random
        self._table = table
        self._executors = executors
        self._settler = settler
        self._progress = progress
        self._streams = streams
        self._logs = logs
        self._stalls = stalls
        self._advancer = advancer
        self._recover = recover
        self._rates = environment.rates
        self._changed_executors: set[ExecutorName] = set()

    @property
    def unstoppable(self) -> list[Attempt]:
        """Return the attempts whose code was asked to stop for a worker shutdown but did not finish in time.

        These attempts are settled after their process has exited.
        """
        return [attempt for attempt in self._table if attempt.is_unstoppable]

    def launch(self, attempt: Attempt, *, may_begin: bool = True) -> bool:
        """Start the code of an attempt whose start the database has acknowledged. Return whether the code has started."""
        attempt.move("LAUNCH")
        attempt.launched_at = self._clock.monotonic()
        executor = self._executors[attempt.executor_name]
        # A task process exited while the start was being sent, or the worker was frozen and might have lost the lease.
        if executor.free <= 0 or not may_begin:
            self._hand_back(attempt)
            return False
        cancel = attempt.stop
        try:
            if (limit_s := attempt.timeout_s) is not None:
                self._later(attempt, limit_s, lambda: self.stop(attempt, "timed_out"))
            # Before the code begins, because it can end before `begin` returns.
            self._stalls.watch(attempt)
            self._logs.open(attempt)
            emit_started(self._events, attempt)
            executor.begin(attempt)
        except Exception as problem:  # noqa: BLE001 - a thread or process that the system refuses must not stop the others
            attempt.cancel_timers()
            self._hand_back(attempt)
            self._environment.send(
                ExecutorBroken(attempt.executor_name, f"{type(problem).__name__}: {problem}")
            )
            return False
        if cancel is not None:
            attempt.stop = None
            self.stop(attempt, cancel.reason)
        return True

    def count_starts(self, attempts: Iterable[Attempt]) -> None:
        """Count attempts whose code has begun. The database's clock measured both the time at which the task was due, and the start."""
        name = queue = None
        waits: list[float] = []
        for attempt in attempts:
            task, started_at = attempt.task, attempt.started_at
            if task.name != name or task.queue != queue:
                name, queue = task.name, task.queue
                waits = self._rates.waits(queue, name)
            waits.append(0.0 if started_at is None else (started_at - task.enqueued_at).total_seconds())

    def not_started(self, attempt: Attempt, verdict: str) -> None:
        """Stop holding an attempt whose lease was over before any code ran. `verdict` is "released", "expired" or "lost"."""
        self._let_go(attempt, "NOT_STARTED")
        if verdict == "lost":
            self._rates.events.refuse("start")
            self._events.emit(LeasesLost(task_ids=(attempt.id,), reason="revoked before its code started"))
        elif verdict == "expired":
            self._rates.expired(attempt.task.queue, attempt.task.name)
            emit_finished(self._events, attempt, "EXPIRED", 0.0)

    def stop(self, attempt: Attempt, reason: StopReason, *, is_fence: bool = False) -> None:
        """Make the attempt's code stop.

        If the code is already stopping, the first reason is kept. A fence still replaces any other reason, and a timeout or shutdown
        replaces a cancel.
        """
        if attempt.is_suspended_by(reason, self._clock):
            return
        match attempt.move("STOP"):
            case "REMEMBER" if reason == "cancelled":
                attempt.stop = StopRequest(reason)
            case "DEFER":
                self._defer(attempt, partial(self.stop, attempt, reason, is_fence=is_fence))
            case "STOP_CODE" if attempt.stop is None or is_fence:
                attempt.stop = StopRequest(reason, is_fence)
                # A thread cannot be killed. If its code ignores a cancel, its result counts.
                if not (reason == "cancelled" and attempt.executor_name == "thread"):
                    attempt.cancel_timers()
                    self._end_grace_later(attempt)
                self._executors[attempt.executor_name].stop(attempt)
            case "STOP_CODE" if attempt.stopped == "cancelled" and reason in (
                "timed_out",
                "shutting_down",
            ):
                attempt.stop = StopRequest(reason)
                self._end_grace_later(attempt)
            case _:
                pass

    def stop_all(self, reason: StopReason) -> None:
        """Stop all running code."""
        for attempt in self._table.at(*CODE_RUNS):
            self.stop(attempt, reason)

    def fence(self) -> None:
        """Stop all running code before other workers can claim its tasks, because this worker has been cut off for too long."""
        for attempt in self._table.at(*CODE_RUNS):
            self.stop(attempt, "lease_lost", is_fence=True)

    def stalled(self, attempt: Attempt, silent_s: float) -> None:
        """Stop code that has reported nothing for longer than its `stall_timeout`, and let recovery decide the outcome."""
        executor = self._executors[attempt.executor_name]
        stall = Stall(silent_s=silent_s, timeout_s=attempt.stall_timeout_s or 0.0)
        self._events.emit(
            TaskStalled(
                task_id=attempt.id,
                name=attempt.task.name,
                attempt=attempt.number,
                silent_s=silent_s,
                stack=executor.whereabouts(attempt),
                trace_ids=attempt.trace_ids,
            )
        )
        attempt.cancel_timers()
        attempt.stop = StopRequest("stalled")
        self._leave_code_behind(attempt)
        self._recover_from(attempt, "STALL", stall)
        executor.stop(attempt)
        self._note_change(attempt)

    def lose(self, attempts: Iterable[Attempt], reason: str) -> None:
        """Stop the code of attempts whose leases this worker has lost, and write nothing for these attempts.

        Attempts that are being settled are skipped, because the reply to their settlement shows whether the outcome was written.
        """
        lost: list[Attempt] = []
        for attempt in attempts:
            match attempt.move("LOSE"):
                case "DEFER":
                    self._defer(attempt, partial(self.lose, [attempt], reason))
                case ("LET_GO" | "LET_GO_AND_STOP") as effect:
                    lost.append(attempt)
                    attempt.cancel_timers()
                    self._forget(attempt)
                    if effect == "LET_GO_AND_STOP":
                        self._leave_code_behind(attempt)
                        attempt.stop = StopRequest("lease_lost")
                        self._executors[attempt.executor_name].stop(attempt)
                case _:
                    pass
        if lost:
            self._events.emit(LeasesLost(task_ids=tuple(attempt.id for attempt in lost), reason=reason))

    def ended(self, attempt: Attempt, end: AttemptEnd) -> None:
        """Decide what happens to an attempt whose code has finished."""
        attempt.cancel_timers()
        attempt.may_commit = False
        self.leftover.discard(attempt)
        if attempt in self.running_after_commit:
            self.running_after_commit.discard(attempt)
            if isinstance(end, CodeFailed | CodePostponed | CodeCancelled | Died):
                self._events.emit(failed_after_commit(attempt, end))
        if isinstance(end, CodeFailed):
            attempt.exception = end.exception
        if attempt.stage in CODE_RUNS:
            if isinstance(end, Declined):
                self.declines.note(attempt.id, attempt.task.name, unknown=end.unknown, missing=end.missing)
            settlement = settlement_of(attempt, end, random=self._random)
            if settlement is not None:
                self._settle(attempt, settlement)
            elif isinstance(end, Died):
                self._recover_from(attempt, "DIE", end.report)
        self._note_change(attempt)

    def settled(self, verdicts: Iterable[tuple[Attempt, Settlement, str]]) -> None:
        """Stop holding the attempts after the database has reported the results of their settlements."""
        is_heard = self._events.has_listeners(TaskFinished)
        now = self._clock.monotonic()
        completed: list[Attempt] = []
        for attempt, settlement, verdict in verdicts:
            try:
                if self._settled(attempt, settlement, verdict, now=now, is_heard=is_heard) == "completed":
                    completed.append(attempt)
            except Exception:  # noqa: BLE001 - a failure in handling one verdict must not lose the others
                _log.exception("settled_badly task_id=%s verdict=%s", attempt.id, verdict)
        self._count_completed(completed, now)

    def _settled(
        self, attempt: Attempt, settlement: Settlement, verdict: str, *, now: float, is_heard: bool
    ) -> AttemptResult | None:
        """Stop holding the attempt. Return how it is counted, or None if it has lost its lease or its code never began."""
        self._let_go(attempt, "SETTLED")
        if verdict == "lost":
            self._rates.events.refuse("settle")
            self._events.emit(ZombieRefused(task_id=attempt.id, verb="settle", trace_ids=attempt.trace_ids))
            return None
        state = state_after(settlement) if verdict == "already" else verdict
        self.outcomes[state] += 1
        if settlement.outcome == "FAILED":
            emit_failed(self._events, attempt, settlement, state)
        elif settlement.outcome == "POSTPONED":
            emit_postponed(self._events, attempt, settlement, state)
        elif settlement.outcome == "RELEASED":
            return None
        duration_s = now - attempt.launched_at
        result = rate_of(settlement, state)
        if result != "completed":
            self._rates.ended(attempt.task.queue, attempt.task.name, result, duration_s, settlement.error)
        if is_heard:
            emit_finished(self._events, attempt, state, duration_s)
        return result

    def _count_completed(self, attempts: Iterable[Attempt], now: float) -> None:
        name = queue = None
        runs: list[float] = []
        for attempt in attempts:
            task = attempt.task
            if task.name != name or task.queue != queue:
                name, queue = task.name, task.queue
                runs = self._rates.runs(queue, name)
            runs.append(now - attempt.launched_at)

    def committed(self, attempt: Attempt) -> None:
        """Stop holding an attempt that its own code completed. Its timeout still applies to the code."""
        attempt.may_commit = False
        attempt.after_commit = ()
        attempt.cancel_timers()
        self.running_after_commit.add(attempt)
        self.outcomes["COMPLETED"] += 1
        self._leave_code_behind(attempt)
        duration_s = self._clock.monotonic() - attempt.launched_at
        if (limit_s := attempt.timeout_s) is not None:
            self._later(attempt, max(0.0, limit_s - duration_s), lambda: self._stop_after_commit(attempt))
        self._let_go(attempt, "COMMIT_LANDED")
        self._rates.runs(attempt.task.queue, attempt.task.name).append(duration_s)
        emit_finished(self._events, attempt, "COMPLETED", duration_s)

    def commit_failed(self, attempt: Attempt) -> None:
        """Carry out the actions that were deferred during the code's commit, because the commit did not settle the attempt."""
        attempt.may_commit = False
        attempt.move("COMMIT_FAILED")
        deferred, attempt.after_commit = attempt.after_commit, ()
        for act in deferred:
            act()

    def _stop_after_commit(self, attempt: Attempt) -> None:
        attempt.stop = StopRequest("timed_out")
        self._executors[attempt.executor_name].stop(attempt)

    def _end_grace_later(self, attempt: Attempt) -> None:
        self._later(attempt, SETTLE_AFTER_S[attempt.executor_name], lambda: self._grace_over(attempt))

    def _grace_over(self, attempt: Attempt) -> None:
        match attempt.move("GRACE_OVER"):
            case "DEFER":
                self._defer(attempt, partial(self._grace_over, attempt))
            case "SETTLE_WITHOUT_CODE":
                settlement = settlement_of(attempt, None, random=self._random)
                if settlement is not None:
                    self._leave_code_behind(attempt)
                    self._settle(attempt, settlement)
                    self._note_change(attempt)
                elif (
                    attempt.stop is not None
                    and attempt.stopped == "shutting_down"
                    and attempt.executor_name not in ALONE
                ):
                    # The executor kills code that runs in a separate process.
                    attempt.stop.is_overdue = True
                    self._note_change(attempt)
            case _:
                pass

    def _defer(self, attempt: Attempt, act: Callable[[], None]) -> None:
        attempt.after_commit = [*attempt.after_commit, act]

    def _leave_code_behind(self, attempt: Attempt) -> None:
        # Report the attempt before anything is written. If the process breaks, the supervisor must know all attempts that
        # shared it.
        if attempt.executor_name not in ALONE:
            self.leftover.add(attempt)
            self.leftover_added.set()

    def _hand_back(self, attempt: Attempt) -> None:
        self._settle(attempt, Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="RELEASED"))

    def _settle(self, attempt: Attempt, settlement: Settlement) -> None:
        self._unsettled(attempt, "OUTCOME")
        if attempt.trace_ids is not None and settlement.outcome not in ("COMPLETED", "CANCELLED"):
            settlement = replace(settlement, context=next_context(attempt))
        if cancels_its_children(settlement):
            cancelling = self._cancel_and_settle(attempt, settlement)
            self._environment.scope.start(cancelling, name=f"cancel children of {attempt.id}")
        elif attempt.items or attempt.items_refused is not None:
            storing = self._store_items_and_settle(attempt, settlement)
            self._environment.scope.start(storing, name=f"store items of {attempt.id}")
        else:
            self._settler.put(attempt, settlement)

    async def _store_items_and_settle(self, attempt: Attempt, settlement: Settlement) -> None:
        """Store the last items of the attempt, and then settle it. A task that has ended then has all its items.

        If the database has refused an item, the attempt fails instead of completing.
        """
        await self._store_items(attempt)
        if attempt.items_refused is not None and settlement.outcome == "COMPLETED":
            settlement = refused_result(settlement, attempt.items_refused)
        self._settler.put(attempt, settlement)

    async def _store_items(self, attempt: Attempt) -> None:
        while True:
            try:
                return await self._streams.flush(attempt)
            except EverbeatError as problem:
                _log.error("storing_items_failed task_id=%s error=%s", attempt.id, problem)
            await self._clock.sleep(_RETRY_PAUSE_S)

    async def _cancel_and_settle(self, attempt: Attempt, settlement: Settlement) -> None:
        """Cancel what the task has started, and then settle it. Retry after an error, so that no child is left."""
        while True:
            try:
                if await cancel_what_it_started(self._environment.session, settlement):
                    self._advancer.advance_soon()
                break
            except EverbeatError as problem:
                _log.error("cancelling_children_failed task_id=%s error=%s", attempt.id, problem)
            await self._clock.sleep(_RETRY_PAUSE_S)
        await self._store_items(attempt)
        self._settler.put(attempt, settlement)

    def _recover_from(
        self, attempt: Attempt, event: Literal["STALL", "DIE"], loss: ExitReport | Stall
    ) -> None:
        self._unsettled(attempt, event)
        self._environment.scope.start(self._recovered(attempt, loss), name=f"recover {attempt.id}")

    def _unsettled(self, attempt: Attempt, event: StageEvent) -> None:
        attempt.move(event)
        attempt.settling_since = self._clock.monotonic()
        self.unsettled[attempt.executor_name] += 1

    def _left(self, attempt: Attempt) -> None:
        if attempt.move("HOOK_LEFT") != "IGNORE":
            self.unsettled[attempt.executor_name] -= 1
            self._note_change(attempt)

    def _let_go(self, attempt: Attempt, event: StageEvent) -> None:
        if attempt.stage in UNSETTLED:
            self.unsettled[attempt.executor_name] -= 1
        if attempt.move(event) == "LET_GO":
            self._forget(attempt)

    def _forget(self, attempt: Attempt) -> None:
        self._table.remove(attempt)
        self._progress.forget(attempt)
        self._streams.forget(attempt)
        if attempt.task.whole_id is not None:
            self._advancer.advance_soon()
        self._note_change(attempt)

    def _later(self, attempt: Attempt, seconds: float, act: Callable[[], None]) -> None:
        attempt.timers = [*attempt.timers, asyncio.get_running_loop().call_later(seconds, act)]

    async def _recovered(self, attempt: Attempt, loss: ExitReport | Stall) -> None:
        """Let recovery settle the attempt. Retry after an error, and while a recovery hook leaves the attempt unchanged."""
        died_at = attempt.settling_since
        while True:
            try:
                await self._progress.write(attempt)  # write the last reported progress first
                await self._streams.flush(attempt)
                if await self._recover(attempt.lease, loss, died_at):
                    break
                self._left(attempt)
                pause_s = self._environment.plan.recovery.check_interval_ms / 1_000
            except EverbeatError as problem:
                _log.error("recovery_failed task_id=%s error=%s", attempt.id, problem)
                pause_s = _RETRY_PAUSE_S
            await self._clock.sleep(pause_s)
        self._let_go(attempt, "RECOVERED")

    def _note_change(self, attempt: Attempt) -> None:
        if not self._changed_executors:
            asyncio.get_running_loop().call_soon(self._send_changes)
        self._changed_executors.add(attempt.executor_name)

    def _send_changes(self) -> None:
        changed, self._changed_executors = self._changed_executors, set()
        self._environment.send(ExecutorsChanged(changed))
