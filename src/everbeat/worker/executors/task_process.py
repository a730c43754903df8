"""The program of a task process, which runs the attempts that its worker sends, one at a time, in its main thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, NoReturn

from everbeat.domain.labels import decode_labels
from everbeat.domain.task.checkpoint import PartialWork
from everbeat.domain.task.context import Context, ContextSource
from everbeat.domain.task.context_backend import EmittedItem
from everbeat.domain.task.definition import CallCodec, TaskDefinition
from everbeat.domain.task.middleware import Middleware
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import StopReason, TaskStopped
from everbeat.protocol import (
    Answer,
    AttemptCancelled,
    AttemptPostponed,
    AttemptReport,
    AttemptSuspended,
    CancelRun,
    Emitted,
    LeaseKey,
    LeaveIdle,
    Logged,
    NotUnderstood,
    ProcessReady,
    ProgressReport,
    Raised,
    Request,
    Returned,
    RunAttempt,
    ToTaskProcess,
)
from everbeat.runtime.channel import BlockingChannel, ChannelClosed, FrameTooLarge
from everbeat.runtime.fork import UserCode
from everbeat.runtime.log_buffer import LogBuffer
from everbeat.runtime.log_capture import start_capturing
from everbeat.runtime.main_loop import coroutine_stack, leave, take_signal
from everbeat.runtime.processes import exit_orphaned
from everbeat.runtime.resources import ResourceSet
from everbeat.worker import attempt as ended_as
from everbeat.worker.attempt import AttemptEnd, CodeFailed, Declined, Succeeded
from everbeat.worker.context_backend import RequestingBackend
from everbeat.worker.executors.executor import Invoker, PreparedCall
from everbeat.worker.progress_text import progress_json

PROGRESS_EVERY_S: Final = 0.2
LOG_EVERY_S: Final = 0.2
"""How often a task process sends captured log records to its worker, in seconds. If it is killed, the later records are lost."""
CLOSE_WITHIN_S: Final = 1.0
"""How long the resources of a task process can take to close, in seconds. Its worker kills it soon afterwards."""

_log = logging.getLogger("everbeat.worker")


def run_task_process(
    sock: socket.socket,
    *,
    definitions: Mapping[str, TaskDefinition],
    exception_codes: Mapping[type[BaseException], str],
    middleware: Middleware | None = None,
    resources: ResourceSet | None = None,
) -> NoReturn:
    """Run attempts until the worker closes the channel or an attempt has been stopped.

    Call this function in the main thread, after `prepare_process`. Raises ResourceFailed if a resource cannot be opened.
    """
    with _opened(resources) as run_coroutine:
        channel = BlockingChannel(sock, messages=ToTaskProcess)
        invoker = Invoker(exception_codes, middleware or Middleware(), run_coroutine)
        TaskProgram(channel, definitions=definitions, invoker=invoker).run()
    leave(0)


@contextlib.contextmanager
def _opened(resources: ResourceSet | None) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Open the resources of this process, and yield the function that runs the coroutine of an attempt.

    Without resources, each attempt has its own loop. Async resources belong to one loop, so all attempts then share that loop, as they do
    in a worker process. Between attempts, the loop stands still.
    """
    if not resources:
        yield asyncio.run
        return
    loop = asyncio.new_event_loop()
    loop.run_until_complete(resources.aopen())
    try:
        yield loop.run_until_complete
    finally:
        loop.run_until_complete(resources.aclose(within_s=CLOSE_WITHIN_S))
        loop.close()


class TaskProgram:
    """The main loop of a task process. `_running` is the attempt that the worker sent last."""

    def __init__(
        self, channel: BlockingChannel, *, definitions: Mapping[str, TaskDefinition], invoker: Invoker
    ) -> None:
        self._channel = channel
        self._definitions = definitions
        self._invoker = invoker
        self._orders: SimpleQueue[RunningAttempt | None] = SimpleQueue()
        self._running: RunningAttempt | None = None
        self._main = threading.get_ident()

    def run(self) -> None:
        """Run attempts until one of them has been stopped or the worker retires the process.

        If the channel closes, the process exits at once.
        """
        take_signal(signal.SIGTERM, self._interrupted)
        self._channel.read_in_thread(on_message=self._hear, on_eof=exit_orphaned)
        self._channel.send(ProcessReady())
        while True:
            running = self._orders.get()
            if running is None:
                return
            ended = self._run(running)
            running.is_interruptible = False
            running.flush()
            running.send_log()
            self._report(running, ended)
            if running.stopped is not None:
                return
            del running, ended  # an idle process must not keep the last result alive

    def _run(self, running: RunningAttempt) -> AttemptEnd:
        order = running.order
        definition = self._definitions.get(order.name)
        assert definition is not None, f"worker and task process disagree on {order.name!r}"
        context = ContextSource(running.context, log=running.log)
        try:
            running.is_interruptible = True
            running.raise_if_stopped()
            return self._invoker.run(
                definition, order.args, context, awaited=running.awaited, traced=order.traced, backend=running
            )
        except BaseException as exception:  # noqa: BLE001 - a stop that arrives between two steps of this class
            return self._invoker.ended_by(definition, exception)
        finally:
            running.is_interruptible = False

    def _report(self, running: RunningAttempt, ended: AttemptEnd) -> None:
        order, ids = running.order, running.trace_ids
        match ended:
            case Succeeded(result):
                message: AttemptReport = Returned(order.claim_id, result.decode(), ids)
            case ended_as.CodeSuspended():
                message = AttemptSuspended(order.claim_id, ids)
            case ended_as.CodePostponed(error, after_ms, run_at, counts):
                message = AttemptPostponed(order.claim_id, error.decode(), after_ms, run_at, counts, ids)
            case ended_as.CodeCancelled(error):
                message = AttemptCancelled(order.claim_id, error.decode())
            case CodeFailed(error, reasons):
                message = Raised(order.claim_id, error.decode(), reasons, ids)
            case Declined(CodeFailed(error, reasons), unknown, missing):
                message = NotUnderstood(order.claim_id, error.decode(), reasons, unknown, missing)
            case _:
                raise AssertionError(ended)
        try:
            self._channel.send(message)
        except FrameTooLarge as problem:
            definition = self._definitions[order.name]
            failed = self._invoker.raised(definition, problem)
            self._channel.send(Raised(order.claim_id, failed.error.decode(), failed.reasons, ids))

    def _hear(self, message: ToTaskProcess) -> None:
        """Handle a message from the worker. Called in the listening thread."""
        match message:
            case RunAttempt():
                # Set `_running` here, not in the main thread, because a cancel may arrive before the main thread takes
                # the order.
                definition = self._definitions.get(message.name)
                tracing = self._invoker.middleware.tracing
                self._running = RunningAttempt(message, self._channel, definition=definition, tracing=tracing)
                self._orders.put(self._running)
            case LeaveIdle():
                self._orders.put(None)
            case Answer(claim_id):
                running = self._running
                if running is not None and running.order.claim_id == claim_id:
                    running.answered(message)
            case CancelRun(claim_id, reason):
                running = self._running
                if running is not None and running.order.claim_id == claim_id:
                    running.stopped = reason
                    if reason == "stalled":
                        running.log_where_it_waits()  # not woken, because the worker is about to kill this process
                    else:
                        self._wake(running)

    def _wake(self, running: RunningAttempt) -> None:
        if not running.cancel():
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _interrupted(self, number: int, frame: object) -> None:
        """Handle SIGTERM by stopping the code, if it was asked to stop. Python calls this method in the main thread."""
        del number, frame
        if self._running is not None:
            self._running.raise_if_stopped()


class RunningAttempt(RequestingBackend):
    """The attempt whose code is running in this process. It is the backend of the code's Context, and can stop the code."""

    def __init__(
        self,
        order: RunAttempt,
        channel: BlockingChannel,
        *,
        definition: TaskDefinition | None,
        tracing: Tracing | None = None,
    ) -> None:
        self.order = order
        self._tracing = tracing
        self._definition = definition
        self._requests: dict[int, Future[Answer]] = {}
        self.stopped: StopReason | None = None
        self.is_interruptible = False
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutine: asyncio.Task[Any] | None = None
        self._speaking = threading.Lock()
        self._emitting = threading.Lock()
        self._unsent: ProgressReport | None = None
        self._is_promised = False
        self._sent_at = 0.0
        self.log: Final = None if order.log_level is None else LogBuffer(order.log_level, self._send_log_soon)
        self._logging = threading.Lock()
        self._log_sent_at = 0.0
        if self.log is not None:
            start_capturing()

    def context(self) -> Context:
        """Return the Context for the attempt's code."""
        order = self.order
        return Context(
            task_id=order.task_id,
            name=order.name,
            queue=order.queue,
            attempt=order.attempt,
            fence=order.fence,
            claim_id=order.claim_id,
            worker_id=order.worker_id,
            deadline=order.deadline,
            tick=order.tick,
            retries_left=order.retries_left,
            labels=decode_labels(order.labels),
            _backend=self,
            _work=PartialWork.from_json(order.checkpoint),
        )

    def stop_reason(self) -> StopReason | None:
        """Return why the code should stop, or None if it should not."""
        return self.stopped

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Send progress to the worker, at most five times per second. A report that is held back is sent soon afterwards."""
        progress = progress_json(stage=stage, fraction=fraction, message=message)
        with self._speaking:
            self._unsent = ProgressReport(self.order.claim_id, progress.decode())
            wait_s = self._sent_at + PROGRESS_EVERY_S - time.monotonic()
            is_promised, self._is_promised = self._is_promised, wait_s > 0
        if wait_s <= 0:
            self.flush()
        elif not is_promised:
            later = threading.Timer(wait_s, self.flush)
            later.daemon = True
            later.start()

    def emit(self, draw: Callable[[], EmittedItem]) -> EmittedItem:
        """Send an item that the code emits to the worker, and return it."""
        try:
            with self._emitting:
                item = draw()
                self._channel.send(Emitted(self.order.claim_id, item))
        except ChannelClosed:
            raise TaskStopped("shutting_down", task_id=self.order.task_id) from None
        return item

    def flush(self) -> None:
        """Send the progress that was held back."""
        with self._speaking:
            unsent, self._unsent, self._is_promised = self._unsent, None, False
            if unsent is None:
                return
            self._sent_at = time.monotonic()
            with contextlib.suppress(ChannelClosed):
                self._channel.send(unsent)

    def send_log(self) -> None:
        """Send the captured log records that the worker does not have yet. Only this call waits for the channel, not the code's logging."""
        if self.log is None:
            return
        with self._logging, contextlib.suppress(ChannelClosed):
            self._log_sent_at = time.monotonic()
            parts = self.log.unwritten()
            for part in parts:
                self._channel.send(Logged(self.order.claim_id, part.lines))
            self.log.written(parts)

    def _send_log_soon(self) -> None:
        later = threading.Timer(self._log_sent_at + LOG_EVERY_S - time.monotonic(), self.send_log)
        later.daemon = True
        later.start()

    @property
    def tracing(self) -> Tracing | None:
        """Return the tracers of the app, or None if it has none."""
        return self._tracing

    @property
    def lease(self) -> LeaseKey:
        """Return (task id, claim_id)."""
        return self.order.task_id, self.order.claim_id

    @property
    def codec(self) -> CallCodec:
        """Return the codec of the task function."""
        assert self._definition is not None
        return self._definition.codec

    def ask(self, request: Request) -> Answer:
        """Send a request and return the worker's answer. In the main thread, a stop interrupts the wait."""
        with self._asked(request) as future:
            return future.result()

    async def aask(self, request: Request) -> Answer:
        """Send a request and return the worker's answer. The async form of `ask`."""
        with self._asked(request) as future:
            return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def _asked(self, request: Request) -> Iterator[Future[Answer]]:
        future = self._requests[request.ticket] = Future[Answer]()
        try:
            self.flush()  # progress that was reported earlier is sent before this request
            self._channel.send(request)
            yield future
        except ChannelClosed:
            raise TaskStopped("shutting_down", task_id=self.order.task_id) from None
        finally:
            del self._requests[request.ticket]

    def answered(self, answer: Answer) -> None:
        """Pass an answer from the worker to the request that is waiting for it. Called in the listening thread."""
        future = self._requests.get(answer.ticket)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    async def awaited(self, call: PreparedCall, context: ContextSource) -> Any:
        """Run an async task function in such a way that `cancel` can cancel it."""
        self._coroutine, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        context.begin(self.strand())
        self.raise_if_stopped()
        try:
            with UserCode():
                return await call()
        finally:
            self._loop = None

    def cancel(self) -> bool:
        """Cancel the running async code. Return False if no async code is running. Called in the listening thread."""
        loop, coroutine = self._loop, self._coroutine
        if loop is None or coroutine is None:
            return False
        with contextlib.suppress(RuntimeError):  # the loop has just been closed
            loop.call_soon_threadsafe(coroutine.cancel)
        return True

    def log_where_it_waits(self) -> None:
        """Log where async code is waiting, which no thread's stack shows. Called in the listening thread."""
        if self._coroutine is not None:
            _log.error("stalled task_id=%s\n%s", self.order.task_id, coroutine_stack(self._coroutine))

    def raise_if_stopped(self) -> None:
        """Raise TaskStopped in the code, once, if the attempt has been stopped."""
        if self.stopped is not None and self.is_interruptible:
            self.is_interruptible = False
            raise TaskStopped(self.stopped, task_id=self.order.task_id)
