"""The error tree: what everbeat raises itself, each with a code, a message and mostly a fix.

What lives here: exception classes and `Problem`; the text tools of their messages are in `wording`. What may not:
anything that decides, reads a clock or opens a connection. No message may hold a password.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from uuid import UUID

from msgspec import Struct

from everbeat.errors.base import EverbeatError as EverbeatError
from everbeat.errors.operating import NotPaused as NotPaused
from everbeat.errors.operating import SignalRefused as SignalRefused
from everbeat.errors.operating import UnknownName as UnknownName
from everbeat.errors.wording import nearest as nearest
from everbeat.errors.wording import redact_url as redact_url
from everbeat.errors.wording import some


class Problem(Struct, frozen=True, kw_only=True):
    """One broken rule of a configuration or a registration; `where` is `file:line` when known.

    `shell_fix`: what helps whoever typed the value in a shell, where that is something else than in Python.
    """

    code: str
    subject: str
    value: str
    rule: str
    fix: str
    where: str | None = None
    shell_fix: str | None = None

    def sentence(self) -> str:
        """The problem without its place."""
        return f"{self.subject} = {self.value}: {self.rule}. Fix: {self.fix}."

    def __str__(self) -> str:
        return self.sentence() if self.where is None else f"{self.where}: {self.sentence()}"


class ConfigurationError(EverbeatError):
    """Settings that cannot hold; `problems` lists every broken rule, not only the first."""

    code = "CONFIGURATION_INVALID"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(_listed(self.problems))


def _listed(problems: tuple[Problem, ...]) -> str:
    if len(problems) == 1:
        return str(problems[0])
    places = {problem.where for problem in problems}
    if len(places) == 1 and None not in places:
        heading = f"{problems[0].where}: {len(problems)} problems:"
        lines = [problem.sentence() for problem in problems]
    else:
        heading = f"{len(problems)} problems:"
        lines = [str(problem) for problem in problems]
    return "\n".join([heading, *(f"  {number}. {line}" for number, line in enumerate(lines, 1))])


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
    """Only a task that ended FAILED, CANCELLED or EXPIRED can be run again by an operator."""

    code = "TASK_NOT_RETRYABLE"

    def __init__(self, task_id: UUID | str, *, state: str) -> None:
        super().__init__(
            f"Task {task_id} is {state}; only FAILED, CANCELLED and EXPIRED tasks can be retried.",
            fix="send it anew." if state == "COMPLETED" else "wait until it ends, or cancel it first.",
        )
        self.task_id = task_id
        self.state = state


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
    """Waiting for a task ended before the task did; the task is untouched and may be waited for again."""

    code = "WAIT_TIMEOUT"

    def __init__(self, task_id: UUID | str, waited_s: float, *, state: str | None = None) -> None:
        seen = "not ended" if state is None else state
        super().__init__(
            f"Task {task_id} is still {seen} after {waited_s:.3g} s of waiting.",
            fix="wait longer (timeout=...), or ask the handle's info() what holds it back.",
        )
        self.task_id = task_id
        self.waited_s = waited_s
        self.state = state


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


class SchemaOutdated(DatabaseError):
    """The schema is older than this code needs."""

    code = "SCHEMA_OUTDATED"


class SchemaFromTheFuture(DatabaseError):
    """The schema was migrated by a newer everbeat than this one."""

    code = "SCHEMA_FROM_THE_FUTURE"


class SchemaForbidden(DatabaseError):
    """The role may not use or create what the schema needs."""

    code = "SCHEMA_FORBIDDEN"


class EmbeddedUnavailable(DatabaseError):
    """The embedded PostgreSQL is not installed or cannot run here."""

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
