"""The methods of a Context that ask a person and wait for the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, overload

from everbeat.domain.settings.units import Duration
from everbeat.domain.task.step_runner import StepMethods

T = TypeVar("T")


class AskMethods(StepMethods):
    """The methods of a Context that ask a person and wait for the answer."""

    __slots__ = ()

    @overload
    def ask(
        self,
        question: str,
        /,
        *,
        type: type[T],
        choices: Sequence[Any] | None = None,
        note: str | None = None,
        timeout: Duration | None = None,
    ) -> T: ...
    @overload
    def ask(
        self,
        question: str,
        /,
        *,
        type: Any = Any,
        choices: Sequence[Any] | None = None,
        note: str | None = None,
        timeout: Duration | None = None,
    ) -> Any: ...
    def ask(
        self,
        question: str,
        /,
        *,
        type: Any = Any,  # noqa: A002
        choices: Sequence[Any] | None = None,
        note: str | None = None,
        timeout: Duration | None = None,
    ) -> Any:
        """Ask a person, wait for the answer, and return it. Each question is asked only once across all attempts.

        The wait occupies no worker slot. `everbeat inbox` and `App.inbox` list the question, and `everbeat inbox answer` and `App.answer`
        answer it. The answer must fit `type` and be one of the `choices`, if any. `note` is shown with the question. `timeout` is measured
        from the start of the first wait.

        Raises EventTimeout if the timeout expires, PayloadError if an argument is invalid, and TaskSuspended to release the slot. Raises
        TaskStopped if the task should stop, BlockingCallInLoop on an event loop, and DatabaseError if the database fails.

        is_allowed = ctx.ask("Refund 300 EUR to Ann?", type=bool, timeout="2d")
        """
        return self._steps.run(
            "ask", self._steps.ask(question, type, choices=choices, note=note, timeout=timeout)
        )

    @overload
    async def aask(
        self,
        question: str,
        /,
        *,
        type: type[T],
        choices: Sequence[Any] | None = None,
        note: str | None = None,
        timeout: Duration | None = None,
    ) -> T: ...
    @overload
    async def aask(
        self,
        question: str,
        /,
        *,
        type: Any = Any,
        choices: Sequence[Any] | None = None,
        note: str | None = None,
        timeout: Duration | None = None,
    ) -> Any: ...
    async def aask(
        self,
        question: str,
        /,
        *,
        type: Any = Any,  # noqa: A002
        choices: Sequence[Any] | None = None,
        note: str | None = None,
        timeout: Duration | None = None,
    ) -> Any:
        """Async version of `ask` that does not block the running event loop."""
        plan = self._steps.ask(question, type, choices=choices, note=note, timeout=timeout)
        return await self._steps.arun(plan)
