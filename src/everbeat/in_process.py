"""A worker that runs inside the user's program, on the program's event loop. A thread supervises it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from msgspec.structs import replace

from everbeat.errors import WorkerError
from everbeat.protocol import AskBeat, Drain, FromSupervisor, FromWorker, Held, Leaving, Stop, Tick, Welcome
from everbeat.recovering.hooks import LocalHooks
from everbeat.runtime.blocking import LastingExecutor, unbroken
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.identity import take_tree_lock
from everbeat.runtime.main_loop import (
    EXIT_CODE_RUNS,
    EXIT_SLOTS_LEAKED,
    EXIT_UNSETTLED,
    run_through,
    signals_call,
)
from everbeat.runtime.resources import CLOSE_WITHIN_S
from everbeat.runtime.task_scope import CriticalCancelled, TaskScope
from everbeat.store import leases
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.workers import SupervisedWorker
from everbeat.worker.attempt import Attempt
from everbeat.worker.environment import WorkerPlan
from everbeat.worker.process import PreparedWorker
from everbeat.worker.settlement import cancel_what_it_started, cancels_its_children, settlement_of
from everbeat.worker.shutdown import LAST_S
from everbeat.worker.worker import Worker

_JOIN_S: Final = 30.0
_SETTLE_S: Final = 5.0
_POLL_S: Final = 0.25
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
Result = TypeVar("Result")

_log = logging.getLogger("everbeat.worker")


class InProcessSupervision:
    """Supervises an in-process worker from a thread with its own event loop, and receives the worker's messages."""

    def __init__(self, plan: WorkerPlan, worker: InProcessWorker, *, environment: ProcessEnvironment) -> None:
        self._plan = plan
        self._worker = worker
        self._environment = environment
        self._welcome: Future[Welcome] = Future()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_stopped = asyncio.Event()
        self._supervised: SupervisedWorker | None = None
        self._supervision: Supervision | None = None
        self._has_left = self._leaves_code = False
        self._code_left: Collection[Attempt] = ()
        self._has_released = threading.Event()

    def start(self) -> Future[Welcome]:
        """Start the thread that registers the worker and sends its heartbeats. Return a future for the first message to the worker.

        If the worker cannot be registered, the future raises the error.
        """
        self._thread = threading.Thread(target=self._run, name="everbeat-supervision", daemon=True)
        self._thread.start()
        return self._welcome

    def tell(self, message: FromWorker) -> None:
        """Handle a message from the worker."""
        match message:
            case Held() | Tick() if self._supervised is not None:
                self._call(partial(self._supervised.receive, message))
            case AskBeat() if self._supervision is not None:
                self._call(self._supervision.beat_now)
            case Leaving(code_runs):
                self._has_left, self._leaves_code = not code_runs, code_runs
            case _:
                pass

    def stop(self, code_left: Collection[Attempt]) -> None:
        """Stop the heartbeats after the worker has shut down.

        If the code of an attempt in `code_left` is still running, the heartbeats continue until that code has finished, even after
        this call has returned.
        """
        self._code_left = code_left
        self._call(self._is_stopped.set)
        if self._thread is not None:
            self._has_released.wait(_JOIN_S)

    def call_at_end(self, call: Callable[[], None]) -> None:
        """Invoke `call` once the heartbeats have stopped. If code is still running, return at once and wait in another thread."""

        def wait() -> None:
            if self._thread is not None:
                self._thread.join()
            call()

        if self._thread is not None and self._leaves_code and self._thread.is_alive():
            threading.Thread(target=wait, name="everbeat-last-code", daemon=True).start()
        else:
            call()

    def _run(self) -> None:
        try:
            run_through(self._supervise())
        finally:
            self._has_released.set()

    def _call(self, call: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    async def _supervise(self) -> None:
        self._loop = asyncio.get_running_loop()
        plan, environment, worker = self._plan, self._environment, self._worker
        self._supervision = supervision = Supervision(
            plan.target,
            plan.recovery,
            environment=environment,
            lock=take_tree_lock(),
            slot=plan.config.slot,
            hooks=LocalHooks(
                plan.hooks,
                timeout_s=plan.recovery.hook_timeout_ms / 1_000,
                events=environment.events,
                loop=worker.loop,
            ),
            on_fatal=worker.fail,
        )
        try:
            await supervision.open()
            self._supervised = supervised = SupervisedWorker(
                pid=os.getpid(),
                queues=plan.queues,
                metadata={
                    "tasks": sorted(plan.definitions),
                    "executors": plan.executors(),
                    "parameters": plan.parameters(),
                },
                send=worker.receive,
                clock=environment.clock,
                on_loop=plan.names("async"),
                declared=plan.schedules,
                rates=supervision.recovery.rates,
            )
            welcome = await supervision.register(supervised)
        except BaseException as error:  # noqa: BLE001 - the program is waiting for the welcome message or an error
            self._welcome.set_exception(error)
            await supervision.close()
            return
        self._welcome.set_result(welcome)
        await self._is_stopped.wait()
        supervision.dismiss(supervised)
        if self._has_left:
            await supervision.burial.in_order(supervised)
        elif self._leaves_code:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(supervision.burial.with_running_code(supervised), _SETTLE_S)
            supervision.drain()
            self._has_released.set()
            await supervision.burial.after_code(supervised, partial(self._settle_code_left, supervision))
        await supervision.close()

    async def _settle_code_left(self, supervision: Supervision) -> None:
        """Wait until all remaining code has finished, and then write the outcomes. Raises DatabaseError if they cannot be written."""
        while any(self._runs(attempt) for attempt in self._code_left):
            await supervision.environment.clock.sleep(_POLL_S)
        found = [
            settlement_of(attempt, attempt.ended, random=supervision.environment.random)
            for attempt in self._code_left
            if attempt.ended is not None
        ]
        for each in found:
            if each is not None and cancels_its_children(each):
                await cancel_what_it_started(supervision.session, each)
        if settlements := [each for each in found if each is not None]:
            await supervision.session.run(leases.settle(settlements, channel=supervision.target.channel))

    def _runs(self, attempt: Attempt) -> bool:
        # Code on a closed event loop can no longer run.
        loop = self._worker.loop
        return attempt.ended is None and (
            attempt.executor_name == "thread" or (loop is not None and not loop.is_closed())
        )


class InProcessWorker:
    """One run of a worker in this process. `prepare` opens the database and blocks, so it is called in a thread."""

    def __init__(self, prepare: Callable[[], PreparedWorker]) -> None:
        self._prepare = prepare
        self._threads = LastingExecutor(max_workers=1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grace_ms = 0
        self._worker: Worker | None = None
        self._work: asyncio.Task[int] | None = None
        self._early: list[FromSupervisor] = []
        self._stops = 0
        self._is_cancelled = False
        self._is_loop_ending = False
        self._failure: WorkerError | None = None

    def run_blocking(self) -> None:
        """Run the worker in this thread until it is stopped. In the main thread, SIGTERM and SIGINT call `stop`."""

        async def run() -> None:
            with signals_call(self.stop, numbers=_SIGNALS):
                await self.run()

        run_through(run())

    async def run(self) -> None:
        """Run the worker until it is stopped.

        If this coroutine is cancelled, the worker drains first, and then the coroutine raises CancelledError. When `asyncio.run`
        exits, it cancels all tasks on the loop. The worker then stops running tasks at once, according to their policies.

        Raises WorkerError, DatabaseError or NatsError if the worker cannot start or fails.
        """
        self._loop = asyncio.get_running_loop()
        preparing = self._loop.run_in_executor(self._threads, self._prepare)
        await self._until_done(preparing)
        prepared = preparing.result()
        self._grace_ms = round(prepared.plan.config.grace_s * 1_000)
        supervision = InProcessSupervision(prepared.plan, self, environment=prepared.environment)
        try:
            if not self._is_cancelled:
                await self._work_with_resources(prepared, supervision)
        finally:
            # Not asyncio.to_thread: once the main thread has exited, the default executor accepts no more calls.
            await self._loop.run_in_executor(self._threads, supervision.call_at_end, prepared.close)
        if self._failure is not None:
            raise self._failure
        if self._is_cancelled:
            raise asyncio.CancelledError

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """Return the program's event loop, or None before `run` is called."""
        return self._loop

    def stop(self) -> None:
        """Stop the worker. The first call drains it, and the second call stops it at once. This method can be called from any thread."""
        self._call(self._stop)

    def _call(self, call: Callable[[], object]) -> None:
        """Schedule `call` on the program's event loop. This method can be called from any thread."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(call)

    async def _work_with_resources(self, prepared: PreparedWorker, supervision: InProcessSupervision) -> None:
        resources = prepared.plan.resources
        if not resources:
            await self._work_on(prepared, supervision)
            return
        # `asyncio.run` cancels all tasks when it ends, but the resources must stay open until the worker has drained.
        await resources.aopen(on_loop_ending=_keep_on)
        close_within_s = LAST_S
        try:
            await self._work_on(prepared, supervision)
        finally:
            worker = self._worker
            if worker is not None:
                close_within_s = worker.grace_left_s(at_most=CLOSE_WITHIN_S)
            if worker is not None and worker.code_left:  # running code might use the resources
                resources.leave_open()
            else:
                await unbroken(resources.aclose(within_s=close_within_s))

    async def _work_on(self, prepared: PreparedWorker, supervision: InProcessSupervision) -> None:
        plan = replace(prepared.plan, on_loop_ending=self._note_loop_ending)
        try:
            welcome = asyncio.wrap_future(supervision.start())
            await self._until_done(welcome)
            self._worker = prepared.make(plan, welcome=welcome.result(), link=supervision, on_fatal=self.fail)
            for message in self._early:
                self._worker.obey(message)
            if self._stops:
                self._pass_on_stop(self._worker)
            async with TaskScope(
                name="in-process worker", on_fatal=self.fail, on_loop_ending=self._note_loop_ending
            ) as scope:
                self._work = scope.start(self._worker.run(), name="worker")
                await self._until_done(self._work)
                self._report_end(self._work)
        finally:
            code_left = () if self._worker is None else self._worker.code_left
            loop = asyncio.get_running_loop()
            await self._until_done(loop.run_in_executor(self._threads, supervision.stop, code_left))

    def _report_end(self, work: asyncio.Task[int]) -> None:
        if self._failure is not None:
            return
        if work.cancelled():
            self._report_unsettled("the program has cancelled the tasks of the worker")
        elif work.result() == EXIT_UNSETTLED:
            self._report_unsettled("the database could not be reached in time")
        elif work.result() == EXIT_CODE_RUNS:
            _log.warning(
                "code_runs_on problem=%r",
                "code that cannot be stopped is still running in this program; its leases are kept until it finishes, to prevent an overlapping run",
            )
        elif work.result() == EXIT_SLOTS_LEAKED:
            self._failure = WorkerError(
                "All slots of one type are occupied by abandoned code that is still running, so this worker has stopped.",
                fix="restart the program; check Context.cancelled in thread tasks, or run them with run_in='process'.",
            )

    async def _until_done(self, work: asyncio.Future[Result]) -> None:
        """Wait until `work` is done. If the caller is cancelled while it waits, stop the worker; `run` raises CancelledError later."""
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                self._is_cancelled = True
                self._stop()

    def _note_loop_ending(self) -> None:
        # The loop has stopped and is about to cancel all tasks. The scheduled call runs before any code on the loop sees
        # its cancellation.
        if self._loop is not None and not self._is_loop_ending:
            self._is_loop_ending = True
            _log.info("loop_ends running=stopped")
            self._loop.call_soon(self._stop_at_once)

    def _stop_at_once(self) -> None:
        self._stops += 1
        self._stop()

    def _report_unsettled(self, why: str) -> None:
        _log.warning("left_to_recovery problem=%r", f"the worker keeps its leases: {why}")

    def _stop(self) -> None:
        self._stops += 1
        if self._worker is not None:
            self._pass_on_stop(self._worker)

    def _pass_on_stop(self, worker: Worker) -> None:
        worker.obey(Drain(self._grace_ms) if self._stops == 1 else Stop())

    def receive(self, message: FromSupervisor) -> None:
        """Pass a message from the supervision to the worker. The supervision thread calls this method."""
        self._call(partial(self._obey, message))

    def _obey(self, message: FromSupervisor) -> None:
        if self._worker is None:
            self._early.append(message)
        else:
            self._worker.obey(message)

    def fail(self, name: str, error: BaseException) -> None:
        """Shut down the worker, but not the program, after a critical part called `name` has crashed with `error` in either thread."""
        if not (self._is_cancelled and isinstance(error, CriticalCancelled)):
            self._failure = self._failure or WorkerError(f"The worker's {name} crashed with {error!r}.")
        self._call(self._abandon)

    def _abandon(self) -> None:
        if self._work is not None:
            self._work.cancel()


def _keep_on() -> None:
    """Do nothing when the loop ends, because the worker closes the resources itself."""
