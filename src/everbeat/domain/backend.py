"""What a Context needs from whoever runs the code.

What lives here: that protocol, and the questions about what is done for good. What may not: how they are answered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, TypeVar
from uuid import UUID

from msgspec import Struct

from everbeat.domain.checkpoint import Checkpoint
from everbeat.domain.commit import TaskCommit
from everbeat.domain.recorded import NewChild, Recorded, StepState
from everbeat.domain.stops import StopReason

T = TypeVar("T")


class Question(Struct, frozen=True, tag=True, array_like=True):
    """Base of what code asks about its steps."""


class LoadSteps(Question, frozen=True):
    """What have earlier attempts recorded, behind this (kind, name)?"""

    after: tuple[str, str]


class RecordStep(Question, frozen=True):
    """Record what a step returned (JSON text)."""

    name: str
    result: str


class Sleep(Question, frozen=True):
    """Sleep for so long since the first time this was asked."""

    name: str
    duration_ms: int


class WaitForEvent(Question, frozen=True):
    """Give the next signal of this event. `name` is that of the wait; the timeout counts from the first time it was asked."""

    name: str
    event: str
    timeout_ms: int | None


class SendChild(Question, frozen=True):
    """Send this task, once under this name of the parent's."""

    name: str
    child: NewChild


StepQuestion: TypeAlias = LoadSteps | RecordStep | Sleep | WaitForEvent | SendChild


class StepAnswer(Struct, frozen=True, array_like=True):
    """What is known: the records of a page and where the next begins, or how a wait ended and with what (JSON text), or a child's id."""

    records: tuple[Recorded, ...] = ()
    next_after: tuple[str, str] | None = None
    state: StepState = "DONE"
    value: str | None = None
    child: UUID | None = None


class ContextBackend(Protocol):
    """`report_progress` and `stop_reason` are called from any thread and must not block."""

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None: ...

    def stop_reason(self) -> StopReason | None: ...

    def refuse_in_loop(self, name: str, *, instead: str) -> None:
        """Raises BlockingCallInLoop where an event loop runs in this thread."""
        ...

    def store(self, checkpoint: Checkpoint) -> None:
        """Returns when it is stored. Raises TaskStopped where that cannot be any more, a DatabaseError."""
        ...

    async def astore(self, checkpoint: Checkpoint) -> None: ...

    def commit(self, connection: object) -> TaskCommit: ...

    def ask_step(self, question: StepQuestion) -> StepAnswer:
        """Returns when it is answered. Raises TaskStopped, TaskSuspended, a DatabaseError."""
        ...

    async def aask_step(self, question: StepQuestion) -> StepAnswer: ...

    async def in_thread(self, call: Callable[[], T]) -> T:
        """Calls it in a thread, with the current context variables."""
        ...
