"""What a running task may know about itself and say to its worker.

What lives here: `Context`, the errors of using it, and what it needs from a worker. It lies in this room
because both workers make it and clients write it into signatures. What may not live here: how progress is
stored and how a cancel arrives.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, Literal, Protocol, TypeAlias, final
from uuid import UUID

from everbeat.errors import EverbeatError

StopReason: TypeAlias = Literal["cancelled", "lease_lost", "timed_out", "stalled", "shutting_down"]

_WHY: Final[dict[StopReason, str]] = {
    "cancelled": "somebody asked for it to be cancelled",
    "lease_lost": "its lease was lost, so another attempt may be running and this one can change nothing",
    "timed_out": "it ran longer than its timeout",
    "stalled": "it reported no progress for its stall_timeout",
    "shutting_down": "its worker is shutting down and hands it back",
}


class TaskStopped(BaseException):
    """Raised by `Context.check_cancelled` when the task should end; `reason` says why.

    Not an Exception, for the reason asyncio.CancelledError is none: an `except Exception` in the task must
    not swallow it.
    """

    def __init__(self, reason: StopReason, *, task_id: UUID | None = None) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason
        self.task_id = task_id

    def __str__(self) -> str:
        return f"Task {self.task_id} should stop: {_WHY[self.reason]}."


class OutsideTask(EverbeatError):
    """`Context.current()` was called where no task runs."""

    code = "OUTSIDE_TASK"

    def __init__(self) -> None:
        super().__init__(
            "No task runs here, so there is no current Context.",
            fix="call it inside a task; a thread that a task starts itself needs the Context passed to it, "
            "or contextvars.copy_context().run(...).",
        )


class ContextBackend(Protocol):
    """What a worker gives to a Context; called from the task's thread, so both must be safe there and must
    not block.
    """

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None: ...

    def stop_reason(self) -> StopReason | None: ...


@final
class _Detached:
    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        del stage, fraction, message

    def stop_reason(self) -> StopReason | None:
        return None


_current: ContextVar[Context] = ContextVar("everbeat_context")


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Context:
    """The attempt that is running: annotate a task's first parameter with it, or call `Context.current()`.

    `attempt` counts from 1. `fence` grows with every claim of the task: write `WHERE last_fence < fence`
    outside everbeat to refuse an old attempt. `deadline` is when the timeout ends, in UTC by the database's
    clock.
    """

    task_id: UUID
    name: str
    queue: str
    attempt: int
    fence: int
    claim_id: UUID
    worker_id: str
    deadline: datetime | None = None
    backend: ContextBackend = field(repr=False)

    @staticmethod
    def current() -> Context:
        """The Context of the task that runs here; raises OutsideTask elsewhere."""
        context = _current.get(None)
        if context is None:
            raise OutsideTask
        return context

    @staticmethod
    def current_or_none() -> Context | None:
        """The Context of the task that runs here, or None elsewhere."""
        return _current.get(None)

    @classmethod
    def detached(cls, *, task_id: UUID, name: str, queue: str) -> Context:
        """A Context of no attempt, for a task function that is called directly: progress goes nowhere,
        nothing stops it.
        """
        return cls(
            task_id=task_id,
            name=name,
            queue=queue,
            attempt=1,
            fence=0,
            claim_id=UUID(int=0),
            worker_id="",
            backend=_Detached(),
        )

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Makes this the current Context of the block; a worker runs the task's code inside it."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def progress(self, stage: str, fraction: float | None = None, message: str = "") -> None:
        """Says how far the task is, which also counts as a sign of life; fractions are cut to 0..1, NaN
        means unknown.

        ctx.progress("resize", n / total, f"frame {n}")
        """
        share = None if fraction is None or math.isnan(fraction) else min(max(float(fraction), 0.0), 1.0)
        self.backend.report_progress(stage=str(stage), fraction=share, message=str(message))

    @property
    def cancelled(self) -> bool:
        """Whether the task should stop: cancelled, timed out, stalled, its lease lost, or its worker
        shutting down.
        """
        return self.backend.stop_reason() is not None

    def check_cancelled(self) -> None:
        """Raises TaskStopped when the task should stop; call it now and then in threads, which nobody can
        interrupt.
        """
        reason = self.backend.stop_reason()
        if reason is not None:
            raise TaskStopped(reason, task_id=self.task_id)
