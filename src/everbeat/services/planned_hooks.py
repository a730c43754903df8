"""Recovery hooks between the statements of a plan: called by whoever runs the plan, a thread or an event loop.

What lives here: both ways. What may not: the calling itself (`hooks`).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar
from uuid import UUID

from everbeat.domain.hooks import (
    CALLS_AT_ONCE,
    HookReply,
    HookScopes,
    HookSet,
    NoAnswer,
    RecoveryContext,
    SweepSummary,
)
from everbeat.runtime.events import EventBus, HookFailed
from everbeat.services.hooks import LocalHooks
from everbeat.store.plan import Errand, done

T = TypeVar("T")
Subject = tuple[UUID | None, str | None]
"""The task a call is about, its id and name; nothing for the summary of a pass."""
_BEYOND_S: Final = 1.0


class PlannedHooks:
    """For the coroutine of a plan, which waits for statements and errands only."""

    def __init__(self, hooks: HookSet, *, timeout_s: float, events: EventBus) -> None:
        self._timeout_s = timeout_s
        self._events = events
        self._local = LocalHooks(hooks, timeout_s=timeout_s, events=events)

    @property
    def scopes(self) -> HookScopes:
        """Which hooks there are."""
        return self._local.scopes

    async def decide(self, contexts: Sequence[RecoveryContext]) -> Mapping[UUID, HookReply]:
        """The answers by task id; one is missing where there is no hook to ask."""

        def unanswered(problem: str) -> Mapping[UUID, HookReply]:
            return {context.task_id: NoAnswer(problem) for context in contexts}

        return await self._called(
            "on_recovery",
            lambda: self._local.decide(contexts),
            subjects=[(context.task_id, context.name) for context in contexts],
            otherwise=unanswered,
        )

    async def interrupted(self, contexts: Sequence[RecoveryContext]) -> None:
        """Tells of tasks that were taken from their holders."""
        await self._called(
            "on_interrupted",
            lambda: self._local.interrupted(contexts),
            subjects=[(context.task_id, context.name) for context in contexts],
            otherwise=_nothing,
        )

    async def recovered(self, summary: SweepSummary) -> None:
        """Tells of a pass that recovered something."""
        await self._called(
            "on_recovered",
            lambda: self._local.recovered(summary),
            subjects=[(None, None)],
            otherwise=_nothing,
        )

    async def _called(
        self,
        hook: str,
        call: Callable[[], Coroutine[Any, Any, T]],
        *,
        subjects: Sequence[Subject],
        otherwise: Callable[[str], T],
    ) -> T:
        errand = Errand(lambda: self._from_a_thread(hook, call, subjects=subjects, otherwise=otherwise), call)
        return await done(errand)

    def _from_a_thread(
        self,
        hook: str,
        call: Callable[[], Coroutine[Any, Any, T]],
        *,
        subjects: Sequence[Subject],
        otherwise: Callable[[str], T],
    ) -> T:
        """On a loop in a thread of its own: async code that blocks it for ever is left behind there."""
        future: Future[T] = Future()

        async def answered() -> None:
            future.set_result(await call())  # not what asyncio.run gives: its end waits for every task

        threading.Thread(target=lambda: asyncio.run(answered()), name="everbeat-hooks", daemon=True).start()
        limit_s = self._timeout_s * -(-len(subjects) // CALLS_AT_ONCE) + _BEYOND_S
        try:
            return future.result(limit_s)
        except TimeoutError:
            problem = f"blocked its event loop for {limit_s:g} s; nothing else of this pass was asked"
            for task_id, name in subjects:
                self._events.emit(
                    HookFailed(hook=hook, function="", task_id=task_id, task_name=name, problem=problem)
                )
            return otherwise(problem)


def _nothing(_: str) -> None:
    """What becomes of news that nobody heard."""
