"""The error tree: what everbeat raises itself, each with a code, a message and mostly a fix.

What lives here: exception classes and `Problem`; the text tools of their messages are in `wording`. What may not:
anything that decides, reads a clock or opens a connection. No message may hold a password.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

from everbeat.errors.base import EverbeatError as EverbeatError
from everbeat.errors.building import NoSuchPart as NoSuchPart
from everbeat.errors.building import PlaceholderUsed as PlaceholderUsed
from everbeat.errors.configuration import ConfigurationError as ConfigurationError
from everbeat.errors.configuration import Problem as Problem
from everbeat.errors.of_workflows import NodeNotEnded as NodeNotEnded
from everbeat.errors.of_workflows import WorkflowNotFound as WorkflowNotFound
from everbeat.errors.of_workflows import WorkflowNotRetryable as WorkflowNotRetryable
from everbeat.errors.operating import NatsError as NatsError
from everbeat.errors.operating import NatsNotInstalled as NatsNotInstalled
from everbeat.errors.operating import NatsRefused as NatsRefused
from everbeat.errors.operating import NatsUnreachable as NatsUnreachable
from everbeat.errors.operating import NotPaused as NotPaused
from everbeat.errors.operating import SignalRefused as SignalRefused
from everbeat.errors.operating import UnknownName as UnknownName
from everbeat.errors.wording import nearest as nearest
from everbeat.errors.wording import some


class RegistrationError(EverbeatError):
    """A function that cannot become a task; `where` is the `file:line` of its definition when known."""

    code = "REGISTRATION_INVALID"

    def __init__(self, message: str, *, fix: str | None = None, where: str | None = None) -> None:
        super().__init__(message if where is None else f"{where}: {message}", fix=fix)
        self.where = where


class PayloadError(EverbeatError):
    """Arguments or a result that do not fit the signature or JSON; `parameter` names the guilty one."""

    code = "PAYLOAD_INVALID"

    def __init__(self, message: str, *, parameter: str | None = None, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.parameter = parameter


class SendError(EverbeatError):
    """A send that did not reach the database; sending `task_id` again never makes a second task."""

    code = "SEND_FAILED"

    def __init__(self, message: str, *, task_id: UUID | None = None, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.task_id = task_id


class UnknownTask(EverbeatError):
    """A task name that the app did not register."""

    code = "UNKNOWN_TASK"

    def __init__(self, name: str, *, known: Iterable[str] = ()) -> None:
        names = sorted(known)
        guess = nearest(name, names)
        fix = f"use {guess!r}" if guess is not None else "register the function with @app.task"
        message = f"Task {name!r} is not registered in this app, which knows {some(names)}."
        super().__init__(message, fix=f"{fix}.")
        self.name = name


class TaskNotFound(EverbeatError):
    """No task has this id: it was never committed in this schema, or its record was pruned."""

    code = "TASK_NOT_FOUND"

    def __init__(self, task_id: UUID | str) -> None:
        super().__init__(
            f"Task {task_id} does not exist: it was never committed in this schema, or was pruned since.",
            fix="check the id, the database and the schema, and terminal_record_retention_hours.",
        )
        self.task_id = task_id


class RecoveryNotFound(EverbeatError):
    """No recovery has this number: there never was one, or it was pruned with its task."""

    code = "RECOVERY_NOT_FOUND"


class TaskNotRetryable(EverbeatError):
    """Only a task that ended FAILED, CANCELLED or EXPIRED can be run again by an operator, and only while no live task has its key.

    `other` is that live task.
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
            fix = "send it anew." if state == "COMPLETED" else "wait until it ends, or cancel it first."
        else:
            reason = f"is a node of workflow {workflow_id}, and is retried with what depends on it"
            fix = f"retry the workflow: app.workflow_handle('{workflow_id}').retry(), or 'everbeat workflows retry {workflow_id}'."
        super().__init__(f"Task {task_id} {reason}.", fix=fix)
        self.task_id = task_id
        self.state = state
        self.other = other


class AppClosed(EverbeatError):
    """The app was closed while somebody waited for a task; the task is untouched."""

    code = "APP_CLOSED"

    def __init__(self, task_id: UUID | str) -> None:
        super().__init__(
            f"The app was closed while task {task_id} was waited for.",
            fix="wait before close(), or ask again: the next call opens the app anew.",
        )
        self.task_id = task_id


class WaitTimeout(EverbeatError, TimeoutError):
    """Waiting ended before the task did, or before `missing` of `waited_for` tasks did; they may be waited for again."""

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
            message = f"{missing} of {waited_for} tasks have not ended. {message}"
        super().__init__(
            message,
            fix=f"wait longer (timeout=...), or ask {'app.explain(id)' if what == 'Task' else 'handle.explain()'} what holds it back.",
        )
        self.task_id = task_id
        self.waited_s = waited_s
        self.state = state
        self.missing = missing
        self.waited_for = waited_for


class BlockingCallInLoop(EverbeatError):
    """A blocking call was made where an event loop runs; it would have stopped the whole loop."""

    code = "BLOCKING_CALL_IN_LOOP"

    def __init__(self, name: str, twin: str | None, *, instead: str | None = None) -> None:
        super().__init__(
            f"{name}() blocks, and an event loop is running in this thread, which it would stop.",
            fix=f"{instead}." if instead else f"await {twin}(...) instead.",
        )
        self.name = name
        self.twin = twin


class LeaseLost(EverbeatError):
    """This attempt no longer holds its task: it can change nothing and must stop, another may be running."""

    code = "LEASE_LOST"

    def __init__(self, task_id: UUID | str) -> None:
        super().__init__(
            f"This attempt of task {task_id} lost its lease and can no longer change the task.", fix="stop."
        )
        self.task_id = task_id


class CommitRefused(EverbeatError):
    """A connection with which the task cannot be completed in one transaction; nothing was written."""

    code = "COMMIT_REFUSED"


class DatabaseError(EverbeatError):
    """Base of what can be wrong with the database itself."""

    code = "DATABASE_ERROR"


class DatabaseUnreachable(DatabaseError):
    """No connection could be made or kept."""

    code = "DATABASE_UNREACHABLE"


class DatabaseReadOnly(DatabaseError):
    """The server is a standby or refuses writes."""

    code = "DATABASE_READ_ONLY"


class DatabaseTooOld(DatabaseError):
    """The server is older than the oldest PostgreSQL that everbeat supports."""

    code = "DATABASE_TOO_OLD"


class WrongDatabaseURL(DatabaseError):
    """The database URL cannot be understood, or none was given."""

    code = "WRONG_DATABASE_URL"


class SchemaMissing(DatabaseError):
    """The schema has no everbeat tables yet."""

    code = "SCHEMA_MISSING"


class SchemaGone(SchemaMissing, DatabaseUnreachable):
    """The schema was there before and is gone: renamed, or dropped. An outage until it is back under its name."""

    code = "SCHEMA_GONE"


class SchemaOutdated(DatabaseError):
    """The schema is older than this code needs."""

    code = "SCHEMA_OUTDATED"


class SchemaFromTheFuture(DatabaseError):
    """The schema was migrated by a newer everbeat and no longer supports this one."""

    code = "SCHEMA_FROM_THE_FUTURE"


class MigrationStopped(DatabaseError):
    """An upgrade of the schema that ended at a step. The steps before it stay done, and the next run goes on there."""

    code = "MIGRATION_STOPPED"


class SchemaForbidden(DatabaseError):
    """The role may not use or create what the schema needs."""

    code = "SCHEMA_FORBIDDEN"


class EmbeddedUnavailable(DatabaseError):
    """The embedded PostgreSQL is not installed, cannot run here, or is not there where a command only looks."""

    code = "EMBEDDED_UNAVAILABLE"


class CommitUnknown(DatabaseError):
    """The connection was lost while a commit was under way: it may or may not have happened."""

    code = "COMMIT_UNKNOWN"


class WorkerError(EverbeatError):
    """A worker that cannot start or go on."""

    code = "WORKER_ERROR"


class WorkerRefused(WorkerError):
    """Worker processes cannot start; `reason` is the code of the error that the first of them had."""

    code = "WORKER_REFUSED"

    def __init__(self, message: str, *, reason: str, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.reason = reason


class AppNotFound(WorkerError):
    """A `module:attribute` locator that leads to no App."""

    code = "APP_NOT_FOUND"

    def __init__(self, message: str, *, locator: str, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.locator = locator


class ImportFailed(AppNotFound):
    """The module of a locator raised while it was imported; `where` is the `file:line` of the user's code."""

    code = "IMPORT_FAILED"

    def __init__(
        self, message: str, *, locator: str, where: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(message, locator=locator, fix=fix)
        self.where = where
