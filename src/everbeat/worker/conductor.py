"""The life of an attempt in this worker: launched, perhaps stopped, ended, settled. One place for every turn of it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from random import Random
from typing import Final
from uuid import UUID

from everbeat.domain.context import StopReason
from everbeat.domain.stall import Stall
from everbeat.errors import EverbeatError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, LeasesLost, ZombieRefused
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.nursery import Nursery
from everbeat.store.leases import Settlement
from everbeat.worker.attempt import ALONE, Attempt, Clerk, Declined, Died, Ended, Failed, LaneName, Stage
from everbeat.worker.attempt_events import tell_failed, tell_finished, tell_started
from everbeat.worker.declined import Declines
from everbeat.worker.executor import Executor
from everbeat.worker.leases import LeaseTable
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.settlement import failed_after_commit, settlement_of, state_after
from everbeat.worker.settler import Settler
from everbeat.worker.stall_watch import StallWatch, TaskStalled

OnLeft = Callable[[], None]
RecoverCrashed = Callable[[UUID, UUID, ExitReport, OnLeft], Awaitable[object]]
RecoverStalled = Callable[[UUID, UUID, Stall, OnLeft], Awaitable[object]]

SETTLE_AFTER_S: Final[Mapping[LaneName, float]] = {"async": 0.5, "thread": 0.5, "process": 0.9, "solo": 0.9}
"""How long code that was stopped may take to end before its attempt is settled without it."""
_RECOVERY_PAUSE_S: Final = 1.0

_log = logging.getLogger("everbeat.worker")


class Conductor:
    """Leads attempts from launch to settle. `on_change` is called whenever a lease is over or its code has ended.

    `on_broken(lane, reason)`: code of this lane cannot be begun for now. `went_astray` is set when an attempt is over
    while its code goes on in this very process.
    """

    def __init__(
        self,
        *,
        table: LeaseTable,
        events: EventBus,
        clock: Clock,
        random: Random,
        nursery: Nursery,
        recover_crashed: RecoverCrashed,
        recover_stalled: RecoverStalled,
        on_change: Callable[[Attempt], None],
        on_broken: Callable[[LaneName, str], None],
    ) -> None:
        self.executors: dict[LaneName, Executor] = {}
        self.settler: Settler
        self.clerk: Clerk
        self.advance: Callable[[], None]
        """Something may have happened to workflows."""
        self.trailing: set[Attempt] = set()
        """Attempts that a commit of their own has completed, and whose code has not ended yet."""
        self.astray: set[Attempt] = set()
        """Attempts that are over, or as good as, while their code goes on in this very process: it may still break it."""
        self.unstoppable: set[Attempt] = set()
        """Attempts whose code was stopped because the worker leaves, and did not end: settled once their process has."""
        self.went_astray = asyncio.Event()
        self.outcomes: Counter[str] = Counter()
        self.progress: ProgressRecorder
        self.unsettled: Counter[LaneName] = Counter()
        self._table = table
        self._events = events
        self._clock = clock
        self._random = random
        self._nursery = nursery
        self._recover_crashed = recover_crashed
        self._recover_stalled = recover_stalled
        self.declines = Declines(events)
        self.stall_watch = StallWatch(clock=clock, on_stalled=self.stalled)
        self._on_change = on_change
        self._on_broken = on_broken

    def launch(self, attempt: Attempt, *, may_begin: bool = True) -> bool:
        """The start was acknowledged: its code runs from now on. Answers whether it does."""
        attempt.stage = Stage.RUNNING
        attempt.clerk = self.clerk
        attempt.launched_at = self._clock.monotonic()
        executor = self.executors[attempt.lane]
        # A task process ended while the start was under way, or the worker stood still and may have lost it.
        if executor.free <= 0 or not may_begin:
            self._settle(attempt, Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="RELEASED"))
            return False
        try:
            if (limit_s := attempt.timeout_s) is not None:
                self._later(attempt, limit_s, lambda: self.stop(attempt, "timed_out"))
            executor.begin(attempt)
        except Exception as problem:  # noqa: BLE001 - a thread or process that the system refuses must not stop the others
            attempt.cancel_timers()
            self._settle(attempt, Settlement(id=attempt.id, claim_id=attempt.claim_id, outcome="RELEASED"))
            self._on_broken(attempt.lane, f"{type(problem).__name__}: {problem}")
            return False
        self.stall_watch.watch(attempt)
        tell_started(self._events, attempt)
        if attempt.cancel_asked:
            self.stop(attempt, "cancelled")
        return True

    def not_started(self, attempt: Attempt, verdict: str) -> None:
        """The lease is over before any code ran: "released", "expired" or "lost"."""
        self._let_go(attempt)
        if verdict == "lost":
            self._events.emit(LeasesLost(task_ids=(attempt.id,), reason="taken away before its code started"))
        elif verdict == "expired":
            tell_finished(self._events, attempt, "EXPIRED", 0.0)

    def stop(self, attempt: Attempt, reason: StopReason) -> None:
        """Make running code end; the first reason stands, but a lost lease outranks every other."""
        if reason == "cancelled":
            attempt.cancel_asked = True  # remembered for the launch, while the start is under way
        if attempt.stage is not Stage.RUNNING or (attempt.rests and reason == "shutting_down"):
            return
        if attempt.is_committing:
            attempt.after_commit = [*attempt.after_commit, partial(self.stop, attempt, reason)]
            return
        if attempt.stopped is None:
            attempt.stopped = reason
            # A thread cannot be ended: a cancel is a wish, and a result that comes all the same is not hidden.
            if not (reason == "cancelled" and attempt.lane == "thread"):
                attempt.cancel_timers()
                self._later(attempt, SETTLE_AFTER_S[attempt.lane], lambda: self._settle_without_code(attempt))
            self.executors[attempt.lane].stop(attempt)
        elif attempt.stopped == "cancelled" and reason in ("timed_out", "shutting_down"):
            attempt.stopped = reason
            self._later(attempt, SETTLE_AFTER_S[attempt.lane], lambda: self._settle_without_code(attempt))

    def stop_all(self, reason: StopReason) -> None:
        """Stop whatever runs."""
        for attempt in self._table.at(Stage.RUNNING):
            self.stop(attempt, reason)

    def fence(self) -> None:
        """The worker was cut off for too long: end the code before anybody may take its work over."""
        for attempt in self._table.at(Stage.RUNNING):
            attempt.self_fenced = True
            attempt.stopped = None
            self.stop(attempt, "lease_lost")

    def stalled(self, attempt: Attempt, silent_s: float) -> None:
        """Running code said nothing for its stall_timeout: it is stopped, and whatever it still does changes nothing."""
        executor = self.executors[attempt.lane]
        stall = Stall(silent_s=silent_s, timeout_s=attempt.stall_timeout_s or 0.0)
        self._events.emit(
            TaskStalled(
                task_id=attempt.id,
                name=attempt.task.name,
                attempt=attempt.number,
                silent_s=silent_s,
                stack=executor.whereabouts(attempt),
            )
        )
        attempt.cancel_timers()
        attempt.stopped = "stalled"
        self._goes_astray(attempt)
        self._is_settling(attempt)
        executor.stop(attempt)
        self._nursery.start(
            self._recovered(attempt, partial(self._recover_stalled, attempt.id, attempt.claim_id, stall)),
            name=f"recover {attempt.id}",
        )
        self._on_change(attempt)

    def lose(self, attempts: Iterable[Attempt], reason: str) -> None:
        """Leases that are somebody else's now: their code is stopped, and nothing is written."""
        # What is being settled is not lost by hearsay: the settle itself is told whether it landed.
        held = [
            attempt for attempt in attempts if attempt.stage in (Stage.CLAIMED, Stage.STARTING, Stage.RUNNING)
        ]
        for attempt in held:
            if attempt.is_committing:
                attempt.after_commit = [*attempt.after_commit, partial(self.lose, [attempt], reason)]
        lost = [attempt for attempt in held if not attempt.is_committing]
        for attempt in lost:
            was_running = attempt.stage is Stage.RUNNING
            attempt.cancel_timers()
            self._let_go(attempt)
            if was_running:
                self._goes_astray(attempt)
                attempt.stopped = "lease_lost"
                self.executors[attempt.lane].stop(attempt)
        if lost:
            self._events.emit(LeasesLost(task_ids=tuple(attempt.id for attempt in lost), reason=reason))

    def ended(self, attempt: Attempt, ended: Ended) -> None:
        """An executor says that the code of an attempt has ended."""
        attempt.cancel_timers()
        attempt.is_committing = False
        self.astray.discard(attempt)
        self.unstoppable.discard(attempt)
        if attempt in self.trailing:
            self.trailing.discard(attempt)
            if isinstance(ended, Failed | Died):
                self._events.emit(failed_after_commit(attempt, ended))
        if isinstance(ended, Failed):
            attempt.exception = ended.exception
        if attempt.stage is Stage.RUNNING:
            if isinstance(ended, Declined):
                self.declines.note(
                    attempt.id, attempt.task.name, unknown=ended.unknown, missing=ended.missing
                )
            settlement = settlement_of(attempt, ended, random=self._random)
            if settlement is not None:
                self._settle(attempt, settlement)
            elif isinstance(ended, Died):
                self._is_settling(attempt)
                recover = partial(self._recover_crashed, attempt.id, attempt.claim_id, ended.report)
                self._nursery.start(self._recovered(attempt, recover), name=f"recover {attempt.id}")
        self._on_change(attempt)

    def settled(self, attempt: Attempt, settlement: Settlement, verdict: str) -> None:
        """The database has answered what became of an outcome."""
        self._let_go(attempt)
        if verdict == "lost":
            self._events.emit(ZombieRefused(task_id=attempt.id, verb="settle"))
            return
        state = state_after(settlement) if verdict == "already" else verdict
        self.outcomes[state] += 1
        tell_failed(self._events, attempt, settlement, state)
        duration_s = self._clock.monotonic() - attempt.launched_at
        tell_finished(self._events, attempt, state, duration_s)

    def committed(self, attempt: Attempt) -> None:
        """Its own code has settled it, COMPLETED. What the code does from here on is not the task's, but for its timeout."""
        attempt.is_committing, attempt.is_committed = False, True
        attempt.after_commit = ()
        attempt.cancel_timers()
        self.trailing.add(attempt)
        self.outcomes["COMPLETED"] += 1
        self._goes_astray(attempt)
        duration_s = self._clock.monotonic() - attempt.launched_at
        if (limit_s := attempt.timeout_s) is not None:
            self._later(attempt, max(0.0, limit_s - duration_s), lambda: self._end_trailing(attempt))
        self._let_go(attempt)
        tell_finished(self._events, attempt, "COMPLETED", duration_s)

    def commit_ended(self, attempt: Attempt) -> None:
        """Its own code has not settled it after all: what was asked of it meanwhile is done now."""
        attempt.is_committing = False
        waiting, attempt.after_commit = attempt.after_commit, ()
        for act in waiting:
            act()

    def _end_trailing(self, attempt: Attempt) -> None:
        attempt.stopped = "timed_out"
        self.executors[attempt.lane].stop(attempt)

    def _settle_without_code(self, attempt: Attempt) -> None:
        if attempt.is_committing:
            attempt.after_commit = [*attempt.after_commit, partial(self._settle_without_code, attempt)]
        elif attempt.stage is Stage.RUNNING:
            settlement = settlement_of(attempt, None, random=self._random)
            if settlement is not None:
                self._goes_astray(attempt)
                self._settle(attempt, settlement)
                self._on_change(attempt)
            elif attempt.stopped == "shutting_down" and attempt.lane not in ALONE:
                # Code in a process of its own is killed instead.
                self.unstoppable.add(attempt)
                self._on_change(attempt)

    def _goes_astray(self, attempt: Attempt) -> None:
        # Told before anything is written: a process that it breaks was not shared by fewer than its supervisor knows.
        if attempt.lane not in ALONE:
            self.astray.add(attempt)
            self.went_astray.set()

    def _settle(self, attempt: Attempt, settlement: Settlement) -> None:
        self._is_settling(attempt)
        self.settler.put(attempt, settlement)

    def _is_settling(self, attempt: Attempt) -> None:
        attempt.stage, attempt.settling_since = Stage.SETTLING, self._clock.monotonic()
        self.unsettled[attempt.lane] += 1

    def _left(self, attempt: Attempt) -> None:
        if attempt.stage is Stage.SETTLING:
            attempt.stage = Stage.LEFT
            self.unsettled[attempt.lane] -= 1
            self._on_change(attempt)

    def _let_go(self, attempt: Attempt) -> None:
        if attempt.stage is Stage.SETTLING:
            self.unsettled[attempt.lane] -= 1
        self._table.remove(attempt)
        self.unstoppable.discard(attempt)
        self.progress.forget(attempt)
        if attempt.task.workflow_id is not None:
            self.advance()
        self._on_change(attempt)

    def _later(self, attempt: Attempt, seconds: float, act: Callable[[], None]) -> None:
        attempt.timers = [*attempt.timers, asyncio.get_running_loop().call_later(seconds, act)]

    async def _recovered(self, attempt: Attempt, recover: Callable[[OnLeft], Awaitable[object]]) -> None:
        """Its process died or its code stalled: recovery decides, as for any death, and is asked until it has answered."""
        while True:
            try:
                await self.progress.write(attempt)  # its last words
                await recover(partial(self._left, attempt))
                break
            except EverbeatError as problem:
                _log.error("recovery_failed task_id=%s error=%s", attempt.id, problem)
                await self._clock.sleep(_RECOVERY_PAUSE_S)
        self._let_go(attempt)
