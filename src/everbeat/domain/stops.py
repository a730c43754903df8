"""How code that runs is told to end: stopped for a reason, suspended until later, or called where no task runs.

What lives here: these exceptions. What may not: who raises them, and what becomes of the attempt.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias
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


class TaskSuspended(BaseException):
    """Raised by `Context.sleep` and `Context.wait_event` to give the task's slot back; the task runs again when it is time.

    Let it pass: code that swallows it goes on, and its attempt ends as the code does.
    """

    def __init__(self, *, task_id: UUID | None = None) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return f"Task {self.task_id} gives its slot back, and runs again when it is time."


def is_suspension(exception: BaseException) -> bool:
    """Whether nothing but a suspension ended the code, also out of a group of its parts.

    It looks at the class alone: the one of a user may answer `isinstance` with an exception of any kind.
    """
    pending = [exception]
    while pending:
        each = pending.pop()
        if issubclass(type(each), BaseExceptionGroup):
            pending.extend(BaseExceptionGroup.exceptions.__get__(each))
        elif not issubclass(type(each), TaskSuspended):
            return False
    return True


class OutsideTask(EverbeatError):
    """`Context.current()` was called where no task runs."""

    code = "OUTSIDE_TASK"

    def __init__(self) -> None:
        super().__init__(
            "No task runs here, so there is no current Context.",
            fix="call it inside a task; a thread that a task starts itself needs the Context passed to it, "
            "or contextvars.copy_context().run(...).",
        )


class OutsideWorker(EverbeatError):
    """A function that was called directly asked for what only a task that a worker runs can have."""

    code = "OUTSIDE_WORKER"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs a task that a worker runs, and this function was called directly.",
            fix="send the task and let a worker run it; in a test, call the parts that need no signals and no children.",
        )
