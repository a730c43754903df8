"""Events, the bus that passes them to subscribers, and their log format."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from enum import Enum
from functools import cache, partial
from typing import ClassVar, Final
from uuid import UUID

from msgspec import Struct
from msgspec.structs import asdict

from everbeat.domain.tracing.model import TraceIds
from everbeat.errors import DatabaseReadOnly as ReadOnlyError
from everbeat.errors import DatabaseUnreachable as UnreachableError
from everbeat.errors.wording import class_name, safe_text, visible

_VALUE_LIMIT = 2000


def value_text(value: object) -> str:
    """Return the value as one line of limited length, quoted if necessary."""
    match value:
        case float():
            return f"{value:.3f}"
        case BaseException():
            return _quoted(f"{type(value).__name__}: {_safe_text(value)}")
        case Enum():
            return _quoted(str(value.value))
        case datetime():
            return value.isoformat()
        case tuple():
            shown = ",".join(value_text(item) for item in value[:20])
            return shown + (f",(+{len(value) - 20})" if len(value) > 20 else "")
        case _:
            return _quoted(_safe_text(value))


def _safe_text(value: object) -> str:
    try:
        return str(value)
    except BaseException:  # noqa: BLE001 - converting a user's object to text runs user code, which might even exit
        return "(its text cannot be made)"


def _quoted(text: str) -> str:
    text = text if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}…"
    if text and not re.search(r'[\s"=,]', text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_log = logging.getLogger("everbeat.runtime")


class Event(Struct, frozen=True, kw_only=True):
    """The base class of all events. `component` and `level` determine the logger and the level of their log records."""

    component: ClassVar[str] = "runtime"
    level: ClassVar[int] = logging.INFO

    @property
    def loudness(self) -> int:
        """Return the level at which this event is logged."""
        return self.level

    @property
    def unshown(self) -> frozenset[str]:
        """Return the names of the fields that are left out of the log line."""
        return frozenset()

    @property
    def shown(self) -> dict[str, object]:
        """Return the fields of log records. An event about an attempt with a span has `trace_id` and `span_id` instead of `trace_ids`."""
        unshown = self.unshown
        found = {name: value for name, value in asdict(self).items() if name not in unshown}
        ids = found.pop("trace_ids", None)
        return found if ids is None else {**found, "trace_id": ids[0], "span_id": ids[1]}

    @property
    def exc_info(self) -> BaseException | None:
        """Return the exception to attach to the log record, or None."""
        return None


class SupervisorRegistered(Event, frozen=True, kw_only=True):
    """A supervisor has inserted its row and taken its session lock."""

    component = "supervisor"
    supervisor_id: str
    hostname: str
    pid: int


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker process is ready to claim tasks."""

    component = "worker"
    worker_id: str
    pid: int


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker process exited. `cause` is taken from its exit report. `in_order` means that the worker had no work left."""

    component = "supervisor"
    level = logging.WARNING
    worker_id: str
    pid: int
    cause: str
    in_order: bool = False

    @property
    def loudness(self) -> int:
        """Return INFO for an exit that was in order, otherwise WARNING."""
        return logging.INFO if self.in_order else self.level


class ProcessRecycled(Event, frozen=True, kw_only=True):
    """A worker or task process has reached a limit. The process finishes its running tasks, and a new process replaces it.

    `tasks` is the number of tasks that have run or are still running in this process.
    """

    component = "worker"
    pid: int
    reason: str
    tasks: int
    rss_bytes: int


class LeasesLost(Event, frozen=True, kw_only=True):
    """This worker has lost leases that it held."""

    component = "worker"
    level = logging.WARNING
    task_ids: tuple[UUID, ...]
    reason: str


class ZombieRefused(Event, frozen=True, kw_only=True):
    """An attempt that had lost its lease tried to write. Nothing was changed."""

    component = "worker"
    level = logging.WARNING
    task_id: UUID
    verb: str
    trace_ids: TraceIds | None = None


class TaskStarted(Event, frozen=True, kw_only=True):
    """The code of an attempt is about to start. This event is emitted only if its logger is enabled for DEBUG."""

    component = "worker"
    level = logging.DEBUG
    task_id: UUID
    name: str
    attempt: int


class TaskFinished(Event, frozen=True, kw_only=True):
    """An attempt has finished, and its result is stored. `state` is the state of the task afterwards.

    A task that was released before its code started does not emit this event.
    """

    component = "worker"
    level = logging.DEBUG
    task_id: UUID
    name: str
    state: str
    duration_s: float
    trace_ids: TraceIds | None = None


class TaskRecovered(Event, frozen=True, kw_only=True):
    """A dead holder's lease was recovered. `noticed_after_s` counts from the holder's last sign of life, or from its exit."""

    component = "recovering"
    level = logging.WARNING
    task_id: UUID
    name: str
    from_state: str
    action: str
    cause: str
    noticed_by: str
    noticed_after_s: float


class HookFailed(Event, frozen=True, kw_only=True):
    """A recovery hook raised an error, took too long or returned an invalid value, so `Default` applies. Other hooks are not affected."""

    component = "recovering"
    level = logging.ERROR
    hook: str
    function: str
    task_id: UUID | None
    task_name: str | None
    problem: str


class MassSilence(Event, frozen=True, kw_only=True):
    """Many supervisors fell silent at the same time, so the cause is probably the network or the database.

    `fix` is the command for an operator who knows that the supervisors are dead.
    """

    component = "recovering"
    level = logging.ERROR
    silent: int
    known: int
    wait_s: float
    fix: str


class JudgementDelayed(Event, frozen=True, kw_only=True):
    """Supervisors have been silent for more than two thresholds, but this observer is delaying its verdict because of its own failures.

    `troubles` is the number of failed heartbeats and lost sessions that this observer has had since it started.
    """

    component = "recovering"
    level = logging.WARNING
    silent: int
    for_s: float
    troubles: int


class DatabaseUnreachable(Event, frozen=True, kw_only=True):
    """For some seconds, PostgreSQL has not responded or has not accepted writes. Emitted once per outage and tree."""

    component = "store"
    level = logging.WARNING
    reason: str


class DatabaseBack(Event, frozen=True, kw_only=True):
    """PostgreSQL is responding again."""

    component = "store"
    level = logging.WARNING
    after_s: float


class ServiceFailed(Event, frozen=True, kw_only=True):
    """A tick of a service raised an error. The service continues after `retry_in_s` seconds."""

    level = logging.ERROR
    name: str
    error: BaseException
    consecutive: int
    retry_in_s: float

    @property
    def loudness(self) -> int:
        """Return the default level for failures 1, 2, 4, 8 and so on, so that a lasting failure does not flood the log.

        Other failures are logged at DEBUG. During a database outage, only the first failure is logged, as a warning: `database_unreachable`
        reports the outage itself.
        """
        if isinstance(self.error, UnreachableError | ReadOnlyError):
            return logging.WARNING if self.consecutive == 1 else logging.DEBUG
        return logging.DEBUG if self.consecutive & (self.consecutive - 1) else self.level


class ServiceRecovered(Event, frozen=True, kw_only=True):
    """A service has succeeded again after one or more failures."""

    name: str
    failures: int


class LoopBlocked(Event, frozen=True, kw_only=True):
    """Code has blocked an event loop for `seconds`. `names` lists the tasks that might be responsible, and `stack` shows where.

    `interpreter_held` means that no Python code could run anywhere in the process during this time, because C code held the GIL.
    """

    level = logging.WARNING
    names: tuple[str, ...]
    seconds: float
    interpreter_held: bool
    stack: str


class LoopFreed(Event, frozen=True, kw_only=True):
    """A blocked event loop is running again, after being blocked for `seconds` in total."""

    level = logging.WARNING
    names: tuple[str, ...]
    seconds: float


Subscriber = Callable[[Event], None]
Listens = Callable[[type[Event]], bool]


class EventBus:
    """Passes every event to every subscriber, in the emitting thread. The bus may be used from any thread."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()
        self._filters: dict[Subscriber, Listens] = {}
        self._lock = threading.Lock()

    def subscribe(self, subscriber: Subscriber, *, listens: Listens | None = None) -> Callable[[], None]:
        """Call `subscriber` with every event from now on. Return a function that ends the subscription.

        `listens` reports whether the subscriber currently uses events of a given type. None means that it uses all events.
        """
        with self._lock:
            if listens is not None:
                self._filters[subscriber] = listens
            self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            with self._lock:
                kept = list(self._subscribers)
                if subscriber in kept:
                    kept.remove(subscriber)
                self._subscribers = tuple(kept)

        return unsubscribe

    def has_listeners(self, kind: type[Event]) -> bool:
        """Return whether any subscriber uses events of this type. Callers need not create events that no subscriber uses."""
        return any(each not in self._filters or self._filters[each](kind) for each in self._subscribers)

    def emit(self, event: Event) -> None:
        """Call all subscribers. Errors in subscribers are logged and never raised, and the remaining subscribers are still called."""
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:  # noqa: BLE001 - a broken subscriber must not break the code that emits events
                _log.exception("subscriber_failed event=%s subscriber=%r", event_name(event), subscriber)


def is_logged(kind: type[Event]) -> bool:
    """Return whether the logger is enabled for this event type's default level."""
    return _logger(kind.component).isEnabledFor(kind.level)


def log_event(event: Event) -> None:
    """Write `event` to the logger `everbeat.<component>`. The log record carries the event as `everbeat_event`.

    If the event is about an attempt with a span, the record has `trace_id` and `span_id`, like the records of the attempt's code.
    """
    logger = _logger(event.component)
    if logger.isEnabledFor(event.loudness):
        extra: dict[str, object] = {"everbeat_event": event}
        if (ids := getattr(event, "trace_ids", None)) is not None:
            extra |= {"trace_id": ids[0], "span_id": ids[1]}
        logger.log(event.loudness, "%s", event_text(event), exc_info=event.exc_info, extra=extra)


@cache
def _logger(room: str) -> logging.Logger:
    name = f"everbeat.{room}"
    catch_handler_errors(name)
    return logging.getLogger(name)


def event_name(event: Event) -> str:
    """Return the event's name in snake case, such as `worker_exited` for `WorkerExited`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()


def event_text(event: Event) -> str:
    """Return the event's name and its key=value pairs on one line, followed by any multi-line text, indented."""
    parts, below = [event_name(event)], ""
    for field, value in event.shown.items():
        if isinstance(value, str) and "\n" in value.rstrip():
            below += f"\n{field}:\n" + "\n".join(f"  {line}" for line in value.rstrip().splitlines())
        else:
            parts.append(f"{field}={value_text(value)}")
    return visible(" ".join(parts) + below)


LOGGERS: Final = (
    *(
        f"everbeat.{room}"
        for room in (
            "runtime",
            "store",
            "hints",
            "nats",
            "client",
            "recovering",
            "maintenance",
            "supervisor",
            "worker",
            "web",
        )
    ),
    "everbeat.embedded.server",
    "everbeat.embedded.identity",
)
"""The loggers to which everbeat writes."""
_LONGEST_TEXT: Final = 2_000


def catch_handler_errors(name: str) -> None:
    """Make the logger with this name catch the errors that users' logging handlers raise."""
    logger = logging.getLogger(name)
    if not isinstance(logger.handle, partial):
        logger.handle = partial(_handle, logger.handle)  # type: ignore[method-assign]


def _handle(handle: Callable[[logging.LogRecord], None], record: logging.LogRecord) -> None:
    try:
        handle(record)
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - the calling code holds tasks and must still store their results
        with suppress(Exception):  # stderr may be closed
            said = safe_text(record.getMessage(), limit=_LONGEST_TEXT)
            why = f"{class_name(type(problem))}: {safe_text(problem, limit=_LONGEST_TEXT)}"
            line = f"{record.levelname} {record.name}: {said} (a logging handler raised {why})"
            sys.stderr.write(visible(line) + "\n")


for _name in LOGGERS:
    catch_handler_errors(_name)
