"""Executors inside the worker process: async task functions run on its event loop, sync functions in its threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Collection
from functools import partial
from queue import SimpleQueue
from typing import Any, Final

from everbeat.domain.task.context import ContextSource, enter, leave
from everbeat.domain.tracing.model import TracedAttempt
from everbeat.runtime.blocking import strand
from everbeat.runtime.fork import UserCode
from everbeat.runtime.main_loop import coroutine_stack, thread_stack
from everbeat.runtime.task_scope import TaskScope
from everbeat.worker.attempt import Attempt, AttemptEnd, CodeFailed, Declined
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.executors.executor import Invoker
from everbeat.worker.messages import AttemptEnded, SlotFreed
from everbeat.worker.traced_attempts import AttemptSpan, traced_attempt

CLOSE_PATIENCE_S: Final = 0.5
"""How long code that suppresses its cancellation can delay the worker's shutdown, in seconds."""


class _InProcessExecutor:
    """A base class for executors whose code runs in the worker process. Every free slot is ready at once."""

    def __init__(self, environment: WorkerEnvironment, *, slots: int) -> None:
        self.slots = slots
        self._invoker = Invoker(environment.plan.exception_codes, environment.plan.middleware)
        self._identity = environment.identity
        self._send = environment.send

    _running: Collection[Attempt]

    def _traced(self, attempt: Attempt) -> TracedAttempt:
        return traced_attempt(attempt, worker_id=self._identity.worker_id)

    @property
    def running(self) -> Collection[Attempt]:
        """Return the attempts in these slots."""
        return self._running

    @property
    def free(self) -> int:
        """Return the number of slots without running code."""
        return self.slots - len(self._running)

    @property
    def occupied(self) -> int:
        """Return the number of slots with running code."""
        return len(self._running)

    def prepare(self, wanted: int) -> None:
        """Do nothing, because every free slot is ready at once."""
        del wanted


class AsyncExecutor(_InProcessExecutor):
    """Runs each attempt as an asyncio task named after the task function."""

    def __init__(self, environment: WorkerEnvironment, *, slots: int) -> None:
        super().__init__(environment, slots=slots)
        self._on_cancelled = self._cancelled
        self._scope = TaskScope(name="async tasks", on_loop_ending=environment.plan.on_loop_ending)
        self._running: dict[Attempt, asyncio.Task[None] | None] = {}

    def begin(self, attempt: Attempt) -> None:
        """Start the attempt's coroutine. Since Python 3.12, the code runs at once, up to the point where it first waits.

        The code of an attempt that has been stopped does not run at once, so that it can be cancelled before.
        """
        self._running[attempt] = None
        try:
            task = self._scope.lend(
                self._run(attempt),
                name=attempt.task.name,
                on_cancelled=self._on_cancelled,
                at_once=attempt.stop is None,
            )
        except BaseException:
            del self._running[attempt]
            raise
        if attempt in self._running:
            self._running[attempt] = task

    def stop(self, attempt: Attempt) -> None:
        """Cancel the attempt's coroutine."""
        if (task := self._running.get(attempt)) is not None:
            task.set_name(_full_name(attempt))
            task.cancel()

    def describe(self, task: asyncio.Task[Any]) -> str:
        """Return the function name and task id of the attempt that an asyncio task is running. Safe to call from any thread."""
        name, beginning = task.get_name(), None
        for attempt, running in list(self._running.items()):
            if running is task:
                return _full_name(attempt)
            if running is None and attempt.task.name == name:
                beginning = attempt  # in its first step, in which its task is not known yet
        return name if beginning is None else _full_name(beginning)

    def whereabouts(self, attempt: Attempt) -> str:
        """Return the stack of the attempt's coroutine, which shows where it is waiting."""
        task = self._running.get(attempt)
        return "" if task is None else coroutine_stack(task)

    async def close(self) -> None:
        """Cancel all running code. Code that suppresses the cancellation is left running."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._scope.close()

    async def _run(self, attempt: Attempt) -> None:
        definition = attempt.definition
        context = ContextSource(partial(attempt.context, worker_id=self._identity.worker_id), log=attempt.log)
        task = self._running[
            attempt
        ]  # known, unless this is the first step of an eager task; then the search is fast
        context.begin(strand() if task is None else id(task))
        enter(context)  # no reset is needed: this asyncio task has its own context
        tracing = self._invoker.middleware.tracing
        span = None if tracing is None else AttemptSpan(tracing, self._traced(attempt))
        if span is not None:
            attempt.trace_ids = span.ids
        try:
            call = self._invoker.call(definition, attempt.task.args, context)
            if isinstance(call, CodeFailed | Declined):
                ended: AttemptEnd = call
            else:
                with UserCode():
                    value = await call()
                ended = self._invoker.returned(definition, value)
        except BaseException as exception:  # noqa: BLE001 - any exception from user code ends its attempt, and nothing else
            ended = self._invoker.ended_by(definition, exception)
        ended = self._invoker.judged(definition, context, ended)
        if span is not None:
            span.close(ended, stopped=attempt.stopped)
        leave()  # what the worker starts from here on does not belong to the attempt, and its log lines do not either
        self._over(attempt, ended)

    def _over(self, attempt: Attempt, ended: AttemptEnd) -> None:
        attempt.ended = ended
        if (task := self._running.pop(attempt)) is not None:
            self._scope.give_back(task)
        self._send(AttemptEnded(attempt, ended))

    def _cancelled(self, task: asyncio.Task[Any]) -> None:
        # A coroutine that is cancelled before its first step never runs, not even the handler above.
        attempt = next((attempt for attempt, running in self._running.items() if running is task), None)
        if attempt is not None:
            self._over(attempt, self._invoker.raised(attempt.definition, asyncio.CancelledError()))


def _full_name(attempt: Attempt) -> str:
    return f"{attempt.task.name} {attempt.id}"


class ThreadExecutor(_InProcessExecutor):
    """Runs attempts in threads, which are started on demand, at most one per slot, and reused."""

    def __init__(self, environment: WorkerEnvironment, *, slots: int) -> None:
        super().__init__(environment, slots=slots)
        self._waiting: SimpleQueue[Attempt | None] = SimpleQueue()
        self._running: set[Attempt] = set()
        self._thread_of: dict[Attempt, int] = {}
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Return the function name and task id of each attempt that is running in a thread. Safe to call from any thread."""
        return tuple(f"{attempt.task.name} {attempt.id}" for attempt in tuple(self._running))

    def begin(self, attempt: Attempt) -> None:
        """Run the attempt in a thread. Raises RuntimeError if the system refuses another thread."""
        self._loop = asyncio.get_running_loop()
        if self._threads <= len(self._running):
            name = f"everbeat-task-{self._threads + 1}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._threads += 1
        self._running.add(attempt)
        self._waiting.put(attempt)

    def stop(self, attempt: Attempt) -> None:
        """Do nothing, because a thread cannot be stopped. The code can check for the stop through its Context."""
        del attempt

    def whereabouts(self, attempt: Attempt) -> str:
        """Return the stack of the attempt's thread."""
        return thread_stack(self._thread_of.get(attempt))

    async def close(self) -> None:
        """Let idle threads exit. Busy threads keep running until the process exits."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _serve(self) -> None:
        while (attempt := self._waiting.get()) is not None:
            self._thread_of[attempt] = threading.get_ident()
            context = ContextSource(
                partial(attempt.context, worker_id=self._identity.worker_id), log=attempt.log
            )
            traced = None if self._invoker.middleware.tracing is None else self._traced(attempt)
            ended = self._invoker.run(
                attempt.definition, attempt.task.args, context, traced=traced, backend=attempt
            )
            attempt.ended = ended
            self._tell(attempt, ended)
            del attempt, context, ended, traced  # an idle thread must not keep the last result alive

    def _tell(self, attempt: Attempt, ended: AttemptEnd) -> None:
        # The loop is closed if the worker has shut down without waiting for this code.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done, attempt, ended)

    def _done(self, attempt: Attempt, ended: AttemptEnd) -> None:
        self._running.discard(attempt)
        self._thread_of.pop(attempt, None)
        self._send(AttemptEnded(attempt, ended))
        self._send(SlotFreed("thread"))
