"""Call an app's recovery hooks in this process, with a time limit, and report each failure."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar
from uuid import UUID

from msgspec import Struct

from everbeat.domain.recovery.hooks import (
    CALLS_AT_ONCE,
    CallKind,
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
from everbeat.domain.settings.units import spelled_duration
from everbeat.errors.wording import safe_text
from everbeat.runtime.events import EventBus, HookFailed
from everbeat.runtime.fork import UserCode
from everbeat.runtime.task_scope import TaskScope
from everbeat.store.plan import Action, done

_MOST_STUCK: Final = 2 * CALLS_AT_ONCE


class _Problem(Exception):
    """Raised when a hook call returned no result."""


class _Failed(Struct, frozen=True):
    """The result of a hook call that failed. The failure has already been reported."""

    problem: str


class LocalHooks:
    """Calls the hooks of an app that is imported in this process.

    Async hooks run on `loop` if it is not None, otherwise on the caller's loop.
    """

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
        self._scope = TaskScope(name="hooks")
        self._stuck = 0
        self._lock = threading.Lock()

    @property
    def scopes(self) -> HookScopes:
        """Return which hooks the app has registered."""
        return self._hooks.scopes

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """Return the replies by task id. Tasks without a hook are left out."""
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
            problem = _invalid(found)
            self.report(hook.kind, hook.name, context, problem)
            return context.task_id, NoAnswer(problem)

        answers = await asyncio.gather(*(answer(context) for context in contexts))
        return dict(one for one in answers if one is not None)

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Call the tracers and the `on_interrupted` hook, if any, for each of these tasks, which recovery took from their workers."""
        if (tracing := self._hooks.tracing) is not None:
            found = [context._traced for context in contexts if context._traced is not None]
            # A tracer might hang, so it has the time limit of a hook.
            tracer = Hook(kind="tracing", function=tracing.recovered, is_async=False)
            await self._tried(tracer, found, None)
        hook = self._hooks.interrupted
        if hook is None:
            return
        turns = asyncio.Semaphore(CALLS_AT_ONCE)

        async def tell(context: RecoveryContext) -> None:
            async with turns:
                await self._tried(hook, context, context)

        await asyncio.gather(*(tell(context) for context in contexts))

    async def recovered(self, summary: SweepSummary) -> None:
        """Call the `on_recovered` hook, if any, with the summary of a recovery pass."""
        if self._hooks.recovered is not None:
            await self._tried(self._hooks.recovered, summary, None)

    async def _tried(self, hook: Hook, subject: object, task: RecoveryContext | None) -> object:
        try:
            return await self._called(hook, subject)
        except _Problem as error:
            problem = str(error)
        except Exception as error:  # noqa: BLE001 - user code can raise anything, and must not affect other tasks
            problem = f"raised {type(error).__name__}: {safe_text(error, limit=500)}"
        self.report(hook.kind, hook.name, task, problem)
        return _Failed(problem)

    async def _called(self, hook: Hook, subject: object) -> object:
        call = self._asynchronously if hook.is_async else self._in_a_thread
        done = call(hook, subject)
        finished, _ = await asyncio.wait({done}, timeout=self._timeout_s)
        if not finished:
            done.cancel()
            raise _Problem(f"did not answer within {spelled_duration(self._timeout_s)}")
        if done.cancelled():
            raise _Problem("was cancelled, by other code on its event loop or by the end of that loop")
        value, error = done.result()
        if isinstance(error, Exception):
            raise error
        if error is not None:
            raise _Problem(f"ended with {type(error).__name__}")
        return value

    def _asynchronously(self, hook: Hook, subject: object) -> asyncio.Future[_Ended]:
        # Use a separate task, which is abandoned if it does not finish after its cancellation.
        if self._loop is None or self._loop is asyncio.get_running_loop():
            return self._scope.start(_ended(hook.function, subject), name=f"hook {hook.name}")
        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(_ended(hook.function, subject), self._loop)
        )

    def _in_a_thread(self, hook: Hook, subject: object) -> asyncio.Future[_Ended]:
        # Do not use a thread pool: it would wait for a hook that never returns, and prevent the program from exiting.
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
            except BaseException as error:  # noqa: BLE001 - SystemExit too: it would silently end the thread
                ended = None, error
            with self._lock:
                self._stuck -= 1
            future.set_result(ended)

        threading.Thread(target=call, name=f"everbeat-hook {hook.name}", daemon=True).start()
        return asyncio.wrap_future(future)

    def report(self, kind: CallKind, function: str, task: RecoveryContext | None, problem: str) -> None:
        """Report that a hook call returned no result. If `task` is None, the call concerned a whole recovery pass."""
        self._events.emit(
            HookFailed(
                hook=kind,
                function=function,
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
    except Exception as error:  # noqa: BLE001 - the caller reports it
        return None, error


def _invalid(found: object) -> str:
    if inspect.isclass(found) and issubclass(found, Default | FailWithBackoff | Skip | Reschedule):
        return f"answered the class {found.__name__}; return {found.__name__}(...) instead"
    given = "nothing" if found is None else f"a value of type {type(found).__name__}"
    return f"answered {given}; return Default(), Reschedule(run_at=...), FailWithBackoff() or Skip()"


T = TypeVar("T")
_BEYOND_S: Final = 1.0


class PlannedHooks:
    """A variant of `LocalHooks` for plans, whose coroutines can await only statements and actions."""

    def __init__(self, hooks: HookSet, *, timeout_s: float, events: EventBus) -> None:
        self._timeout_s = timeout_s
        self._local = LocalHooks(hooks, timeout_s=timeout_s, events=events)

    @property
    def scopes(self) -> HookScopes:
        """Return which hooks the app has registered."""
        return self._local.scopes

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """Return the replies by task id. Tasks without a hook are left out."""
        found = await self._called("on_recovery", partial(self._local.decide, contexts), contexts)
        if isinstance(found, _Failed):
            return {context.task_id: NoAnswer(found.problem) for context in contexts}
        return found

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Call the `on_interrupted` hook, if any, for each of these tasks, which recovery took from their workers."""
        await self._called("on_interrupted", partial(self._local.interrupted, contexts), contexts)

    async def recovered(self, summary: SweepSummary) -> None:
        """Call the `on_recovered` hook, if any, with the summary of a recovery pass."""
        await self._called("on_recovered", partial(self._local.recovered, summary), [None])

    async def _called(
        self,
        kind: CallKind,
        call: Callable[[], Coroutine[Any, Any, T]],
        subjects: Sequence[RecoveryContext | None],
    ) -> T | _Failed:
        return await done(Action(lambda: self._in_a_thread(kind, call, subjects), call))

    def _in_a_thread(
        self,
        kind: CallKind,
        call: Callable[[], Coroutine[Any, Any, T]],
        subjects: Sequence[RecoveryContext | None],
    ) -> T | _Failed:
        """Run `call` on an event loop in a separate thread. Abandon the thread if the call exceeds its time limit."""
        future: Future[T] = Future()

        async def answered() -> None:
            future.set_result(
                await call()
            )  # do not wait for asyncio.run, which waits for every task before it returns

        threading.Thread(target=lambda: asyncio.run(answered()), name="everbeat-hooks", daemon=True).start()
        limit_s = self._timeout_s * -(-len(subjects) // CALLS_AT_ONCE) + _BEYOND_S
        try:
            return future.result(limit_s)
        except TimeoutError:
            problem = f"blocked its event loop for {limit_s:g} s; no other hooks were called in this pass"
            for task in subjects:
                self._local.report(kind, "", task, problem)
            return _Failed(problem)
