"""The base class of all errors, and the errors of settings, calls, operator commands, the database, workers and NATS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

from msgspec import Struct

from everbeat.errors.wording import amount, nearest, some, visible


def _restored(kind: type[EverbeatError], args: tuple[Any, ...], state: dict[str, Any]) -> EverbeatError:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(state)
    return error


class EverbeatError(Exception):
    """Base class of everbeat's errors. The `code` is stable and intended for programs; `message` and `fix` are intended for people."""

    code: ClassVar[str] = "EVERBEAT_ERROR"

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        # Messages can quote values from users and from the database, and tracebacks print them on terminals.
        self.message = visible(message)
        self.fix = None if fix is None else visible(fix)
        super().__init__(self.message)

    def __str__(self) -> str:
        return self.message if self.fix is None else f"{self.message} Fix: {self.fix}"

    def __reduce__(self) -> tuple[Any, ...]:
        # Subclasses have keyword-only parameters, which the default reduction cannot pass to __init__.
        return _restored, (type(self), self.args, self.__dict__)


class Problem(Struct, frozen=True, kw_only=True):
    """One violated rule in a configuration or registration. `where` is the `file:line` of the violation, if known.

    Shell commands print `shell_rule` and `shell_fix`, if set, instead of `rule` and `fix`, which are worded for Python code.
    """

    code: str
    subject: str
    value: str
    rule: str
    fix: str
    where: str | None = None
    shell_fix: str | None = None
    shell_rule: str | None = None

    def finding(self) -> str:
        """Return the location and the problem, without the fix."""
        found = f"{self.subject} = {self.value}: {self.rule}."
        return found if self.where is None else f"{self.where}: {found}"

    def sentence(self) -> str:
        """Return the problem and the fix, without the location."""
        return f"{self.subject} = {self.value}: {self.rule}. Fix: {self.fix}."

    def __str__(self) -> str:
        return self.sentence() if self.where is None else f"{self.where}: {self.sentence()}"


class ConfigurationError(EverbeatError):
    """One or more settings are invalid. `problems` lists every violated rule, not only the first one.

    If there are several problems, the message gives the fix for each of them, and `fix` is None.
    """

    code = "CONFIGURATION_INVALID"

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        if len(self.problems) == 1:
            super().__init__(self.problems[0].finding(), fix=f"{self.problems[0].fix}.")
        else:
            super().__init__(_listed(self.problems))


def _listed(problems: tuple[Problem, ...]) -> str:
    places = {problem.where for problem in problems}
    if len(places) == 1 and None not in places:
        heading = f"{problems[0].where}: {len(problems)} problems:"
        lines = [problem.sentence() for problem in problems]
    else:
        heading = f"{len(problems)} problems:"
        lines = [str(problem) for problem in problems]
    return "\n".join([heading, *(f"  {number}. {line}" for number, line in enumerate(lines, 1))])


class RegistrationError(EverbeatError):
    """A function cannot be registered as a task. `where` is the `file:line` of its definition, if known."""

    code = "REGISTRATION_INVALID"

    def __init__(self, message: str, *, fix: str | None = None, where: str | None = None) -> None:
        super().__init__(message if where is None else f"{where}: {message}", fix=fix)
        self.where = where


class PayloadError(EverbeatError):
    """An argument, a result or a checkpoint does not match its annotation, cannot be represented in JSON, or is too large.

    `parameter` is the name of the wrong parameter, if known.
    """

    code = "PAYLOAD_INVALID"

    def __init__(self, message: str, *, parameter: str | None = None, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.parameter = parameter


class QueueFull(EverbeatError):
    """The task was not sent, because its queue has reached its `max_waiting`. Nothing was stored.

    `waiting` is the approximate number of waiting tasks, and `sending` the number of tasks of the send.
    """

    code = "QUEUE_FULL"

    def __init__(self, queue: str, *, waiting: int, max_waiting: int, sending: int, waited_s: float) -> None:
        never_fits = sending > max_waiting
        after = f" after {waited_s:.3g} s" if waited_s else ""
        tasks = "a task was" if sending == 1 else f"{amount(sending, 'task')} were"
        if never_fits:
            super().__init__(
                f"Queue {queue!r} can never take {amount(sending, 'task')} at once: max_waiting is {max_waiting:,}, so {tasks} not sent.",
                fix=f"send at most {amount(max_waiting, 'task')} at once, or raise max_waiting.",
            )
        else:
            super().__init__(
                f"Queue {queue!r} is full{after}: {amount(waiting, 'task')} or more wait, and max_waiting is {max_waiting:,},"
                f" so {tasks} not sent.",
                fix="send again later, add workers for the queue, or raise its max_waiting.",
            )
        self.queue = queue
        self.waiting = waiting
        self.max_waiting = max_waiting
        self.sending = sending


class LimitFull(EverbeatError):
    """The task was not sent, because a limit with `when_full="drop"` cannot take it. Nothing was stored.

    No task holds permits of the limit or waits for them, so the send cannot return another task. `cost` is the number of permits that the
    task needs, and `concurrency` the number in force.
    """

    code = "LIMIT_FULL"

    def __init__(self, limit: str, *, task: str, concurrency: int, cost: int) -> None:
        super().__init__(
            f"Task {task!r} was not sent: it needs {amount(cost, 'permit')} of limit {limit!r}, whose concurrency is {concurrency:,}.",
            fix=f"raise it with app.set_limit({limit!r}, concurrency={cost}) or more, or restore the numbers of the code:"
            f" app.clear_limit({limit!r}).",
        )
        self.limit = limit
        self.concurrency = concurrency
        self.cost = cost


class SendError(EverbeatError):
    """A task or workflow was not stored, because its key was taken and released again at every attempt to store it.

    `task_id` is the id that was chosen for the task or workflow.
    """

    code = "SEND_FAILED"

    def __init__(self, message: str, *, task_id: UUID | None = None, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.task_id = task_id


class DuplicateTask(EverbeatError):
    """A task was not stored, because another task has its key and `on_duplicate` is "reject".

    `name` and `key` identify the send, and `task_id` is the id of the task that has the key. If several calls of a `send_many` are
    duplicates, the error names the first of them, and none of the calls was stored. `task_id` is None if two calls of the `send_many` have
    the same key.
    """

    code = "DUPLICATE_TASK"

    def __init__(self, name: str, key: str, *, task_id: UUID | None, others: int = 0) -> None:
        also = f", and {others} more of the keys are taken" if others else ""
        found = (
            f"task {task_id} has this key{also}" if task_id else "another call of this send_many has this key"
        )
        that = "that task" if task_id else "one task"
        super().__init__(
            f"Task {name!r} with key {key!r} was not sent: {found}.",
            fix=f'use another key, or on_duplicate="existing" for the handle of {that}.',
        )
        self.name = name
        self.key = key
        self.task_id = task_id


class UnknownName(EverbeatError):
    """No task function, queue, worker, supervisor, host, schedule or workflow node with this name is known. Nothing was changed."""

    code = "UNKNOWN_NAME"

    def __init__(
        self, kind: str, names: Sequence[str], *, known: Iterable[str] = (), former: Iterable[str] = ()
    ) -> None:
        choices = sorted(known)
        ended = list(former)
        likely = [*choices, *ended]
        guesses = [guess for guess in (nearest(name, likely) for name in names) if guess is not None]
        plural = "" if len(names) == 1 else "s"
        verb = "is" if len(names) == 1 else "are"
        also = f"; ended: {some(ended)}" if ended else ""
        message = f"{kind.capitalize()}{plural} {', '.join(map(repr, names))} {verb} not known here; known: {some(choices)}{also}."
        fix = (
            f"did you mean {', '.join(map(repr, guesses))}?"
            if guesses
            else f"{'use a known name, or ' if likely else ''}check the spelling, the database and the schema."
        )
        super().__init__(message, fix=fix)
        self.kind = kind
        self.names = tuple(names)


class WorkerEnded(UnknownName):
    """A worker or supervisor that a command names has already ended. Nothing was changed.

    `ended_at` and `cause` describe the first such worker or supervisor.
    """

    code = "WORKER_ENDED"

    def __init__(
        self,
        kind: str,
        names: Sequence[str],
        *,
        ended_at: datetime,
        cause: str | None,
        live: Iterable[str] = (),
    ) -> None:
        others = len(names) - 1
        also = f"; {others} more of the given ids have ended" if others else ""
        because = f" ({cause})" if cause else ""
        message = f"{kind.capitalize()} {names[0]!r} ended at {ended_at:%Y-%m-%d %H:%M:%S %Z}{because}{also}."
        running = sorted(live)
        fix = (
            f"choose a live one: {some(running)}."
            if running
            else "no supervisor is live; start one: everbeat worker MODULE:APP."
        )
        EverbeatError.__init__(self, message, fix=fix)
        self.kind = kind
        self.names = tuple(names)
        self.ended_at = ended_at
        self.cause = cause


class AmbiguousId(EverbeatError):
    """Several ids begin with the given prefix. Nothing was changed."""

    code = "AMBIGUOUS_ID"

    def __init__(self, given: str, candidates: Sequence[str], *, more: bool = False) -> None:
        shown = "".join(f"\n    {each}" for each in candidates)
        message = (
            f"Several ids begin with {given!r}, among them:" if more else f"Several ids begin with {given!r}:"
        )
        super().__init__(f"{message}{shown}", fix="specify more characters of the id.")
        self.given = given


class NotPaused(EverbeatError):
    """The task function, queue or schedule to resume, or everything (kind "all"), is not paused. Nothing was changed."""

    code = "NOT_PAUSED"

    def __init__(self, kind: str, name: str, *, paused: Iterable[str] = ()) -> None:
        choices = sorted(paused)
        if kind == "all":
            super().__init__(
                "There is no pause of everything.", fix="list the pauses: everbeat tasks pauses."
            )
            self.kind, self.name = kind, name
            return
        guess = nearest(name, choices)
        listed = "everbeat schedules" if kind == "schedule" else "everbeat tasks pauses"
        fix = f"did you mean {guess!r}?" if guess is not None else f"list the pauses: {listed}."
        super().__init__(
            f"{kind.capitalize()} {name!r} is not paused; paused {kind}s: {some(choices)}.", fix=fix
        )
        self.kind = kind
        self.name = name


class ScheduleNotChanged(EverbeatError):
    """The schedule to put or delete is declared in code, so only that code can change it. Nothing was changed.

    `owner` is the app whose code declares the schedule.
    """

    code = "SCHEDULE_NOT_CHANGED"

    def __init__(self, name: str, *, owner: str) -> None:
        super().__init__(
            f"Schedule {name!r} is declared in the code of app {owner!r}, and only that code can change it.",
            fix="change the code and restart the workers, or pause the schedule, or use another name.",
        )
        self.name = name
        self.owner = owner


class AppClosed(EverbeatError):
    """The app was closed while a call was waiting for a task. The task is not affected."""

    code = "APP_CLOSED"

    def __init__(self, task_id: UUID | str) -> None:
        super().__init__(
            f"The app was closed during a wait for task {task_id}.",
            fix="wait before close(), or wait again: the next call opens the app again.",
        )
        self.task_id = task_id


class BlockingCallInLoop(EverbeatError):
    """A blocking method was called in a thread whose event loop is running. The call would have blocked the loop."""

    code = "BLOCKING_CALL_IN_LOOP"

    def __init__(self, name: str, twin: str | None, *, instead: str | None = None) -> None:
        super().__init__(
            f"{name}() would block the event loop that runs in this thread.",
            fix=f"{instead}." if instead else f"await {twin}(...) instead.",
        )
        self.name = name
        self.twin = twin


class DatabaseError(EverbeatError):
    """Base class for database errors."""

    code = "DATABASE_ERROR"


class DatabaseUnreachable(DatabaseError):
    """A database connection could not be opened or was lost."""

    code = "DATABASE_UNREACHABLE"


class DatabaseReadOnly(DatabaseError):
    """The server is a standby or refuses writes."""

    code = "DATABASE_READ_ONLY"


class DatabaseTooOld(DatabaseError):
    """The server is older than the oldest PostgreSQL version that everbeat supports."""

    code = "DATABASE_TOO_OLD"


class WrongDatabaseURL(DatabaseError):
    """The database URL is invalid or missing."""

    code = "WRONG_DATABASE_URL"


class SchemaMissing(DatabaseError):
    """The schema does not contain the everbeat tables yet."""

    code = "SCHEMA_MISSING"


class SchemaGone(SchemaMissing, DatabaseUnreachable):
    """The schema was renamed or dropped after its creation. everbeat treats this as an outage until the schema is back."""

    code = "SCHEMA_GONE"


class SchemaOutdated(DatabaseError):
    """The schema is too old for this version of everbeat."""

    code = "SCHEMA_OUTDATED"


class SchemaFromTheFuture(DatabaseError):
    """The schema was migrated by a newer version of everbeat and no longer supports this version."""

    code = "SCHEMA_FROM_THE_FUTURE"


class MigrationStopped(DatabaseError):
    """A schema upgrade stopped before it was complete. The finished steps remain applied, and the next run continues after them."""

    code = "MIGRATION_STOPPED"


class SchemaForbidden(DatabaseError):
    """The database role lacks a privilege that everbeat needs on the schema."""

    code = "SCHEMA_FORBIDDEN"


class EmbeddedUnavailable(DatabaseError):
    """The embedded PostgreSQL server is not installed, cannot run here, or does not exist yet and must not be created by a
    read-only command.
    """

    code = "EMBEDDED_UNAVAILABLE"


class WorkerError(EverbeatError):
    """A worker cannot start or continue."""

    code = "WORKER_ERROR"


class WorkerRefused(WorkerError):
    """Worker processes cannot start. `reason` is the error code that a worker process reported."""

    code = "WORKER_REFUSED"

    def __init__(self, message: str, *, reason: str, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.reason = reason


class AppNotFound(WorkerError):
    """A `module:attribute` locator does not refer to an `App`."""

    code = "APP_NOT_FOUND"

    def __init__(self, message: str, *, locator: str, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.locator = locator


class ImportFailed(AppNotFound):
    """The module that a locator names raised an exception when it was imported. `where` is the `file:line` in the user's code, if known."""

    code = "IMPORT_FAILED"

    def __init__(
        self, message: str, *, locator: str, where: str | None = None, fix: str | None = None
    ) -> None:
        super().__init__(message, locator=locator, fix=fix)
        self.where = where


class NatsError(EverbeatError):
    """Base class for NATS errors. NATS only delivers wake-up messages, so tasks can be sent and run without it."""

    code = "NATS_ERROR"


class NatsUnreachable(NatsError):
    """No NATS server responded in time."""

    code = "NATS_UNREACHABLE"


class NatsRefused(NatsError):
    """A NATS server responded but cannot be used, for example because of wrong credentials, a TLS problem or missing JetStream."""

    code = "NATS_REFUSED"


class NatsNotInstalled(NatsError):
    """The app uses NATS, but the nats-py package is not installed."""

    code = "NATS_NOT_INSTALLED"

    def __init__(self) -> None:
        super().__init__(
            "App(wake=...) needs the package nats-py, which is not installed.",
            fix="run pip install 'everbeat[nats]', or omit wake.",
        )
