"""Log records about failed attempts: one each up to 50 a second in this process, beyond that one a second for each name and class.

What lives here: these events, and the subscriber that logs all events. What may not: who emits them.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.failure import error_from_json
from everbeat.runtime.events import Event, log_event
from everbeat.runtime.fork import call_in_forked_child

MOST_A_SECOND: Final = 50
MOST_KINDS: Final = 100
"""Code chooses its error codes, so it could make any number of kinds. More than this in a second are folded into one."""
_OTHERS: Final = "(others)"

Kind: TypeAlias = tuple[type["FailedAttempt"], str, str, str]


class FailedAttempt(Event, frozen=True, kw_only=True):
    """An attempt failed; `type` is the full name of the exception's class, empty where the code raised none."""

    room = "worker"
    task_id: UUID
    name: str
    attempt: int
    code: str
    type: str
    message: str


class TaskFailure(FailedAttempt, frozen=True, kw_only=True):
    """A task ended FAILED. The `exception` is there if it was raised in this process, otherwise the stored `traceback` if there is one."""

    level = logging.ERROR
    traceback: str = ""
    exception: BaseException | None = None

    @property
    def unshown(self) -> frozenset[str]:
        """The exception belongs into the record's `exc_info`."""
        return frozenset(("exception",) if self.traceback else ("exception", "traceback"))

    @property
    def exc_info(self) -> BaseException | None:
        """The exception."""
        return self.exception


class TaskRetry(FailedAttempt, frozen=True, kw_only=True):
    """An attempt failed, and its task runs again after `retry_in_s` seconds."""

    level = logging.WARNING
    retry_in_s: float


class FailuresFolded(Event, frozen=True, kw_only=True):
    """Final failures of one kind of the last second that have no record of their own; `task_id` is the last one."""

    room = "worker"
    level = logging.ERROR
    name: str
    code: str
    type: str
    count: int
    task_id: UUID


class RetriesFolded(FailuresFolded, frozen=True, kw_only=True):
    """Retries of one kind of the last second that have no record of their own; `task_id` is the last one."""

    level = logging.WARNING


def task_failure(
    task_id: UUID, name: str, *, attempt: int, error: bytes | str, exception: BaseException | None = None
) -> TaskFailure:
    """Return the event of a task that ended FAILED with this stored error."""
    known = error_from_json(error)
    return TaskFailure(
        task_id=task_id,
        name=name,
        attempt=attempt,
        code=known.code,
        type=known.type,
        message=known.message,
        traceback=known.traceback if exception is None else "",
        exception=exception,
    )


def task_retry(task_id: UUID, name: str, *, attempt: int, error: bytes | str, retry_in_s: float) -> TaskRetry:
    """Return the event of a failed attempt with this stored error, after which the task runs again."""
    known = error_from_json(error)
    return TaskRetry(
        task_id=task_id,
        name=name,
        attempt=attempt,
        code=known.code,
        type=known.type,
        message=known.message,
        retry_in_s=retry_in_s,
    )


class _Folded(Struct):
    count: int = 0
    last: UUID | None = None


class FailureLog:
    """The subscriber that logs events; usable from any thread."""

    def __init__(self, *, most: int = MOST_A_SECOND, every_s: float = 1.0) -> None:
        self._most = most
        self._every_s = every_s
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._began = 0.0
        self._told = 0
        self._folded: dict[Kind, _Folded] = {}

    def __call__(self, event: Event) -> None:
        """Log the event, or count it for the next folded record."""
        if not isinstance(event, FailedAttempt) or self._has_room(event):
            log_event(event)

    def _has_room(self, event: FailedAttempt) -> bool:
        with self._lock:
            now = monotonic()
            if now - self._began >= self._every_s:
                self._began, self._told = now, 0
            if self._told < self._most:
                self._told += 1
                return True
            self._fold(event)
            return False

    def _fold(self, event: FailedAttempt) -> None:
        kind: Kind = (type(event), event.name, event.code, event.type)
        if kind not in self._folded and len(self._folded) >= MOST_KINDS:
            kind = (type(event), _OTHERS, "", "")
        if not self._folded:
            # A thread of its own: failures come from any thread, and from loops that may end before the second does.
            timer = threading.Timer(self._every_s, self.flush)
            timer.daemon = True
            timer.start()
        folded = self._folded.setdefault(kind, _Folded())
        folded.count, folded.last = folded.count + 1, event.task_id

    def flush(self) -> None:
        """Log what is folded so far."""
        with self._lock:
            folded, self._folded = self._folded, {}
        for (of, name, code, kind), one in folded.items():
            make: Callable[..., FailuresFolded] = FailuresFolded if of is TaskFailure else RetriesFolded
            log_event(make(name=name, code=code, type=kind, count=one.count, task_id=one.last))


LOG: Final = FailureLog()
"""Of this process: its limit is one for all apps and workers in it."""
atexit.register(LOG.flush)
