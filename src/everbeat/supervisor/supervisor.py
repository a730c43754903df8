"""The supervisor, which starts, monitors and replaces worker processes, and shuts them down cleanly."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from everbeat.config import WorkerConfig
from everbeat.errors import EverbeatError
from everbeat.protocol import (
    AskBeat,
    Drain,
    FromWorkerProcess,
    Held,
    Hello,
    HookAnswers,
    Leaving,
    Ready,
    Refused,
    Retiring,
    Stop,
    Tick,
)
from everbeat.runtime.channel import ChannelClosed, ChannelError
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import ProcessRecycled, WorkerExited
from everbeat.runtime.main_loop import signals_call
from everbeat.runtime.processes import ChildProcess, ExitReport, OutOfMemoryCounter, spawn
from everbeat.runtime.task_links import link_tasks
from everbeat.runtime.task_scope import ServiceRunner, TaskScope
from everbeat.supervisor.hint_relay import HintRelay
from everbeat.supervisor.liveness import watches_of
from everbeat.supervisor.processes import GRACE_OVER, ManagedProcess, RestartPolicy, WorkerChild
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.remote_hooks import RemoteHooks
from everbeat.supervisor.workers import SupervisedWorker

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LAST_MESSAGES_S: Final = 1.0  # to read the messages that a process sent before it exited
_CLOSED_S: Final = 5.0  # for a process to exit after it closed its channel
_BEYOND_GRACE_S: Final = 30.0  # to write outcomes that the database has not accepted yet
_LAST_CHECK_S: Final = 1.0
_LAST_SILENCE_S: Final = 3.0  # three report intervals of a worker process that is still responding
_LAST_BURIALS_S: Final = 10.0
_log = logging.getLogger("everbeat.supervisor")


class Supervisor:
    """Keeps worker processes running.

    `argv` is the command that starts a worker process, and `env` replaces its environment. `supervise` creates the supervision from
    the first message of the first process. `processes` overrides the number of processes in the app's configuration.
    `first` is a worker process that `argv` has already started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        supervise: Callable[[Hello], Supervision],
        environment: ProcessEnvironment,
        env: Mapping[str, str] | None = None,
        processes: int | None = None,
        hooks: RemoteHooks | None = None,
        first: ChildProcess | None = None,
    ) -> None:
        self.environment = environment
        self.scope = TaskScope(name="supervisor")
        self.restart_policy = RestartPolicy(events=environment.events)
        self.stopping = asyncio.Event()
        self.lives: set[asyncio.Task[None]] = set()
        self._argv = list(argv)
        self._supervise = supervise
        self._clock = environment.clock
        self._env = env
        self._process_count = processes
        self._hooks = hooks or RemoteHooks(environment)
        self._config = WorkerConfig()
        self._first = first
        self._out_of_memory = OutOfMemoryCounter() if first is None else first.out_of_memory
        self._children: list[WorkerChild] = []
        self._supervision: Supervision | None = None
        self._hint_relay: HintRelay | None = None
        self._opening = asyncio.Lock()
        self._processes: list[ManagedProcess] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._burials: set[asyncio.Task[None]] = set()
        self._failure: EverbeatError | None = None
        self._stops = 0

    async def run(self) -> None:
        """Run until the supervisor has shut down.

        In the main thread, SIGTERM and SIGINT call `stop`. Cancelling this coroutine kills the processes. Raises WorkerError if no
        worker can start, and DatabaseError if the supervisor cannot register in the database.
        """
        with signals_call(self.stop, numbers=_SIGNALS):
            try:
                self._add_process()
                while waiting := [task for task in (*self._keeping, *self.lives) if not task.done()]:
                    await asyncio.wait(waiting)
                for task in self._keeping:
                    task.result()
            finally:
                await self._end()
        if self._failure is not None:
            raise self._failure

    @property
    def supervision(self) -> Supervision | None:
        """Return the supervision, or None until the first worker process has reported the address of the database."""
        return self._supervision

    @property
    def is_stopping(self) -> bool:
        """Return whether the supervisor drains or shuts down."""
        return self.stopping.is_set()

    @property
    def was_ever_ready(self) -> bool:
        """Return whether a worker process has ever been ready."""
        return self.restart_policy.was_ever_ready

    @property
    def process_counts(self) -> tuple[int, int]:
        """Return how many worker processes take tasks, and how many there should be."""
        ready = sum(
            child.is_ready and not (child.is_told_to_leave or child.is_unresponsive or child.retired.is_set())
            for child in self._children
        )
        return ready, len(self._processes)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the running worker processes."""
        return [child.process.pid for child in self._children]

    def stop(self) -> None:
        """Stop the supervisor. The first call drains the workers, the second stops them at once, and the third kills their processes."""
        self._stops += 1
        _log.info("stop_asked times=%d", self._stops)
        self.stopping.set()
        if self._supervision is not None and self._stops <= 2:
            self._supervision.drain()
            grace_s = self._config.grace_s if self._stops == 1 else 0.0
            self.scope.start(self._end_at_last(grace_s), name="end of patience")
        for child in list(self._children):
            self._ask_to_leave(child)

    def _ask_to_leave(self, child: WorkerChild) -> None:
        if self._stops >= 3 or not child.is_welcome:
            child.kill(because=GRACE_OVER)  # a process that got no Welcome holds no leases
        elif self._stops == 2:
            child.send(Stop())
        else:
            child.send(Drain(round(self._config.grace_s * 1_000)))

    async def _end_at_last(self, grace_s: float) -> None:
        """Kill the remaining processes: silent ones soon after the grace period, and all others later."""
        await self._clock.sleep(grace_s + _LAST_CHECK_S)
        looked_at = self._clock.monotonic()
        await self._clock.sleep(_LAST_SILENCE_S)
        self._kill_overdue(one for one in self._children if one.heard_at < looked_at and not one.has_left)
        await self._clock.sleep(_BEYOND_GRACE_S)
        self._kill_overdue(self._children)

    def _kill_overdue(self, children: Iterable[WorkerChild]) -> None:
        for child in list(children):
            _log.error("grace_exceeded pid=%d", child.process.pid)
            child.kill(because=GRACE_OVER)

    def spawn(self) -> ChildProcess:
        """Start a worker process, or return the one that is already running. Raises OSError if the operating system refuses."""
        first, self._first = self._first, None
        if first is not None:
            return first
        argv = [*self._argv, "again"] if self.restart_policy.was_ever_ready else self._argv
        return spawn(argv, env=self._env, out_of_memory=self._out_of_memory)

    def _add_process(self) -> None:
        process = ManagedProcess(self)
        self._processes.append(process)
        self._keeping.append(self.scope.start(process.keep(), name=f"process {len(self._processes)}"))

    async def live(self, child: WorkerChild) -> None:
        """Serve one worker process from its first message to its exit."""
        process = child.process
        self._children.append(child)
        conversation = self.scope.start(self._converse(child), name=f"channel to {process.pid}")
        child.report = child.with_cause(await process.wait_exit())
        died_at = self._clock.monotonic()
        await self._clock.wait(child.fell_silent, timeout_s=_LAST_MESSAGES_S)
        conversation.cancel()
        self._children.remove(child)
        self._hooks.leave(child)
        child.close()
        if child.refusal is None:  # a refusal is reported where the supervisor acts on it
            self.environment.events.emit(
                WorkerExited(
                    worker_id=child.worker_id,
                    pid=process.pid,
                    cause=child.report.cause,
                    in_order=child.has_left and child.report.signal_number is None,
                )
            )
        if self._supervision is not None and child.worker is not None:
            self._supervision.dismiss(child.worker)
            self._bury(self._supervision, child.worker, child, child.report, died_at=died_at)

    def _bury(
        self,
        supervision: Supervision,
        worker: SupervisedWorker,
        child: WorkerChild,
        report: ExitReport,
        *,
        died_at: float,
    ) -> None:
        """Start cleaning up after a worker in the background, so that its replacement is not delayed."""
        burial, name = supervision.burial, f"burial of {worker.worker_id}"
        if not (child.has_left or report.stopped) and not supervision.config.detect_child_exit:
            self.scope.start(burial.by_age(worker, report), name=name)
            return
        in_order = child.has_left and report.signal_number is None
        steps = burial.in_order(worker) if in_order else burial.by_exit(worker, report, died_at=died_at)
        task = self.scope.start(steps, name=name)
        self._burials.add(task)
        task.add_done_callback(self._burials.discard)

    async def _converse(self, child: WorkerChild) -> None:
        try:
            while True:
                message: FromWorkerProcess = await child.channel.receive()
                child.heard_at = self._clock.monotonic()
                await self._receive(child, message)
        except ChannelClosed:
            child.fell_silent.set()  # the cleanup does not have to wait for further messages
            await self._clock.sleep(_CLOSED_S)  # the process is about to exit
        except ChannelError as problem:
            child.fell_silent.set()
            _log.error("worker_protocol_error pid=%d problem=%s", child.process.pid, problem)
        finally:
            child.process.kill()  # a process is useless without a channel; it has usually exited already

    async def _receive(self, child: WorkerChild, message: FromWorkerProcess) -> None:
        match message:
            case Hello():
                await self._welcome(child, message)
            case Ready():
                child.is_ready = self.restart_policy.was_ever_ready = True
                self._hooks.join(child)
            case HookAnswers():
                self._hooks.receive(message)
            case Held() | Tick():
                if child.worker is not None:
                    child.worker.receive(message)
            case AskBeat():
                if self._supervision is not None:
                    self._supervision.beat_now()
            case Refused():
                child.refusal = message
            case Leaving(code_runs):
                child.has_left, child.leaves_code = not code_runs, code_runs
            case Retiring(reason, tasks, rss):
                self.environment.events.emit(
                    ProcessRecycled(pid=child.process.pid, reason=reason, tasks=tasks, rss_bytes=rss)
                )
                child.retired.set()

    async def _welcome(self, child: WorkerChild, hello: Hello) -> None:
        async with self._opening:
            supervision = self._supervision or await self._open(hello)
        if supervision is None or self.stopping.is_set():
            child.process.kill()
            return
        child.worker = SupervisedWorker(
            pid=child.process.pid,
            queues=hello.queues,
            metadata={
                "tasks": hello.task_names,
                "executors": hello.executors,
                "parameters": hello.parameters,
            },
            send=child.send,
            clock=self._clock,
            on_loop=hello.on_loop,
            declared=hello.schedules,
            relays_hints=self._hint_relay is not None,
            rates=supervision.recovery.rates,
        )
        welcome = await supervision.register(child.worker)
        child.is_welcome = True
        child.send(welcome)
        if self._hint_relay is not None:
            self._hint_relay.join(child)
        if self._stops:
            self._ask_to_leave(child)

    async def _open(self, hello: Hello) -> Supervision | None:
        """Register the supervisor in the database that the first worker process reported, and start the other processes."""
        try:
            link_tasks(hello.dashboard_url)
            config = WorkerConfig.from_dict(hello.worker)
            supervision = self._supervise(hello)
            try:
                await supervision.open()
            except BaseException:
                await supervision.close()
                raise
        except EverbeatError as problem:
            self.fail(problem)
            return None
        self._config, self._supervision = config, supervision
        count = self._process_count or config.processes
        if count > 1:  # a single worker process listens itself, because this way is longer
            self._hint_relay = HintRelay.from_database(
                supervision.target,
                session_name=f"{supervision.session_name} listen",
                children=self._children,
                random=self.environment.random,
            )
            self.scope.start(self._hint_relay.run(), name="hint relay")
        for _ in range(1, count):
            self._add_process()
        for watch in watches_of(supervision, self._children, self._processes, scope=self.scope):
            runner = ServiceRunner(
                watch, clock=self._clock, random=self.environment.random, emit=self.environment.events.emit
            )
            self.scope.start(runner.run(), name=watch.name)
        return supervision

    def fail(self, failure: EverbeatError) -> None:
        """Shut down the supervisor, because it cannot continue, and let `run` raise `failure`."""
        self._failure = self._failure or failure
        self.stopping.set()
        for child in self._children:
            child.process.kill()

    async def _end(self) -> None:
        """Kill the processes, wait for the cleanup after them, and close the supervision, whose heartbeats stop last."""
        if self._first is not None:
            self._first.kill()
        for child in self._children:
            child.process.kill()
        if self._burials:
            await asyncio.wait(self._burials, timeout=_LAST_BURIALS_S)
        await self.scope.close()
        if self._supervision is not None:
            await self._supervision.close()
        await self._hooks.close()
