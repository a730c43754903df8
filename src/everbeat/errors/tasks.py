"""Errors of tasks and workflows: the codes that everbeat stores with a task, and the exceptions that programs can catch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

from everbeat.errors.tree import EverbeatError
from everbeat.errors.wording import amount, nearest, some

UNHANDLED_EXCEPTION: Final = "UNHANDLED_EXCEPTION"
"""The function raised an exception that has no error code, and `exception_codes` defines no code for its class."""
WORKER_CRASHED: Final = "WORKER_CRASHED"
"""The process that was running the task died or was declared dead."""
WORKER_STOPPED: Final = "WORKER_STOPPED"
"""The worker was stopped, and the task's code did not finish within the grace period."""
TASK_TIMEOUT: Final = "TASK_TIMEOUT"
"""The attempt ran longer than the task's timeout."""
TASK_CANCELLED: Final = "TASK_CANCELLED"
"""The task was cancelled on request."""
TASK_EXPIRED: Final = "TASK_EXPIRED"
"""The task had not started by its `good_until` time."""
TASK_STALLED: Final = "TASK_STALLED"
"""The task's code was still running, but had given no sign of life for the task's `stall_timeout`."""
RESULT_UNSERIALISABLE: Final = "RESULT_UNSERIALISABLE"
"""The function's return value does not match its annotation, cannot be represented in JSON, or is too large."""
RESULT_NOT_AVAILABLE: Final = "RESULT_NOT_AVAILABLE"
"""The task has finished, but its result or error cannot be read."""
ARGUMENTS_INVALID: Final = "ARGUMENTS_INVALID"
"""The stored arguments do not match the function's signature, which might have changed since the task was sent."""
EVENT_TIMEOUT: Final = "EVENT_TIMEOUT"
"""The event that the task was waiting for did not arrive in time."""
NON_DETERMINISTIC: Final = "NON_DETERMINISTIC"
"""The arguments of a step, child or workflow differ from those that an earlier attempt recorded."""
RETRY_LATER: Final = "RETRY_LATER"
"""The code raised RetryLater, so the task runs again at the time that the code chose."""
RATE_LIMITED: Final = "RATE_LIMITED"
"""The code raised RateLimited, so the task runs again later, and other tasks of the limit wait, too."""
RETRY_LATER_EXHAUSTED: Final = "RETRY_LATER_EXHAUSTED"
"""The code raised RetryLater, but the task cannot run again: its limit of such attempts or its `good_until` prevents it."""
MIDDLEWARE_FAILED: Final = "MIDDLEWARE_FAILED"
"""A middleware of the app raised an exception before the task's code began, or after the code had succeeded."""
UNKNOWN_LIMIT: Final = "UNKNOWN_LIMIT"
"""The code raised RateLimited for a limit that the task does not have."""
BUILT_IN_CODES: Final = frozenset(
    {
        RATE_LIMITED,
        RETRY_LATER,
        RETRY_LATER_EXHAUSTED,
        EVENT_TIMEOUT,
        NON_DETERMINISTIC,
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
        UNKNOWN_LIMIT,
        MIDDLEWARE_FAILED,
    }
)


class TaskError(Exception):
    """The error of a failed task. Raise a TaskError in a task function to make the task fail with your own error code.

    `data` should be a value that JSON can represent. When everbeat stores the error, it sets `type` to the qualified name of the
    exception class, and `traceback` to the formatted traceback.

        raise TaskError("SMTP_DOWN", "mail.example.org refused the connection", {"port": 25})
    """

    def __init__(
        self,
        code: str,
        message: str = "",
        data: object = None,
        *,
        type: str = "",  # noqa: A002 - the name of this field in the stored error
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
    """Return the error code. After UNHANDLED_EXCEPTION, the name of the exception class follows in parentheses, if known."""
    shows_class = error.code == UNHANDLED_EXCEPTION and error.type
    return f"{error.code} ({error.type})" if shows_class else str(error.code)


class EventTimeout(TaskError):
    """The event that `Context.wait_event` was waiting for, or the answer to `Context.ask`, did not arrive within the timeout.

    A task that does not catch this error fails.
    """

    def __init__(self, event: str, *, timeout_s: float, question: str | None = None) -> None:
        message = f"Event {event!r} did not arrive within {timeout_s:g} s."
        if question is not None:
            message = f"Question {question!r} was not answered within {timeout_s:g} s."
        super().__init__(EVENT_TIMEOUT, message, {"event": event, "timeout_s": timeout_s})
        self.event = event
        self.timeout_s = timeout_s


class NonDeterministic(TaskError):
    """The arguments of a step, child or workflow differ from those that an earlier attempt recorded.

    The attempt fails even if the code catches this error, because every later step raises the error again. The records are kept.
    `step` is the name of the step, child or workflow with its number; `recorded` and `given` are digests of the arguments.
    """

    def __init__(
        self, step: str, *, kind: str, recorded: str, given: str, task_name: str, elsewhere: str | None = None
    ) -> None:
        moved = f" These are the arguments that were recorded for {elsewhere!r}." if elsewhere else ""
        super().__init__(
            NON_DETERMINISTIC,
            f"{kind.capitalize()} {step!r} of task {task_name!r} has other arguments (digest {given[:8]}) than an earlier attempt"
            f" recorded (digest {recorded[:8]}).{moved} Each attempt must reach its steps in the same order with the same"
            f" arguments. Fix: correct the code, and then retry the task: the records are kept. Put code that can differ into a separate"
            f" step, and give a new {kind} another name" + ("." if kind == "child" else ": ctx.named(...)."),
            {"step": step, "kind": kind, "recorded": recorded, "given": given},
        )
        self.step = step
        self.recorded = recorded
        self.given = given


class TaskFailed(EverbeatError):
    """The task or workflow finished without a result. `error` is the error that was stored for it.

    To handle both outcomes without an exception, use `handle.outcome()`, which returns `Completed | Failed`.
    """

    code = "TASK_FAILED"

    def __init__(self, error: TaskError, *, task_id: UUID | None = None, kind: str = "task") -> None:
        subject = f"The {kind}" if task_id is None else f"{kind.capitalize()} {task_id}"
        super().__init__(f"{subject} ended without a result: {error}")
        self.error = error
        self.task_id = task_id


class ResultNotStored(EverbeatError):
    """The task completed, but its result is not stored: its function has `ignore_result`, or its `keep_result_for` has passed."""

    code = "RESULT_NOT_STORED"

    def __init__(self, task_id: UUID | str, *, missing: Literal["ignored", "removed"]) -> None:
        reasons = {
            "ignored": (
                "its function has ignore_result=True, so the result was not stored",
                "use handle.outcome() to see that it completed, or register the function without ignore_result.",
            ),
            "removed": (
                "its result was removed after the keep_result_for of its function",
                "read the result earlier, or register the function with a longer keep_result_for.",
            ),
        }
        reason, fix = reasons[missing]
        super().__init__(f"Task {task_id} completed, but {reason}.", fix=fix)
        self.task_id = task_id


class UnknownTask(EverbeatError):
    """No task function with this name is registered in the app."""

    code = "UNKNOWN_TASK"

    def __init__(self, name: str, *, known: Iterable[str] = ()) -> None:
        names = sorted(known)
        guess = nearest(name, names)
        fix = f"use {guess!r}" if guess is not None else "register the function with @app.task"
        message = f"Task {name!r} is not registered in this app, which knows {some(names)}."
        super().__init__(message, fix=f"{fix}.")
        self.name = name


class TaskNotFound(EverbeatError):
    """No task with this id exists: it was never committed in this schema, or its record was pruned."""

    code = "TASK_NOT_FOUND"

    def __init__(self, task_id: UUID | str) -> None:
        super().__init__(
            f"Task {task_id} does not exist: it was never committed in this schema, or was pruned since.",
            fix="check the id, the database and the schema, and terminal_record_retention_hours.",
        )
        self.task_id = task_id


class RecoveryNotFound(EverbeatError):
    """No recovery with this number exists: there never was one, or it was pruned together with its task."""

    code = "RECOVERY_NOT_FOUND"


class TaskNotRetryable(EverbeatError):
    """This task cannot be retried.

    Only FAILED, CANCELLED and EXPIRED tasks can be retried, and only while no live task has the same name and key. `other` is the
    id of such a live task, if any. A task that is a node of a workflow can only be retried with its workflow.
    """

    code = "TASK_NOT_RETRYABLE"

    def __init__(
        self,
        task_id: UUID | str,
        *,
        state: str,
        workflow_id: UUID | None = None,
        other: UUID | None = None,
    ) -> None:
        if other is not None:
            reason = f"is {state}, and the live task {other} has the same name and key; only one live task can have a key"
            fix = "wait until that task ends, or cancel it first."
        elif workflow_id is None:
            reason = f"is {state}; only FAILED, CANCELLED and EXPIRED tasks can be retried"
            fix = (
                "send it again as a new task."
                if state == "COMPLETED"
                else "wait until it ends, or cancel it first."
            )
        else:
            reason = (
                f"is a node of workflow {workflow_id}, and is retried only with the nodes that depend on it"
            )
            fix = f"retry the workflow: app.workflow_handle('{workflow_id}').retry(), or 'everbeat workflows retry {workflow_id}'."
        super().__init__(f"Task {task_id} {reason}.", fix=fix)
        self.task_id = task_id
        self.state = state
        self.other = other


class ActionRefused(EverbeatError):
    """This task cannot be changed in this way. `reason` is the code of the reason, such as STATE, WORKFLOW or DUE."""

    code = "ACTION_REFUSED"

    def __init__(self, task_id: UUID | str, *, action: str, text: str, reason: str) -> None:
        super().__init__(
            f"Task {task_id} was left as it is, because {text}. The action was {action!r}.",
            fix=f"see its state with 'everbeat tasks show {task_id}'.",
        )
        self.task_id = task_id
        self.action = action
        self.reason = reason


class BulkActionNotFound(EverbeatError):
    """No bulk action with this id exists: it was never requested in this schema, or its record was deleted after 90 days."""

    code = "BULK_ACTION_NOT_FOUND"

    def __init__(self, action_id: UUID | str) -> None:
        super().__init__(
            f"Bulk action {action_id} does not exist: it was never requested in this schema, or was deleted since.",
            fix="list the bulk actions with 'everbeat bulk list', and check the database and the schema.",
        )
        self.action_id = action_id


class WaitTimeout(EverbeatError, TimeoutError):
    """The wait timed out while `missing` of the `waited_for` tasks were still unfinished. You can wait again."""

    code = "WAIT_TIMEOUT"

    def __init__(
        self,
        task_id: UUID | str,
        waited_s: float,
        *,
        state: str | None = None,
        missing: int = 1,
        waited_for: int = 1,
        what: str = "Task",
    ) -> None:
        seen = "not ended" if state is None else state
        message = f"{what} {task_id} is still {seen} after {waited_s:.3g} s of waiting."
        if waited_for > 1:
            message = f"{missing} of {amount(waited_for, 'task')} {'has' if missing == 1 else 'have'} not ended. {message}"
        look = {"Task": "app.explain(id)", "Batch": "batch.status()"}.get(what, "handle.explain()")
        super().__init__(message, fix=f"wait longer (timeout=...), or see what blocks it: {look}.")
        self.task_id = task_id
        self.waited_s = waited_s
        self.state = state
        self.missing = missing
        self.waited_for = waited_for


class CommitRefused(EverbeatError):
    """The task cannot be completed in a transaction on this connection. Nothing was written."""

    code = "COMMIT_REFUSED"


StopReason: TypeAlias = Literal["cancelled", "lease_lost", "timed_out", "stalled", "shutting_down"]
_WHY: Final[dict[StopReason, str]] = {
    "cancelled": "a cancel was requested",
    "lease_lost": "its lease was lost, so this attempt can change nothing, and another one might be running",
    "timed_out": "it ran longer than its timeout",
    "stalled": "it reported no progress for its stall_timeout",
    "shutting_down": "its worker is shutting down and releases it",
}


class TaskStopped(BaseException):
    """Raised by `Context` methods such as `check_cancelled` when the task's code should stop. `reason` says why.

    Like asyncio.CancelledError, TaskStopped is not a subclass of Exception, so `except Exception` does not catch it.
    """

    def __init__(self, reason: StopReason, *, task_id: UUID | None = None) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason
        self.task_id = task_id

    def __str__(self) -> str:
        return f"Task {self.task_id} should stop: {_WHY[self.reason]}."


class TaskSuspended(BaseException):
    """Raised by `Context.sleep` and `Context.wait_event` to release the slot. The task runs again when its wait is over.

    Do not catch this exception. Code that catches it continues without waiting, and the outcome of that code becomes the attempt's
    outcome.
    """

    def __init__(self, *, task_id: UUID | None = None) -> None:
        super().__init__(task_id)
        self.task_id = task_id

    def __str__(self) -> str:
        return f"Task {self.task_id} releases its slot, and runs again when its wait has ended."


class OutsideTask(EverbeatError):
    """`Context.current()` was called outside a running task."""

    code = "OUTSIDE_TASK"

    def __init__(self) -> None:
        super().__init__(
            "No task is running here, so there is no current Context.",
            fix="call it inside a task; a thread that a task starts itself needs the Context passed to it, "
            "or contextvars.copy_context().run(...).",
        )


class OutsideWorker(EverbeatError):
    """A task function that was called directly used a `Context` method that requires a worker."""

    code = "OUTSIDE_WORKER"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs a task that a worker runs, and this function was called directly.",
            fix="send the task, so that a worker runs it; in a test, call only code that needs no signals and no children.",
        )


class SignalRefused(EverbeatError):
    """The task or workflow to be signaled has finished, so it can no longer receive signals. Nothing was stored."""

    code = "SIGNAL_REFUSED"

    def __init__(self, target: UUID | str, *, kind: str, state: str, name: str) -> None:
        super().__init__(
            f"Signal {name!r} was not stored: {kind} {target} is {state}, and cannot receive signals after its end.",
            fix=f"check the id, and send signals before the {kind} ends.",
        )
        self.target = target
        self.kind = kind
        self.state = state


class BatchNotFound(EverbeatError):
    """No batch with this id exists: it was never opened in this schema, or its record was pruned."""

    code = "BATCH_NOT_FOUND"

    def __init__(self, batch_id: UUID | str) -> None:
        super().__init__(
            f"Batch {batch_id} does not exist: it was never opened in this schema, or was pruned since.",
            fix="open it with Batch.open() or a 'with' block; or check the id, the database and the schema.",
        )
        self.batch_id = batch_id


class BatchSealed(EverbeatError):
    """A batch is sealed, so only its own running tasks can add tasks. Nothing was stored."""

    code = "BATCH_SEALED"

    def __init__(self, batch_id: UUID | str) -> None:
        super().__init__(
            f"Batch {batch_id} is sealed, so it gets no tasks from outside. Nothing was stored.",
            fix="open another batch, send before the seal, or add tasks from a running task of the batch: ctx.batch.send(...).",
        )
        self.batch_id = batch_id
