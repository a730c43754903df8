"""Calls the recovery hooks of an app in this process: with a time limit, one task at a time each, and reported when they fail.

What lives here: the calling. What may not: what follows from an answer, and asking another process (`worker.hook_line`).
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.duration import spelled
from everbeat.domain.hooks import (
    CALLS_AT_ONCE,
    Default,
    FailWithBackoff,
    Hook,
    HookReply,
    HookScopes,
    HookSet,
    NoAnswer,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.domain.stored_text import safe_text
from everbeat.runtime.events import EventBus, HookFailed
from everbeat.runtime.fork import UserCode
from everbeat.runtime.nursery import Nursery

_MOST_STUCK: Final = 2 * CALLS_AT_ONCE


class _Problem(Exception):
    """What is wrong with one call."""


class _Failed(Struct, frozen=True):
    """A call without an answer, which was told."""

    problem: str


class LocalHooks:
    """The hooks of an app whose functions are in this process. `loop`: where async ones run, if not where they are called."""

    def __init__(
        self,
        hooks: HookSet,
        *,
        timeout_s: float,
        events: EventBus,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._hooks = hooks
        self._timeout_s = timeout_s
        self._events = events
        self._loop = loop
        self._nursery = Nursery(name="hooks")
        self._stuck = 0
        self._lock = threading.Lock()

    @property
    def scopes(self) -> HookScopes:
        """Which hooks there are."""
        return self._hooks.scopes

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """The answers by task id; one is missing where there is no hook to ask."""
        turns = asyncio.Semaphore(CALLS_AT_ONCE)

        async def answer(context: RecoveryContext) -> tuple[UUID, HookReply] | None:
            hook = self._hooks.for_task(context.name)
            if hook is None:
                return None
            async with turns:
                found = await self._tried(hook, context, context)
            if isinstance(found, Default | Reschedule | FailWithBackoff | Skip):
                return context.task_id, found
            if isinstance(found, _Failed):
                return context.task_id, NoAnswer(found.problem)
            problem = _nonsense(found)
            self._tell(hook, context, problem)
            return context.task_id, NoAnswer(problem)

        answers = await asyncio.gather(*(answer(context) for context in contexts))
        return dict(one for one in answers if one is not None)

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Tells of tasks that were taken from their holders."""
        hook = self._hooks.interrupted
        if hook is None:
            return
        turns = asyncio.Semaphore(CALLS_AT_ONCE)

        async def tell(context: RecoveryContext) -> None:
            async with turns:
                await self._tried(hook, context, context)

        await asyncio.gather(*(tell(context) for context in contexts))

    async def recovered(self, summary: SweepSummary) -> None:
        """Tells of a pass that recovered something."""
        if self._hooks.recovered is not None:
            await self._tried(self._hooks.recovered, summary, None)

    async def _tried(
        self, hook: Hook, subject: RecoveryContext | SweepSummary, task: RecoveryContext | None
    ) -> object:
        try:
            return await self._called(hook, subject)
        except _Problem as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - user code raises anything, and nobody else may suffer from it
            problem = f"raised {type(error).__name__}: {safe_text(error, limit=500)}"
        self._tell(hook, task, problem)
        return _Failed(problem)

    async def _called(self, hook: Hook, subject: object) -> object:
        call = self._asynchronously if hook.is_async else self._in_a_thread
        done = call(hook, subject)
        finished, _ = await asyncio.wait({done}, timeout=self._timeout_s)
        if not finished:
            done.cancel()
            raise _Problem(f"did not answer within {spelled(self._timeout_s)}")
        if done.cancelled():
            raise _Problem("was cancelled, by other code on its event loop or by the end of that loop")
        value, error = done.result()
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise _Problem(f"ended with {type(error).__name__}")
        return value

    def _asynchronously(self, hook: Hook, subject: object) -> asyncio.Future[_Ended]:
        # A task of its own, which is left behind when it does not even end by being cancelled.
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return self._nursery.start(_ended(hook.function, subject), name=f"hook {hook.name}")
        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_ended(hook.function, subject), self._loop)
        )

    def _in_a_thread(self, hook: Hook, subject: object) -> asyncio.Future[_Ended]:
        # Not a pool: one that waits for a hook that never returns would keep the program from ending.
        with self._lock:
            if self._stuck >= _MOST_STUCK:
                raise _Problem(f"was not called, because {_MOST_STUCK} calls of hooks have not returned yet")
            self._stuck += 1
        future: Future[_Ended] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            ended: _Ended
            try:
                with UserCode():
                    ended = hook.function(subject), None
            except BaseException as error:  # noqa: BLE001 - SystemExit too: it would end the thread in silence
                ended = None, error
            with self._lock:
                self._stuck -= 1
            future.set_result(ended)

        threading.Thread(target=call, name=f"everbeat-hook {hook.name}", daemon=True).start()
        return asyncio.wrap_future(future)

    def _tell(self, hook: Hook, task: RecoveryContext | None, problem: str) -> None:
        self._events.emit(
            HookFailed(
                hook=hook.kind,
                function=hook.name,
                task_id=None if task is None else task.task_id,
                task_name=None if task is None else task.name,
                problem=problem,
            )
        )


_Ended = tuple[object, BaseException | None]


async def _ended(function: Callable[[Any], Awaitable[object]], subject: object) -> _Ended:
    try:
        with UserCode():
            return await function(subject), None
    except Exception as error:  # noqa: BLE001 - told by whoever called
        return None, error


def _nonsense(found: object) -> str:
    if inspect.isclass(found) and issubclass(found, Default | FailWithBackoff | Skip | Reschedule):
        return f"answered the class {found.__name__}; return {found.__name__}(...) instead"
    given = "nothing" if found is None else f"a value of type {type(found).__name__}"
    return f"answered {given}; return Default(), Reschedule(run_at=...), FailWithBackoff() or Skip()"
