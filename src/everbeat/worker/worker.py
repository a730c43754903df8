"""The worker: puts its parts together, obeys its supervisor and leaves. It uses no pipes, and does not know how its supervisor beats."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from random import Random

from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, WorkerStarted
from everbeat.runtime.nursery import Nursery, end_process
from everbeat.runtime.service import ServiceRunner
from everbeat.store.session import Session
from everbeat.wake import Wake
from everbeat.worker.advancer import Advancer
from everbeat.worker.attempt import ALONE, Attempt, LaneName
from everbeat.worker.changes import Changes
from everbeat.worker.claim_rules import ClaimRules
from everbeat.worker.claimer import Claimer
from everbeat.worker.clerk import Clerk
from everbeat.worker.conductor import Conductor, RecoverCrashed, RecoverStalled
from everbeat.worker.departure import Departure
from everbeat.worker.ears import Ears
from everbeat.worker.equipment import make_executors, make_lanes, make_loop_watch
from everbeat.worker.farewell import EXIT_UNSETTLED
from everbeat.worker.lease_watch import LeaseWatch
from everbeat.worker.leases import LeaseTable
from everbeat.worker.link import Link
from everbeat.worker.messenger import MakeMessenger, NoMessenger, Part, Surroundings
from everbeat.worker.plan import WorkerPlan
from everbeat.worker.progress import ProgressRecorder
from everbeat.worker.protocol import (
    Adopt,
    AskBeat,
    Beaten,
    Cancel,
    Drain,
    FromSupervisor,
    Leaving,
    Lost,
    Phantoms,
    Quiet,
    Ready,
    Retiring,
    Stop,
    Welcome,
)
from everbeat.worker.reach import Reach
from everbeat.worker.recycling import Limits, Recycling
from everbeat.worker.reporter import Reporter
from everbeat.worker.settler import Settler
from everbeat.worker.vitality import FenceWatch, Silence, Vitality

_log = logging.getLogger("everbeat.worker")


class Worker:
    """Made and run in a running event loop; `obey` is called in that loop's thread.

    `make_wake(application_name)` gives the hints, on a connection of that name. `recover_crashed` settles an attempt whose
    task process died, `recover_stalled` one whose code fell silent. `on_fatal` ends the process when a part of the worker has crashed.
    """

    _is_closed = False
    code_left: frozenset[Attempt] = frozenset()
    """What it has left while their code goes on."""

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        welcome: Welcome,
        link: Link,
        make_wake: Callable[[str], Wake],
        recover_crashed: RecoverCrashed,
        recover_stalled: RecoverStalled,
        events: EventBus,
        clock: Clock,
        random: Random,
        on_fatal: Callable[[str, BaseException], None] = end_process,
        make_messenger: MakeMessenger = NoMessenger,
    ) -> None:
        self._plan = plan
        self._welcome = welcome
        self._link = link
        self._events = events
        self._clock = clock
        self._random = random
        self._nursery = Nursery(name="worker", on_fatal=on_fatal, on_loop_ending=plan.on_loop_ending)
        self._table = LeaseTable()
        self._taking = Session(plan.target, self._session_name, random=random, keyed=True)
        self._giving = Session(plan.target, self._session_name, random=random, keyed=True)
        self._conductor = Conductor(
            table=self._table, events=events, clock=clock, random=random, nursery=self._nursery, recover_crashed=recover_crashed,
            recover_stalled=recover_stalled, on_change=Changes(self._on_changes).note, on_broken=self._on_broken,
        )  # fmt: skip
        self._progress = ProgressRecorder(self._giving, clock=clock, on_lost=self._on_lost)
        self._executors = make_executors(
            plan, worker_id=lambda: self.id, on_ended=self._conductor.ended, on_free=self._on_free,
            on_broken=self._on_broken, on_progress=self._progress.note, on_recycled=events.emit)  # fmt: skip
        self._conductor.executors = self._executors
        self._lanes = make_lanes(plan, self._executors, unsettled=self._conductor.unsettled.__getitem__)
        self._settler = Settler(self._giving, progress=self._progress, on_settled=self._conductor.settled, nursery=self._nursery)  # fmt: skip
        self._conductor.progress, self._conductor.settler = self._progress, self._settler
        self._conductor.clerk = Clerk(self._giving, progress=self._progress, commits=self._conductor, nursery=self._nursery,
            clock=clock, is_leaving=lambda: self._departure.is_urgent)  # fmt: skip
        self._leases = LeaseWatch(
            self._giving, table=self._table, on_cancel=lambda attempt: self._conductor.stop(attempt, "cancelled"),
            on_lost=self._on_lost, claims=lambda: self._claimer.claims, clock=clock)  # fmt: skip
        self._vitality = self._make_vitality()
        self._claimer = self._make_claimer()
        self._claimer.is_quiet = welcome.quiet
        self._messenger = make_messenger(Surroundings(
            plan=plan, session=self._giving, session_name=lambda: self._welcome.session_name, table=self._table,
            lanes=tuple(self._lanes.values()), worker_id=lambda: self.id, look=self._claimer.look, events=events, clock=clock,
            is_quiet=lambda: self._claimer.is_quiet, random=random, nursery=self._nursery))  # fmt: skip
        self._advancer = Advancer(self._giving, on_enqueued=self._claimer.look, clock=clock)
        self._conductor.advance = self._advancer.look
        self._ears = Ears(make_wake, claimer=self._claimer, leases=self._leases, advancer=self._advancer, messenger=self._messenger,
            ask_beat=lambda: self._link.tell(AskBeat()), nursery=self._nursery)  # fmt: skip
        self._departure = self._make_departure()
        self._recycling = Recycling(Limits.of(plan.config), events=events, on_due=self._retire)
        self._reach = Reach(
            plan.target, lambda: self._session_name, table=self._table, recovery=plan.recovery, clock=clock,
            answers=lambda: self._taking.answers + self._giving.answers)  # fmt: skip
        self._loop_watch = make_loop_watch(plan, self._executors, events=events)
        self._reporter = self._make_reporter()

    @property
    def id(self) -> str:
        """The worker's id, which changes only by an adoption."""
        return self._welcome.worker_id

    async def run(self) -> int:
        """Work until told to leave; answers the exit code. Cancelling it ends the worker at once, its work unsettled."""
        try:
            self._start()
            code = await self._departure.carried_out()
            if code != EXIT_UNSETTLED:
                self._reporter.tell_held()
                self.code_left = frozenset(self._conductor.unstoppable)
                self._link.tell(Leaving(code_runs=bool(self.code_left)))
            return code
        finally:
            await self._close()

    def obey(self, message: FromSupervisor) -> None:
        """Do what the supervisor says; a worker that has left has nothing more to do."""
        if self._is_closed:
            return
        match message:
            case Beaten(_, sent_at):
                self._beaten(sent_at)
            case Lost(leases):
                self._conductor.lose(self._table.of(leases), "a beat was told so")
            case Cancel(leases):
                for attempt in self._table.of(leases):
                    self._conductor.stop(attempt, "cancelled")
            case Phantoms(leases):
                self._nursery.start(self._claimer.confirm_phantoms(leases), name="phantoms")
            case Adopt(welcome):
                self._adopt(welcome)
            case Quiet(on):
                self._claimer.quieten(on)
                self._messenger.room_changed()
            case Drain(grace_ms):
                self._departure.drain(grace_s=grace_ms / 1_000)
            case Stop():
                self._departure.stop()
            case Welcome():
                pass  # the first word, taken before this worker was made

    def _beaten(self, sent_at: float) -> None:
        was_silent = not self._vitality.may_claim
        self._vitality.beaten(sent_at)
        self._messenger.beaten()
        if was_silent:
            self._claimer.look()

    def _start(self) -> None:
        services: tuple[Part, ...] = (
            self._claimer,
            self._settler,
            self._advancer,
            self._progress,
            self._leases,
            self._conductor.stall_watch,
            self._vitality,
            FenceWatch(self._vitality),
            self._recycling,
            self._reach,
            self._reporter,
            *self._messenger.parts,
        )
        for service in services:
            runner = ServiceRunner(
                service, clock=self._clock, random=self._random, emit=self._events.emit, wake=service.wake
            )
            self._nursery.start(runner.run(), name=service.name, critical=True)
        self._ears.listen(self._welcome.session_name)
        self._messenger.start()
        self._loop_watch.start()
        self._link.tell(Ready())
        self._events.emit(WorkerStarted(worker_id=self.id, pid=os.getpid()))

    def _launch(self, lane: LaneName, attempts: Iterable[Attempt]) -> None:
        may_begin = self._vitality.may_start and not self._claimer.is_closed
        begun = [self._conductor.launch(attempt, may_begin=may_begin) for attempt in attempts].count(True)
        if begun and lane not in ALONE:  # those have processes of their own, with the same limits
            self._lanes[lane].failures = 0
            self._recycling.begun(begun)

    def _retire(self, reason: str, tasks: int, rss_bytes: int) -> None:
        self._link.tell(Retiring(reason, tasks, rss_bytes))
        self._departure.retire()

    def _on_lost(self, attempt: Attempt) -> None:
        self._conductor.lose([attempt], "the database says so")

    def _on_changes(self, lanes: Iterable[LaneName]) -> None:
        for lane in lanes:
            self._departure.changed(lane)
        self._slot_freed()

    def _on_free(self, lane: LaneName) -> None:
        if self._executors[lane].free:
            self._lanes[lane].failures = 0
        self._slot_freed()

    def _on_claimed(self) -> None:
        self._leases.claimed()
        self._messenger.room_changed()

    def _slot_freed(self) -> None:
        self._claimer.slot_freed()
        self._messenger.room_changed()

    def _on_broken(self, lane: LaneName, reason: str) -> None:
        # The next try mostly succeeds, for example after one process was killed while it started.
        level = logging.ERROR if self._lanes[lane].failures else logging.WARNING
        _log.log(level, "cannot_run_tasks lane=%s worker_id=%s reason=%s", lane, self.id, reason)
        self._lanes[lane].is_broken = True
        self._claimer.slot_freed()

    def _adopt(self, welcome: Welcome) -> None:
        held = self._table.clear()
        self._welcome = welcome
        self._conductor.lose(held, "this worker was declared dead, and goes on under another name")
        self._vitality.beaten(self._clock.monotonic())
        if self._taking.application_name != self._session_name:
            self._taking.rename(self._session_name)
            self._giving.rename(self._session_name)
            self._ears.listen(self._welcome.session_name)
        self._claimer.look()

    def _make_vitality(self) -> Vitality:
        return Vitality(
            self._taking,  # idle while the supervisor is silent: nothing is claimed then
            silence=Silence.allowed_by(self._plan.recovery),
            worker_id=lambda: self.id,
            clock=self._clock,
            on_fence=self._conductor.fence,
            on_ended=lambda: self._conductor.lose(self._table, "this worker was declared dead"),
        )

    def _make_reporter(self) -> Reporter:
        return Reporter(
            self._link, table=self._table, executors=self._executors, clock=self._clock, loop_lag_s=self._loop_watch.lag_s,
            cut_off_s=self._reach.cut_off_s, astray=self._conductor.astray, wake=self._conductor.went_astray,
            messages=self._messenger.state,
        )  # fmt: skip

    def _make_departure(self) -> Departure:
        return Departure(
            table=self._table, conductor=self._conductor, executors=self._executors, clock=self._clock,
            own_grace_s=self._plan.config.grace_s, give_back=self._give_back_what_waits, emit=self._events.emit,
        )  # fmt: skip

    def _give_back_what_waits(self) -> asyncio.Task[None]:
        self._nursery.start(self._messenger.leave(), name="leave messages to others")
        return self._nursery.start(self._claimer.close(), name="give back what waits")

    def _make_claimer(self) -> Claimer:
        plan = self._plan
        return Claimer(
            self._taking, lanes=tuple(self._lanes.values()), table=self._table, definitions=plan.definitions, policies=plan.policies(),
            queues=None if plan.config.queues is None else tuple(plan.config.queues), queue_priorities=plan.queue_priorities,
            poll_interval_s=plan.config.poll_interval_s, clock=self._clock, nursery=self._nursery,
            rules=ClaimRules(
                worker_id=lambda: self.id, may_claim=lambda: self._vitality.may_claim, may_start=lambda: self._vitality.may_start,
                is_deaf=lambda: self._leases.is_deaf,
                is_told=lambda: self._messenger.tells,
                on_progress=self._progress.note,
                launch=self._launch,
                not_started=self._conductor.not_started,
                on_claimed=self._on_claimed,
                on_happened=lambda happened: self._advancer.asked(happened),  # noqa: PLW0108 - made after it
            ),
        )  # fmt: skip

    @property
    def _session_name(self) -> str:
        return f"{self._welcome.session_name} worker"

    async def _close(self) -> None:
        self._is_closed = True
        self._conductor.declines.close()
        self._loop_watch.stop()
        await asyncio.gather(*(executor.close() for executor in self._executors.values()))
        await self._messenger.close()
        await self._nursery.close()
        await self._taking.drop()
        await self._giving.drop()
