"""Sync task functions in threads of the worker process.

A thread cannot be ended from outside: code that was given up keeps its slot until it ends by itself, and daemon threads
keep no process alive. The standard pool has neither property, hence threads of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue

from everbeat.domain.definition import RunIn
from everbeat.runtime.stacks import thread_stack
from everbeat.worker.attempt import Attempt, Ended, OnEnded
from everbeat.worker.invocation import Invoker


class ThreadExecutor:
    """Threads are started when needed, one for a slot at most, and reused."""

    mode: RunIn = "thread"

    def __init__(
        self,
        *,
        slots: int,
        invoker: Invoker,
        worker_id: Callable[[], str],
        on_ended: OnEnded,
        on_free: Callable[[], None],
    ) -> None:
        self.slots = slots
        self._invoker = invoker
        self._worker_id = worker_id
        self._on_ended = on_ended
        self._on_free = on_free
        self._waiting: SimpleQueue[Attempt | None] = SimpleQueue()
        self._running: set[Attempt] = set()
        self._thread_of: dict[Attempt, int] = {}
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def free(self) -> int:
        """Slots without running code."""
        return self.slots - len(self._running)

    @property
    def occupied(self) -> int:
        """Slots with running code."""
        return len(self._running)

    @property
    def names(self) -> tuple[str, ...]:
        """What runs in the threads: task function and id; from any thread."""
        return tuple(f"{attempt.task.name} {attempt.id}" for attempt in tuple(self._running))

    def prepare(self, wanted: int) -> None:
        """Nothing: a thread is started in no time."""
        del wanted

    def begin(self, attempt: Attempt) -> None:
        """Hand it to a thread; raises RuntimeError when the system gives no more of them."""
        self._loop = asyncio.get_running_loop()
        if self._threads <= len(self._running):
            name = f"everbeat-task-{self._threads + 1}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()
            self._threads += 1
        self._running.add(attempt)
        self._waiting.put(attempt)

    def stop(self, attempt: Attempt) -> None:
        """Nothing more than its Context says: the code asks, or goes on."""
        del attempt

    def whereabouts(self, attempt: Attempt) -> str:
        """The stack of its thread."""
        return thread_stack(self._thread_of.get(attempt))

    async def close(self) -> None:
        """Let idle threads end; busy ones end with the process."""
        for _ in range(self._threads):
            self._waiting.put(None)

    def _serve(self) -> None:
        while (attempt := self._waiting.get()) is not None:
            self._thread_of[attempt] = threading.get_ident()
            context = attempt.context(worker_id=self._worker_id())
            ended = self._invoker.run(attempt.definition, attempt.task.args, context)
            attempt.ended = ended
            self._tell(attempt, ended)
            del attempt, context, ended  # an idle thread must not keep the last result alive

    def _tell(self, attempt: Attempt, ended: Ended) -> None:
        # The loop is closed when the worker has left without waiting for this code.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._done, attempt, ended)

    def _done(self, attempt: Attempt, ended: Ended) -> None:
        self._running.discard(attempt)
        self._thread_of.pop(attempt, None)
        self._on_ended(attempt, ended)
        self._on_free()
