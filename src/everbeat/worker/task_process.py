"""The program of a task process: one attempt at a time in its main thread, told what to do by its worker.

What lives here: the task process's half of the talk. A thread of its own listens to the worker, so that a cancel is heard
while user code runs; it interrupts the main thread by a signal, or cancels the coroutine that runs there. SIGTERM from
elsewhere, such as a service manager that signals every process at once, is ignored: the worker decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, NoReturn

from everbeat.domain.checkpoint import PartialWork
from everbeat.domain.codec import CallCodec
from everbeat.domain.context import Context, StopReason, TaskStopped
from everbeat.domain.definition import TaskDefinition
from everbeat.runtime.blocking_channel import BlockingChannel
from everbeat.runtime.fork import UserCode
from everbeat.runtime.frames import ChannelClosed, FrameTooLarge
from everbeat.runtime.parent import exit_orphaned
from everbeat.runtime.signals import take_signal
from everbeat.runtime.stacks import coroutine_stack
from everbeat.worker import attempt as ended_as
from everbeat.worker.attempt import Declined, Ended, Failed, Succeeded, progress_json
from everbeat.worker.code_side import CodeSide
from everbeat.worker.farewell import leave
from everbeat.worker.invocation import Call, Invoker
from everbeat.worker.protocol import (
    Answer,
    CancelRun,
    Lease,
    LeaveIdle,
    NotUnderstood,
    ProcessReady,
    Progress,
    Raised,
    Request,
    Returned,
    Run,
    Suspended,
    ToTaskProcess,
)

PROGRESS_EVERY_S: Final = 0.2

_log = logging.getLogger("everbeat.worker")


def run_task_process(
    sock: socket.socket,
    *,
    definitions: Mapping[str, TaskDefinition],
    exception_codes: Mapping[type[BaseException], str],
) -> NoReturn:
    """Run attempts until the worker closes the channel or an attempt was stopped; after `prepare_process`, in the main thread."""
    channel = BlockingChannel(sock, messages=ToTaskProcess)
    TaskProgram(channel, definitions=definitions, invoker=Invoker(exception_codes)).run()
    leave(0)


class TaskProgram:
    """The main loop. `_running` is the last attempt that was ordered."""

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
        """Serve until an attempt was stopped, or told to leave; the end of the channel ends the process."""
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
            self._report(running.order, ended)
            if running.stopped is not None:
                return
            del running, ended  # an idle process must not keep the last result alive

    def _run(self, running: RunningAttempt) -> Ended:
        order = running.order
        definition = self._definitions.get(order.name)
        assert definition is not None, f"worker and task process disagree on {order.name!r}"
        context = running.context()
        try:
            running.is_interruptible = True
            running.raise_if_stopped()
            return contextvars.copy_context().run(self._call, definition, running, context)
        except BaseException as exception:  # noqa: BLE001 - a stop that comes between two steps of our own
            return self._invoker.ended_by(definition, exception)
        finally:
            running.is_interruptible = False

    def _call(self, definition: TaskDefinition, running: RunningAttempt, context: Context) -> Ended:
        try:
            with context.entered():
                match self._invoker.call(definition, running.order.args, context):
                    case (Failed() | Declined()) as refused:
                        return refused
                    case call if definition.is_async:
                        return self._invoker.returned(definition, asyncio.run(running.awaited(call)))
                    case call:
                        with UserCode():
                            value = call()
                        return self._invoker.returned(definition, value)
        except BaseException as exception:  # noqa: BLE001 - whatever user code raises ends its attempt, and nothing else
            running.is_interruptible = False
            return self._invoker.ended_by(definition, exception)

    def _report(self, order: Run, ended: Ended) -> None:
        match ended:
            case Succeeded(result):
                message: Returned | Suspended | Raised | NotUnderstood = Returned(
                    order.claim_id, result.decode()
                )
            case ended_as.Suspended():
                message = Suspended(order.claim_id)
            case Failed(error, reasons):
                message = Raised(order.claim_id, error.decode(), reasons)
            case Declined(Failed(error, reasons), unknown, missing):
                message = NotUnderstood(order.claim_id, error.decode(), reasons, unknown, missing)
            case _:
                raise AssertionError(ended)
        try:
            self._channel.send(message)
        except FrameTooLarge as problem:
            definition = self._definitions[order.name]
            failed = self._invoker.raised(definition, problem)
            self._channel.send(Raised(order.claim_id, failed.error.decode(), failed.reasons))

    def _hear(self, message: ToTaskProcess) -> None:
        """In the listening thread."""
        match message:
            case Run():
                # Set here, not where it is taken: a cancel may follow before the main thread looks.
                definition = self._definitions.get(message.name)
                self._running = RunningAttempt(message, self._channel, definition=definition)
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
                        running.tell_where()  # it is not woken: the worker kills this process in a moment
                    else:
                        self._wake(running)

    def _wake(self, running: RunningAttempt) -> None:
        if not running.cancel():
            signal.pthread_kill(self._main, signal.SIGTERM)

    def _interrupted(self, number: int, frame: object) -> None:
        """In the main thread, between two of its instructions."""
        del number, frame
        if self._running is not None:
            self._running.raise_if_stopped()


class RunningAttempt(CodeSide):
    """The attempt whose code runs: what its Context talks to, and how it is stopped."""

    def __init__(self, order: Run, channel: BlockingChannel, *, definition: TaskDefinition | None) -> None:
        self.order = order
        self._definition = definition
        self._requests: dict[int, Future[Answer]] = {}
        self.stopped: StopReason | None = None
        self.is_interruptible = False
        self._channel = channel
        self._loop: asyncio.AbstractEventLoop | None = None
        self._coroutine: asyncio.Task[Any] | None = None
        self._speaking = threading.Lock()
        self._unsent: Progress | None = None
        self._is_promised = False
        self._sent_at = 0.0

    def context(self) -> Context:
        """What the code may know of its attempt."""
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
            backend=self,
            work=PartialWork.from_json(order.checkpoint),
        )

    def stop_reason(self) -> StopReason | None:
        """Why the code should stop, if it should."""
        return self.stopped

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Pass it on, at most five times a second; the last word is always passed on, soon."""
        progress = progress_json(stage=stage, fraction=fraction, message=message)
        with self._speaking:
            self._unsent = Progress(self.order.claim_id, progress.decode())
            wait_s = self._sent_at + PROGRESS_EVERY_S - time.monotonic()
            is_promised, self._is_promised = self._is_promised, wait_s > 0
        if wait_s <= 0:
            self.flush()
        elif not is_promised:
            later = threading.Timer(wait_s, self.flush)
            later.daemon = True
            later.start()

    def flush(self) -> None:
        """Send progress that was held back."""
        with self._speaking:
            unsent, self._unsent, self._is_promised = self._unsent, None, False
            if unsent is None:
                return
            self._sent_at = time.monotonic()
            with contextlib.suppress(ChannelClosed):
                self._channel.send(unsent)

    @property
    def lease(self) -> Lease:
        """(task id, claim_id)."""
        return self.order.task_id, self.order.claim_id

    @property
    def codec(self) -> CallCodec:
        """Of the task function."""
        assert self._definition is not None
        return self._definition.codec

    def ask(self, request: Request) -> Answer:
        """Send it, and wait for the answer; a stop interrupts that in the main thread."""
        with self._asked(request) as future:
            return future.result()

    async def aask(self, request: Request) -> Answer:
        """The twin of `ask`."""
        with self._asked(request) as future:
            return await asyncio.wrap_future(future)

    @contextlib.contextmanager
    def _asked(self, request: Request) -> Iterator[Future[Answer]]:
        future = self._requests[request.ticket] = Future[Answer]()
        try:
            self.flush()  # what was said before belongs to what is asked now
            self._channel.send(request)
            yield future
        except ChannelClosed:
            raise TaskStopped("shutting_down", task_id=self.order.task_id) from None
        finally:
            del self._requests[request.ticket]

    def answered(self, answer: Answer) -> None:
        """The worker has answered. From the listening thread."""
        future = self._requests.get(answer.ticket)
        if future is not None and future.set_running_or_notify_cancel():
            future.set_result(answer)

    async def awaited(self, call: Call) -> Any:
        """Run async code so that `cancel` reaches it."""
        self._coroutine, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self.raise_if_stopped()
        try:
            with UserCode():
                return await call()
        finally:
            self._loop = None

    def cancel(self) -> bool:
        """Cancel async code; False if none runs. From the listening thread."""
        loop, coroutine = self._loop, self._coroutine
        if loop is None or coroutine is None:
            return False
        with contextlib.suppress(RuntimeError):  # the loop was closed this very moment
            loop.call_soon_threadsafe(coroutine.cancel)
        return True

    def tell_where(self) -> None:
        """Write to the log what async code waits for, which no stack of a thread shows. From the listening thread."""
        if self._coroutine is not None:
            _log.error("stalled task_id=%s\n%s", self.order.task_id, coroutine_stack(self._coroutine))

    def raise_if_stopped(self) -> None:
        """Raise into the code, once."""
        if self.stopped is not None and self.is_interruptible:
            self.is_interruptible = False
            raise TaskStopped(self.stopped, task_id=self.order.task_id)
