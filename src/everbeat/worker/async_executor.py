"""Async task functions on the worker's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from everbeat.domain.context import enter
from everbeat.domain.definition import RunIn
from everbeat.runtime.fork import UserCode
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.stacks import coroutine_stack
from everbeat.worker.attempt import Attempt, Declined, Ended, Failed, OnEnded
from everbeat.worker.invocation import Invoker

CLOSE_PATIENCE_S: Final = 0.5
"""How long code that swallows its cancellation may hold up the end of the worker."""


class AsyncExecutor:
    """Each attempt is an asyncio task that bears the name of its task function; `describe` tells which attempt it is."""

    mode: RunIn = "async"

    def __init__(
        self,
        *,
        slots: int,
        invoker: Invoker,
        worker_id: Callable[[], str],
        on_ended: OnEnded,
        on_loop_ending: Callable[[], None] | None = None,
    ) -> None:
        self.slots = slots
        self._invoker = invoker
        self._worker_id = worker_id
        self._on_ended = on_ended
        self._nursery = Nursery(name="async tasks", on_loop_ending=on_loop_ending)
        self._running: dict[Attempt, asyncio.Task[None]] = {}

    @property
    def free(self) -> int:
        """Slots without running code."""
        return self.slots - len(self._running)

    @property
    def occupied(self) -> int:
        """Slots with running code."""
        return len(self._running)

    def prepare(self, wanted: int) -> None:
        """Nothing: a slot is ready when it is free."""
        del wanted

    def begin(self, attempt: Attempt) -> None:
        """Start its coroutine."""
        self._running[attempt] = self._nursery.lend(
            self._run(attempt), name=attempt.task.name, on_cancelled=partial(self._cancelled, attempt)
        )

    def stop(self, attempt: Attempt) -> None:
        """Cancel its coroutine."""
        if (task := self._running.get(attempt)) is not None:
            task.set_name(_full_name(attempt))
            task.cancel()

    def describe(self, task: asyncio.Task[Any]) -> str:
        """Whose code a task is; from any thread."""
        found = (attempt for attempt, running in list(self._running.items()) if running is task)
        return next(map(_full_name, found), task.get_name())

    def whereabouts(self, attempt: Attempt) -> str:
        """What its coroutine waits for."""
        task = self._running.get(attempt)
        return "" if task is None else coroutine_stack(task)

    async def close(self) -> None:
        """Cancel what is left; code that swallows that is left behind."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                await self._nursery.close()

    async def _run(self, attempt: Attempt) -> None:
        definition = attempt.definition
        context = attempt.context(worker_id=self._worker_id())
        enter(context)  # until this asyncio task ends, which has a context of its own
        try:
            call = self._invoker.call(definition, attempt.task.args, context)
            if isinstance(call, Failed | Declined):
                ended: Ended = call
            else:
                with UserCode():
                    value = await call()
                ended = self._invoker.returned(definition, value)
        except BaseException as exception:  # noqa: BLE001 - whatever user code raises ends its attempt, and nothing else
            ended = self._invoker.ended_by(definition, exception)
        self._over(attempt, ended)

    def _over(self, attempt: Attempt, ended: Ended) -> None:
        attempt.ended = ended
        self._nursery.give_back(self._running.pop(attempt))
        self._on_ended(attempt, ended)

    def _cancelled(self, attempt: Attempt, _: asyncio.Task[Any]) -> None:
        # A coroutine that is cancelled before its first step never ran, not even the handler above.
        if attempt in self._running:
            self._over(attempt, self._invoker.raised(attempt.definition, asyncio.CancelledError()))


def _full_name(attempt: Attempt) -> str:
    return f"{attempt.task.name} {attempt.id}"
