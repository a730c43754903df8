"""How a task ends: a value, or an error with a code.

What lives here: the outcome types, the error that user code raises, the error a waiting caller gets, and
the built-in codes. What may not: turning exceptions into errors or into JSON (`failure`), retry rules
(`retry`).
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeAlias, TypeVar
from uuid import UUID

import msgspec

from everbeat.errors import EverbeatError

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

UNHANDLED_EXCEPTION: Final = "UNHANDLED_EXCEPTION"
"""The function raised, and neither the exception nor the task's options gave a code."""
WORKER_CRASHED: Final = "WORKER_CRASHED"
"""The process that ran the task died, or its lease was given up."""
WORKER_STOPPED: Final = "WORKER_STOPPED"
"""The worker was told to stop, and the code did not end within the grace."""
TASK_TIMEOUT: Final = "TASK_TIMEOUT"
"""The attempt ran longer than the task's timeout."""
TASK_CANCELLED: Final = "TASK_CANCELLED"
"""Somebody asked for the task to be cancelled."""
TASK_EXPIRED: Final = "TASK_EXPIRED"
"""The task did not start before its `good_until`."""
TASK_STALLED: Final = "TASK_STALLED"
"""The code lived on but reported no progress for its `stall_timeout`."""
RESULT_UNSERIALISABLE: Final = "RESULT_UNSERIALISABLE"
"""The function returned a value that its annotation or JSON cannot carry."""
RESULT_NOT_AVAILABLE: Final = "RESULT_NOT_AVAILABLE"
"""The task ended, but its result or error cannot be read."""
ARGUMENTS_INVALID: Final = "ARGUMENTS_INVALID"
"""The stored arguments do not fit the function's signature, which may have changed since they were sent."""
EVENT_TIMEOUT: Final = "EVENT_TIMEOUT"
"""The event that the task waited for did not come in time."""

BUILT_IN_CODES: Final = frozenset(
    {
        EVENT_TIMEOUT,
        UNHANDLED_EXCEPTION,
        WORKER_CRASHED,
        WORKER_STOPPED,
        TASK_TIMEOUT,
        TASK_CANCELLED,
        TASK_EXPIRED,
        TASK_STALLED,
        RESULT_UNSERIALISABLE,
        RESULT_NOT_AVAILABLE,
        ARGUMENTS_INVALID,
    }
)


class TaskError(Exception):
    """Why a task failed; raise it in a task to fail with your own code.

    `data` should be JSON-able. `type` and `traceback` are filled in when the error is stored: the qualified
    name of the exception class and the formatted traceback, both as text.

        raise TaskError("SMTP_DOWN", "mail.example.org refused the connection", {"port": 25})
    """

    def __init__(
        self,
        code: str,
        message: str = "",
        data: object = None,
        *,
        type: str = "",  # noqa: A002 - the name it has in the stored error
        traceback: str = "",
    ) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data: Any = data
        self.type = type
        self.traceback = traceback

    def __str__(self) -> str:
        return f"{shown_code(self)}: {self.message}" if self.message else shown_code(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TaskError):
            return NotImplemented
        return (self.code, self.message, self.data) == (other.code, other.message, other.data)

    def __hash__(self) -> int:
        return hash((self.code, self.message))


def shown_code(error: TaskError) -> str:
    """The code; where it is UNHANDLED_EXCEPTION, which says little, with the class of the exception."""
    shows_class = error.code == UNHANDLED_EXCEPTION and error.type
    return f"{error.code} ({error.type})" if shows_class else str(error.code)


class EventTimeout(TaskError):
    """The event that `Context.wait_event` waited for did not come within its timeout; a task that does not catch it fails."""

    def __init__(self, event: str, *, timeout_s: float) -> None:
        message = f"Event {event!r} did not come within {timeout_s:g} s."
        super().__init__(EVENT_TIMEOUT, message, {"event": event, "timeout_s": timeout_s})
        self.event = event
        self.timeout_s = timeout_s


# Tagged structs rather than dataclasses: only these can be told apart in JSON when a task takes `Completed
# | Failed`.
class Completed(msgspec.Struct, Generic[R_co], frozen=True, tag_field="outcome", tag="completed"):
    """A task that returned; `value` is what it returned."""

    value: R_co


class Failed(msgspec.Struct, frozen=True, tag_field="outcome", tag="failed"):
    """A task that ended FAILED, CANCELLED or EXPIRED; `error` says why."""

    error: TaskError


TaskResult: TypeAlias = Completed[R] | Failed


class TaskFailed(EverbeatError):
    """Raised where a result was asked for and the task has none; `error` is the task's own error.

    When the task itself is interested in both ends, `handle.outcome()` gives `Completed | Failed` without
    raising.
    """

    code = "TASK_FAILED"

    def __init__(self, error: TaskError, *, task_id: UUID | None = None, kind: str = "task") -> None:
        subject = f"The {kind}" if task_id is None else f"{kind.capitalize()} {task_id}"
        super().__init__(f"{subject} ended without a result: {error}")
        self.error = error
        self.task_id = task_id
