"""What happened, as typed values through one funnel: logs, metrics and tests all read the same objects.

What lives here: the event classes, the bus, and the subscriber that writes them to `logging`. What may not:
reactions.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from functools import cache
from typing import ClassVar
from uuid import UUID

from msgspec import Struct
from msgspec.structs import asdict

from everbeat.errors import DatabaseReadOnly as ReadOnlyError
from everbeat.errors import DatabaseUnreachable as UnreachableError
from everbeat.errors.visible import visible
from everbeat.runtime.event_values import value_text

_log = logging.getLogger("everbeat.runtime")


class Event(Struct, frozen=True, kw_only=True):
    """Base of all events; `room` and `level` say where and how loudly it is logged."""

    room: ClassVar[str] = "runtime"
    level: ClassVar[int] = logging.INFO

    @property
    def loudness(self) -> int:
        """The level at which this very event is logged."""
        return self.level

    @property
    def unshown(self) -> frozenset[str]:
        """The fields that its log line leaves out."""
        return frozenset()

    @property
    def exc_info(self) -> BaseException | None:
        """The exception that goes with its log record."""
        return None


class SupervisorRegistered(Event, frozen=True, kw_only=True):
    """A supervisor has its row and its session lock."""

    room = "worker"
    supervisor_id: str
    hostname: str
    pid: int


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A worker process is ready to claim."""

    room = "worker"
    worker_id: str
    pid: int


class WorkerExited(Event, frozen=True, kw_only=True):
    """A worker process ended; `cause` as in its exit report. One that left `in_order` had nothing left to do."""

    room = "worker"
    level = logging.WARNING
    worker_id: str
    pid: int
    cause: str
    in_order: bool = False

    @property
    def loudness(self) -> int:
        """A death is a warning; a farewell is not."""
        return logging.INFO if self.in_order else self.level


class LeasesLost(Event, frozen=True, kw_only=True):
    """Leases that this worker held and holds no more."""

    room = "worker"
    level = logging.WARNING
    task_ids: tuple[UUID, ...]
    reason: str


class ZombieRefused(Event, frozen=True, kw_only=True):
    """A write of an attempt that has lost its lease changed nothing."""

    room = "worker"
    level = logging.WARNING
    task_id: UUID
    verb: str


class TaskStarted(Event, frozen=True, kw_only=True):
    """The code of an attempt begins. Only emitted while this room logs at DEBUG."""

    room = "worker"
    level = logging.DEBUG
    task_id: UUID
    name: str
    attempt: int


class TaskFinished(Event, frozen=True, kw_only=True):
    """An attempt was settled; `state` is the task's state afterwards."""

    room = "worker"
    level = logging.DEBUG
    task_id: UUID
    name: str
    state: str
    duration_s: float


class TaskRecovered(Event, frozen=True, kw_only=True):
    """A dead lease was decided on; `noticed_after_s` counts from the holder's last sign of life, or its exit."""

    room = "services"
    level = logging.WARNING
    task_id: UUID
    name: str
    from_state: str
    action: str
    cause: str
    noticed_by: str
    noticed_after_s: float


class HookFailed(Event, frozen=True, kw_only=True):
    """A recovery hook raised, was late or answered nonsense: as if it had answered `Default`. The others are not affected."""

    room = "services"
    level = logging.ERROR
    hook: str
    function: str
    task_id: UUID | None
    task_name: str | None
    problem: str


class MassSilence(Event, frozen=True, kw_only=True):
    """So many supervisors fell silent together that the network or the database is suspected, not them.

    `fix`: the command for an operator who knows them dead.
    """

    room = "services"
    level = logging.ERROR
    silent: int
    known: int
    wait_s: float
    fix: str


class JudgementDelayed(Event, frozen=True, kw_only=True):
    """Supervisors have been silent for more than two thresholds, and trouble of this observer puts the judgement off.

    `troubles`: how often a beat of this observer failed or a session was lost since its start.
    """

    room = "services"
    level = logging.WARNING
    silent: int
    for_s: float
    troubles: int


class DatabaseUnreachable(Event, frozen=True, kw_only=True):
    """PostgreSQL has not answered, or has accepted no writes, for some seconds. One for each outage of a tree."""

    room = "store"
    level = logging.WARNING
    reason: str


class DatabaseBack(Event, frozen=True, kw_only=True):
    """PostgreSQL answers again."""

    room = "store"
    level = logging.WARNING
    after_s: float


class ServiceFailed(Event, frozen=True, kw_only=True):
    """A tick raised; the service goes on after `retry_in_s` seconds."""

    level = logging.ERROR
    name: str
    error: BaseException
    consecutive: int
    retry_in_s: float

    @property
    def loudness(self) -> int:
        """The first failure, the second, the fourth, the eighth and so on: a lasting failure must not fill the log.

        Of an outage of the database only the first, as a warning: `database_unreachable` reports it.
        """
        if isinstance(self.error, UnreachableError | ReadOnlyError):
            return logging.WARNING if self.consecutive == 1 else logging.DEBUG
        return logging.DEBUG if self.consecutive & (self.consecutive - 1) else self.level


class ServiceRecovered(Event, frozen=True, kw_only=True):
    """The first sound tick after failures."""

    name: str
    failures: int


class LoopBlocked(Event, frozen=True, kw_only=True):
    """Code has kept an event loop from turning for `seconds`; `names` says whose code, `stack` where.

    `interpreter_held`: no Python ran anywhere in the process meanwhile, since C code held the GIL.
    """

    level = logging.WARNING
    names: tuple[str, ...]
    seconds: float
    interpreter_held: bool
    stack: str


class LoopFreed(Event, frozen=True, kw_only=True):
    """A blocked loop turns again, after `seconds` in all."""

    level = logging.WARNING
    names: tuple[str, ...]
    seconds: float


Subscriber = Callable[[Event], None]


class EventBus:
    """Hands every event to every subscriber, in the emitting thread; usable from any thread."""

    def __init__(self) -> None:
        self._subscribers: tuple[Subscriber, ...] = ()
        self._lock = threading.Lock()

    def subscribe(self, subscriber: Subscriber) -> Callable[[], None]:
        """Call `subscriber` with every event from now on; returns the function that ends it."""
        with self._lock:
            self._subscribers = (*self._subscribers, subscriber)

        def unsubscribe() -> None:
            with self._lock:
                kept = list(self._subscribers)
                if subscriber in kept:
                    kept.remove(subscriber)
                self._subscribers = tuple(kept)

        return unsubscribe

    def emit(self, event: Event) -> None:
        """Tell all subscribers; never raises: a broken one is logged, and the others are still told."""
        for subscriber in self._subscribers:
            try:
                subscriber(event)
            except Exception:  # noqa: BLE001 - a broken listener must not break what it listens to
                _log.exception("subscriber_failed event=%s subscriber=%r", event_name(event), subscriber)


def log_event(event: Event) -> None:
    """Write `event` to the logger `everbeat.<room>`; the record carries it as `everbeat_event`."""
    logger = _logger(event.room)
    if logger.isEnabledFor(event.loudness):
        extra = {"everbeat_event": event}
        logger.log(event.loudness, "%s", event_text(event), exc_info=event.exc_info, extra=extra)


@cache
def _logger(room: str) -> logging.Logger:
    return logging.getLogger(f"everbeat.{room}")


def event_name(event: Event) -> str:
    """`worker_exited` for WorkerExited."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(event).__name__).lower()


def event_text(event: Event) -> str:
    """One line of key=value after the name; text of several lines follows below it, indented."""
    parts, below = [event_name(event)], ""
    unshown = event.unshown
    for field, value in asdict(event).items():
        if field in unshown:
            continue
        if isinstance(value, str) and "\n" in value.rstrip():
            below += f"\n{field}:\n" + "\n".join(f"  {line}" for line in value.rstrip().splitlines())
        else:
            parts.append(f"{field}={value_text(value)}")
    return visible(" ".join(parts) + below)
