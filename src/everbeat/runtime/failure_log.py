"""Log failed attempts. This process logs up to 50 per second one by one, and the others as one summary record per second and type."""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from datetime import datetime
from time import monotonic
from typing import Final, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.task.outcome import error_from_json
from everbeat.domain.tracing.model import TraceIds
from everbeat.runtime.events import Event, log_event
from everbeat.runtime.fork import call_in_forked_child

MOST_A_SECOND: Final = 50
MOST_KINDS: Final = 100
"""The most failure types with their own summary record per second. User code chooses its error codes, so it can create any number of types."""
_OTHERS: Final = "(others)"

FailureKind: TypeAlias = tuple[type["FailedAttempt"], str, str, str]


class FailedAttempt(Event, frozen=True, kw_only=True):
    """An attempt failed. `type` is the full name of the exception class, or empty if the code raised no exception."""

    component = "worker"
    task_id: UUID
    name: str
    attempt: int
    code: str
    type: str
    message: str
    trace_ids: TraceIds | None = None


class TaskFailure(FailedAttempt, frozen=True, kw_only=True):
    """A task has become FAILED. `exception` is set if it was raised in this process. Otherwise `traceback` may hold the stored traceback."""

    level = logging.ERROR
    traceback: str = ""
    exception: BaseException | None = None

    @property
    def unshown(self) -> frozenset[str]:
        """Return the fields that are left out of the log line. The exception is in the record's `exc_info`."""
        return frozenset(("exception",) if self.traceback else ("exception", "traceback"))

    @property
    def exc_info(self) -> BaseException | None:
        """Return the exception if it was raised in this process, otherwise None."""
        return self.exception


class TaskRetry(FailedAttempt, frozen=True, kw_only=True):
    """An attempt failed, and its task will be retried in `retry_in_s` seconds, or at `run_at`."""

    level = logging.WARNING
    retry_in_s: float | None
    run_at: datetime | None = None

    @property
    def unshown(self) -> frozenset[str]:
        """Return the field that is left out of the log line: one of `retry_in_s` and `run_at` is not set."""
        return frozenset(("retry_in_s",) if self.retry_in_s is None else ("run_at",))


class StepRetry(FailedAttempt, frozen=True, kw_only=True):
    """A call of a durable step failed and will be retried in `retry_in_s` seconds. This will be retry number `retry` of `max_retries`."""

    level = logging.WARNING
    step: str
    retry: int
    max_retries: int
    retry_in_s: float


class TaskPostponed(Event, frozen=True, kw_only=True):
    """The code raised RetryLater, so the task runs again in `run_in_s` seconds, or at `run_at`. `code` is the stored error code."""

    component = "worker"
    level = logging.DEBUG
    task_id: UUID
    name: str
    attempt: int
    code: str
    reason: str
    run_in_s: float | None = None
    run_at: datetime | None = None
    trace_ids: TraceIds | None = None


class FailuresFolded(Event, frozen=True, kw_only=True):
    """The number of final failures of one type in the last second that were not logged separately. `task_id` is the last failed task."""

    component = "worker"
    level = logging.ERROR
    name: str
    code: str
    type: str
    count: int
    task_id: UUID


class RetriesFolded(FailuresFolded, frozen=True, kw_only=True):
    """The number of task or step retries of one type in the last second that were not logged separately. `task_id` is the last task."""

    level = logging.WARNING


def task_failure(
    task_id: UUID,
    name: str,
    *,
    attempt: int,
    error: bytes | str,
    exception: BaseException | None = None,
    trace_ids: TraceIds | None = None,
) -> TaskFailure:
    """Return the event for a task that became FAILED with the given stored error."""
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
        trace_ids=trace_ids,
    )


def task_retry(
    task_id: UUID,
    name: str,
    *,
    attempt: int,
    error: bytes | str,
    retry_in_s: float | None,
    run_at: datetime | None = None,
    trace_ids: TraceIds | None = None,
) -> TaskRetry:
    """Return the event for an attempt that failed with the given stored error and whose task will be retried."""
    known = error_from_json(error)
    return TaskRetry(
        task_id=task_id,
        name=name,
        attempt=attempt,
        code=known.code,
        type=known.type,
        message=known.message,
        retry_in_s=retry_in_s,
        run_at=run_at,
        trace_ids=trace_ids,
    )


class _Folded(Struct):
    count: int = 0
    last: UUID | None = None


class FailureLog:
    """A thread-safe event subscriber that logs events and summarizes excess failures."""

    def __init__(self, *, most: int = MOST_A_SECOND, every_s: float = 1.0) -> None:
        self._most = most
        self._every_s = every_s
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._began = 0.0
        self._told = 0
        self._folded: dict[FailureKind, _Folded] = {}

    def __call__(self, event: Event) -> None:
        """Log the event, or count it for the next summary record."""
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
        kind: FailureKind = (type(event), event.name, event.code, event.type)
        if kind not in self._folded and len(self._folded) >= MOST_KINDS:
            kind = (type(event), _OTHERS, "", "")
        if not self._folded:
            # A timer thread is used, because failures come from any thread and from loops that might close before the second is over.
            timer = threading.Timer(self._every_s, self.flush)
            timer.daemon = True
            timer.start()
        folded = self._folded.setdefault(kind, _Folded())
        folded.count, folded.last = folded.count + 1, event.task_id

    def flush(self) -> None:
        """Log the summary records of the failures that have been counted so far.

        If another thread is flushing, wait until that thread has logged its records too. A process can therefore flush and exit at once
        without losing the records of its timer thread. A log handler that blocks another thread's flush also blocks this call.
        """
        with self._flushing:
            with self._lock:
                folded, self._folded = self._folded, {}
            for (of, name, code, kind), one in folded.items():
                make: Callable[..., FailuresFolded] = FailuresFolded if of is TaskFailure else RetriesFolded
                log_event(make(name=name, code=code, type=kind, count=one.count, task_id=one.last))


LOG: Final = FailureLog()
"""The failure log of this process. All apps and workers in the process share the log's limit."""
atexit.register(LOG.flush)
