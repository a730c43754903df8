"""A task function that is called directly: its Context works, and nothing of it reaches a task's row.

What lives here: the backend of such a Context. What may not: rows, workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar, assert_never, final

from everbeat.domain.backend import (
    LoadSteps,
    RecordStep,
    SendChild,
    Sleep,
    StepAnswer,
    StepQuestion,
    WaitForEvent,
)
from everbeat.domain.checkpoint import Checkpoint
from everbeat.domain.commit import Completion, TaskCommit
from everbeat.domain.context import OutsideWorker, StopReason
from everbeat.runtime.blocking import refuse_in_loop
from everbeat.store.foreign import Do, Plan, Transaction

T = TypeVar("T")


@final
class Detached:
    """Progress goes nowhere, nothing stops the code, checkpoints live as long as the call; a commit is the user's rows only.

    Steps are calls, a sleep is slept in place; there are no signals and no children.
    """

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Nobody looks."""
        del stage, fraction, message

    def stop_reason(self) -> StopReason | None:
        """Nobody asks it to stop."""
        return None

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """As in a worker, so that a test finds the mistake."""
        refuse_in_loop(name, instead=instead)

    def store(self, checkpoint: Checkpoint) -> None:
        """The Context itself remembers it."""
        del checkpoint

    async def astore(self, checkpoint: Checkpoint) -> None:
        """The Context itself remembers it."""
        del checkpoint

    def commit(self, connection: object) -> TaskCommit:
        """The user's transaction, without a task."""
        return Transaction(connection, _RowsOnly(), line=self)

    def ask_step(self, question: StepQuestion) -> StepAnswer:
        """Nothing is recorded. Raises OutsideWorker for a wait and a child."""
        if isinstance(question, Sleep):
            time.sleep(question.duration_ms / 1_000)
        return _answered(question)

    async def aask_step(self, question: StepQuestion) -> StepAnswer:
        """The twin of `ask_step`."""
        if isinstance(question, Sleep):
            await asyncio.sleep(question.duration_ms / 1_000)
        return _answered(question)

    async def in_thread(self, call: Callable[[], T]) -> T:
        """As in a worker."""
        return await asyncio.to_thread(call)

    def ask(self, request: Any) -> Any:
        """There is nobody to ask."""
        raise AssertionError(request)

    async def aask(self, request: Any) -> Any:
        """There is nobody to ask."""
        raise AssertionError(request)


def _answered(question: StepQuestion) -> StepAnswer:
    match question:
        case LoadSteps() | RecordStep() | Sleep():
            return StepAnswer()
        case WaitForEvent():
            raise OutsideWorker("Context.wait_event")
        case SendChild():
            raise OutsideWorker("Context.send")
        case _:
            assert_never(question)


class _RowsOnly:
    def begin(self) -> Plan[Completion]:
        yield Do("begin")
        return Completion()

    def end(self, error: BaseException | None) -> Plan[None]:
        if error is not None:
            yield Do("rollback")
            return
        try:
            yield Do("flush")
            yield Do("commit")
        except BaseException:
            yield Do("rollback")
            raise
