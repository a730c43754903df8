"""The worker, which creates its parts, handles its supervisor's messages, and dispatches messages between its parts.

It does not depend on how its supervisor is connected or how the supervisor sends heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Final, TypeAlias

from everbeat.domain.series import RateCounter
from everbeat.hints import HintSource
from everbeat.hints.relayed import RelayedHintSource
from everbeat.protocol import (
    Adopt,
    Beaten,
    CancelAttempts,
    Drain,
    DropLeases,
    FromSupervisor,
    Hints,
    HintsArrive,
    Leaving,
    Phantoms,
    Quiet,
    Ready,
    Retiring,
    Stop,
    Welcome,
)
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, WorkerStarted
from everbeat.runtime.main_loop import EXIT_UNSETTLED, LoopWatch, name_of
from everbeat.runtime.task_scope import ServiceRunner, TaskScope, end_process
from everbeat.store.metered_session import MeteredSession
from everbeat.store.session import Session
from everbeat.worker.attempt import Attempt, ExecutorName
from everbeat.worker.claim.claimer import Claimer
from everbeat.worker.claim.slots import Slots
from everbeat.worker.context_requests import ContextRequests
from everbeat.worker.environment import (
    MODES,
    Messenger,
    MessengerService,
    SupervisorLink,
    WorkerEnvironment,
    WorkerIdentity,
    WorkerPlan,
)
from everbeat.worker.executors.executor import Executor
from everbeat.worker.executors.in_process import AsyncExecutor, ThreadExecutor
from everbeat.worker.executors.process_executor import ProcessExecutor
from everbeat.worker.hint_listener import HintListener
from everbeat.worker.leases import LeaseTable, LeaseWatch
from everbeat.worker.lifecycle import AttemptLifecycle, RecoverAttempt
from everbeat.worker.liveness import DatabaseProbe, FenceWatch, Liveness, Reporter, SilenceLimits
from everbeat.worker.log_recorder import LogRecorder
from everbeat.worker.messages import (
    AttemptEnded,
    AttemptLost,
    AttemptStalled,
    CancelRequested,
    DeclaredDead,
    DrainStarted,
    ExecutorBroken,
    ExecutorsChanged,
    FenceDue,
    LimitReached,
    Settled,
    SlotFreed,
    TasksEnqueued,
    WorkerMessage,
)
from everbeat.worker.progress import ProgressRecorder, StallWatch
from everbeat.worker.settlement import Settler
from everbeat.worker.shutdown import Recycling, Shutdown
from everbeat.worker.streams import StreamRecorder
from everbeat.worker.workflow_advancer import Advancer

LOOP_BLOCKED_AFTER_S: Final = 1.0


_log = logging.getLogger("everbeat.worker")


MakeMessenger: TypeAlias = Callable[[WorkerEnvironment, LeaseTable, Slots], Messenger]


def no_messages(environment: WorkerEnvironment, table: LeaseTable, slots: Slots) -> Messenger:
    """Return the messenger for a worker that gets hints only from the database."""
    del environment, table, slots
    return Messenger()


class Worker:
    """A worker, which claims, runs and settles tasks. Create and run it in an event loop, and call `obey` in that loop's thread.

    `make_hint_source` receives an `application_name` and returns a source of hints. It is not called if the supervisor passes hints on.
    `recover` settles an attempt whose task process exited or whose code stalled, and counts it in `rates`. `on_fatal` ends the process
    after a part of the worker has crashed.
    """

    _is_closed = False
    code_left: frozenset[Attempt] = frozenset()
    """The attempts whose code was still running when the worker shut down."""

    def __init__(
        self,
        plan: WorkerPlan,
        *,
        welcome: Welcome,
        link: SupervisorLink,
        make_hint_source: Callable[[str], HintSource],
        recover: RecoverAttempt,
        events: EventBus,
        clock: Clock,
        random: Random,
        on_fatal: Callable[[str, BaseException], None] = end_process,
        make_messenger: MakeMessenger = no_messages,
        rates: RateCounter | None = None,
    ) -> None:
        identity = WorkerIdentity(welcome)
        new_session = Session if plan.meters is None else partial(MeteredSession, meters=plan.meters)
        self._environment = environment = WorkerEnvironment(
            plan=plan,
            identity=identity,
            link=link,
            clock=clock,
            random=random,
            events=events,
            scope=TaskScope(name="worker", on_fatal=on_fatal, on_loop_ending=plan.on_loop_ending),
            claim_session=new_session(plan.target, identity.session_name, random=random, keyed=True),
            session=new_session(plan.target, identity.session_name, random=random, keyed=True),
            send=self._dispatch,
            rates=RateCounter() if rates is None else rates,
        )
        # The order matters: each part receives only parts that were created above it.
        self._table = LeaseTable()
        self._liveness = Liveness(environment)
        self._leases = LeaseWatch(environment, table=self._table)
        self._advancer = Advancer(environment)
        self._progress = ProgressRecorder(environment)
        self._streams = StreamRecorder(environment)
        self._logs = LogRecorder(environment)
        self._stalls = StallWatch(environment)
        self._settler = Settler(environment, progress=self._progress)
        self._probe = DatabaseProbe(environment, table=self._table)
        self._recycling = Recycling(environment)
        self._executors = make_executors(environment)
        self._loop_watch = make_loop_watch(environment, self._executors)
        self._lifecycle = AttemptLifecycle(
            environment,
            table=self._table,
            executors=self._executors,
            settler=self._settler,
            progress=self._progress,
            streams=self._streams,
            logs=self._logs,
            stalls=self._stalls,
            advancer=self._advancer,
            recover=recover,
        )
        self._shutdown = Shutdown(
            environment, table=self._table, lifecycle=self._lifecycle, executors=self._executors
        )
        self._slots = self._make_slots(is_quiet=welcome.quiet)
        self._messenger = make_messenger(environment, self._table, self._slots)
        self._claimer = self._make_claimer()
        silent_s = SilenceLimits.allowed_by(plan.recovery).supervisor_silent_s
        self._relayed_hints = RelayedHintSource(plan.target.channel, silent_s=silent_s)
        self._listener = self._make_listener(
            (lambda _: self._relayed_hints) if welcome.relays_hints else make_hint_source
        )
        self._reporter = self._make_reporter()

    @property
    def id(self) -> str:
        """Return the worker's id. It changes only when the worker continues under a new id after it was declared dead."""
        return self._environment.identity.worker_id

    async def run(self) -> int:
        """Run until the worker is asked to shut down, and return the exit code.

        Cancelling this coroutine stops the worker at once and leaves its attempts unsettled.
        """
        try:
            self._start()
            code = await self._shutdown.carried_out()
            self._reporter.report_state()  # the counts since the last report
            if code != EXIT_UNSETTLED:
                self._reporter.report_held()
                self.code_left = frozenset(self._lifecycle.unstoppable)
                self._environment.link.tell(Leaving(code_runs=bool(self.code_left)))
            return code
        finally:
            await self._close()

    def grace_left_s(self, *, at_most: float) -> float:
        """Return how many seconds of the grace period are left, but at least a second and at most this many."""
        return self._shutdown.left_s(at_most=at_most)

    def obey(self, message: FromSupervisor) -> None:  # noqa: C901 - one case for each message
        """Handle a message from the supervisor. A worker that has shut down ignores it."""
        if self._is_closed:
            return
        match message:
            case Beaten(_, sent_at):
                self._beaten(sent_at)
            case DropLeases(leases):
                self._lifecycle.lose(self._table.of(leases), "the reply to a heartbeat says so")
            case CancelAttempts(leases):
                for attempt in self._table.of(leases):
                    self._lifecycle.stop(attempt, "cancelled")
            case Phantoms(leases):
                self._environment.scope.start(self._claimer.confirm_phantoms(leases), name="phantoms")
            case Adopt(welcome):
                self._adopt(welcome)
            case Quiet(on):
                self._claimer.quieten(on)
                self._messenger.room_changed()
            case Hints(payloads):
                self._relayed_hints.deliver(payloads)
            case HintsArrive(arrive):
                self._relayed_hints.told(arrive=arrive)
            case Drain(grace_ms):
                self._shutdown.drain(grace_s=grace_ms / 1_000)
            case Stop():
                self._shutdown.stop()
            case Welcome():
                pass  # always the first message, which was handled before this worker was created

    def _dispatch(self, message: WorkerMessage) -> None:  # noqa: C901 - one case for each message
        match message:
            case AttemptEnded(attempt, end):
                self._slots.pools[attempt.executor_name].ended(attempt, end)
                self._lifecycle.ended(attempt, end)
            case Settled(verdicts):
                self._lifecycle.settled(verdicts)
            case SlotFreed(executor_name):
                self._slots.freed(executor_name)
                self._slot_freed()
            case ExecutorsChanged(executor_names):
                for executor_name in executor_names:
                    self._shutdown.changed(executor_name)
                self._slot_freed()
            case AttemptLost(attempt, in_write):
                if in_write:
                    self._environment.rates.events.refuse("store")
                self._lifecycle.lose([attempt], "the database says so")
            case CancelRequested(attempt):
                self._lifecycle.stop(attempt, "cancelled")
            case AttemptStalled(attempt, silent_s):
                self._lifecycle.stalled(attempt, silent_s)
            case TasksEnqueued(queue):
                self._claimer.claim_soon(queue)
            case ExecutorBroken(executor_name, reason):
                self._executor_broken(executor_name, reason)
            case FenceDue():
                self._lifecycle.fence()
            case DeclaredDead():
                self._lifecycle.lose(self._table, "this worker was declared dead")
            case LimitReached(reason, tasks, rss_bytes):
                self._environment.link.tell(Retiring(reason, tasks, rss_bytes))
                self._shutdown.retire()
            case DrainStarted():
                scope = self._environment.scope
                scope.start(self._messenger.leave(), name="leave messages to others")
                scope.start(self._close_claimer(), name="release waiting attempts")

    def _beaten(self, sent_at: float) -> None:
        was_silent = not self._liveness.may_claim
        self._liveness.beaten(sent_at)
        self._relayed_hints.heard()
        self._messenger.beaten()
        if was_silent:
            self._claimer.claim_soon()

    def _start(self) -> None:
        environment = self._environment
        services: tuple[MessengerService, ...] = (
            self._claimer,
            self._settler,
            self._advancer,
            self._progress,
            self._streams,
            self._leases,
            self._stalls,
            self._liveness,
            FenceWatch(self._liveness),
            self._recycling,
            self._probe,
            self._reporter,
            *((self._logs,) if self._logs.is_needed else ()),
            *self._messenger.parts,
        )
        for service in services:
            runner = ServiceRunner(
                service,
                clock=environment.clock,
                random=environment.random,
                emit=environment.events.emit,
                wake=service.wake,
            )
            environment.scope.start(runner.run(), name=service.name, critical=True)
        self._listener.listen()
        self._messenger.start()
        self._loop_watch.start()
        environment.link.tell(Ready())
        environment.events.emit(WorkerStarted(worker_id=self.id, pid=os.getpid()))

    def _slot_freed(self) -> None:
        self._claimer.slot_freed()
        self._messenger.room_changed()

    def _executor_broken(self, executor_name: ExecutorName, reason: str) -> None:
        # The next try usually succeeds, for example after one process was killed while it was starting.
        level = logging.ERROR if self._slots.broken(executor_name) else logging.WARNING
        _log.log(level, "cannot_run_tasks executor=%s worker_id=%s reason=%s", executor_name, self.id, reason)
        self._claimer.slot_freed()

    def _adopt(self, welcome: Welcome) -> None:
        environment, identity = self._environment, self._environment.identity
        held = self._table.clear()
        identity.adopt(welcome)
        self._lifecycle.lose(held, "this worker was declared dead, and continues under another id")
        self._liveness.beaten(environment.clock.monotonic())
        if environment.session.application_name != identity.session_name:
            environment.claim_session.rename(identity.session_name)
            environment.session.rename(identity.session_name)
            self._logs.rename(identity.session_name)
            self._listener.listen()
        self._claimer.claim_soon()

    def _make_slots(self, *, is_quiet: bool) -> Slots:
        slots = Slots(
            self._environment,
            executors=self._executors,
            lifecycle=self._lifecycle,
            liveness=self._liveness,
            recycling=self._recycling,
        )
        slots.is_quiet = is_quiet
        return slots

    def _make_claimer(self) -> Claimer:
        requests = ContextRequests(
            self._environment,
            progress=self._progress,
            streams=self._streams,
            lifecycle=self._lifecycle,
            shutdown=self._shutdown,
        )
        return Claimer(
            self._environment,
            table=self._table,
            slots=self._slots,
            leases=self._leases,
            advancer=self._advancer,
            messenger=self._messenger,
            requests=requests,
        )

    def _make_listener(self, make_hint_source: Callable[[str], HintSource]) -> HintListener:
        return HintListener(
            self._environment,
            make_hint_source=make_hint_source,
            claimer=self._claimer,
            leases=self._leases,
            advancer=self._advancer,
            messenger=self._messenger,
        )

    def _make_reporter(self) -> Reporter:
        return Reporter(
            self._environment,
            table=self._table,
            executors=self._executors,
            lifecycle=self._lifecycle,
            probe=self._probe,
            loop_watch=self._loop_watch,
            messenger=self._messenger,
        )

    async def _close_claimer(self) -> None:
        try:
            await self._claimer.close()
        finally:
            self._shutdown.claimer_closed()

    async def _close(self) -> None:
        self._is_closed = True
        self._lifecycle.declines.close()
        self._loop_watch.stop()
        await asyncio.gather(*(executor.close() for executor in self._executors.values()))
        await self._messenger.close()
        await self._logs.close()
        await self._environment.scope.close()
        await self._environment.claim_session.drop()
        await self._environment.session.drop()


def make_executors(environment: WorkerEnvironment) -> dict[ExecutorName, Executor]:
    """Return an executor for each `run_in` mode that has slots and task functions.

    If any of these modes runs code in the worker process and task processes can be started, add a solo executor for suspects.
    """
    plan = environment.plan
    made: dict[ExecutorName, Executor] = {}
    for mode in MODES:
        slots = plan.slots(mode)
        if slots == 0 or not plan.names(mode):
            continue
        match mode:
            case "async":
                made[mode] = AsyncExecutor(environment, slots=slots)
            case "thread":
                made[mode] = ThreadExecutor(environment, slots=slots)
            case "process":
                made[mode] = ProcessExecutor(environment, slots=slots, name=mode)
    if plan.task_process_argv and ("async" in made or "thread" in made):
        made["solo"] = ProcessExecutor(environment, slots=plan.solo_slots, name="solo")
    return made


def make_loop_watch(environment: WorkerEnvironment, executors: Mapping[ExecutorName, Executor]) -> LoopWatch:
    """Return a watch that reports when the running event loop is blocked.

    A report names the task function on the loop, and the functions in threads, one of which might be holding the GIL.
    """
    threads, coroutines = executors.get("thread"), executors.get("async")

    def in_threads() -> tuple[str, ...]:
        return threads.names if isinstance(threads, ThreadExecutor) else ()

    return LoopWatch(
        asyncio.get_running_loop(),
        threshold_s=LOOP_BLOCKED_AFTER_S,
        emit=environment.events.emit,
        describe=coroutines.describe if isinstance(coroutines, AsyncExecutor) else name_of,
        in_threads=in_threads,
        is_code=lambda task: task.get_name().partition(" ")[0] in environment.plan.definitions,
    )
