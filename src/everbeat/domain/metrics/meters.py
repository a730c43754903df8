"""The base class of recorders of metrics in the processes that run an app's code, and the counter that calls them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, TypeAlias

import msgspec
from msgspec import Struct

from everbeat.domain.series import AttemptResult, RateCounter
from everbeat.errors import UNHANDLED_EXCEPTION

Operation: TypeAlias = Literal["send", "receive", "settle"]
_FAILED: Final = frozenset({"failed", "retried"})
_UNKNOWN: Final = "_OTHER"


class Meters:
    """The base class of recorders of metrics. Each method does nothing.

    The methods are called on event loops and in threads, so they must not wait. An exception that a method raises is logged once.
    """

    def sent(self, queue: str, name: str, /) -> None:
        """Count a task that was stored."""

    def started(self, queue: str, name: str, /, *, wait_s: float) -> None:
        """Record an attempt whose code begins `wait_s` seconds after its task was due."""

    def ended(
        self, queue: str, name: str, result: AttemptResult, /, *, run_s: float, error_type: str | None
    ) -> None:
        """Record an attempt that ended `run_s` seconds after its code began. `error_type` is a code or a class if it failed."""

    def operated(
        self, operation: Operation, queue: str | None, /, *, took_s: float, error_type: str | None
    ) -> None:
        """Record a call of the database. `queue` is None if it concerned several queues."""


class GuardedMeters(Meters):
    """Calls the recorders of an app in such a way that their errors never reach a send or an attempt.

    In a worker, this includes exceptions such as SystemExit, as for tracers.
    """

    def __init__(self, meters: Meters, report: Callable[[Meters, str, BaseException], None]) -> None:
        self._meters = meters
        self._report = report
        self._reported: set[str] = set()

    def sent(self, queue: str, name: str, /) -> None:
        """Count a task that was stored."""
        self._safely("sent", lambda: self._meters.sent(queue, name))

    def started(self, queue: str, name: str, /, *, wait_s: float) -> None:
        """Record the start of an attempt."""
        self._safely(
            "started",
            lambda: self._meters.started(queue, name, wait_s=wait_s),
            ignored=BaseException,
        )

    def ended(
        self, queue: str, name: str, result: AttemptResult, /, *, run_s: float, error_type: str | None
    ) -> None:
        """Record the end of an attempt."""
        self._safely(
            "ended",
            lambda: self._meters.ended(queue, name, result, run_s=run_s, error_type=error_type),
            ignored=BaseException,
        )

    def operated(
        self, operation: Operation, queue: str | None, /, *, took_s: float, error_type: str | None
    ) -> None:
        """Record a call of the database."""
        self._safely(
            "operated",
            lambda: self._meters.operated(operation, queue, took_s=took_s, error_type=error_type),
        )

    def _safely(
        self, method: str, call: Callable[[], None], *, ignored: type[BaseException] = Exception
    ) -> None:
        try:
            call()
        except ignored as problem:  # a recorder must not break the work that it measures
            if method not in self._reported:
                self._reported.add(method)
                self._report(self._meters, method, problem)


class MeteredRates(RateCounter):
    """A counter of attempts that also calls the recorders of an app."""

    def __init__(self, meters: Meters) -> None:
        super().__init__()
        self._meters = meters

    def ended(
        self,
        queue: str,
        name: str,
        result: AttemptResult,
        run_s: float | None = None,
        error: bytes | None = None,
    ) -> None:
        """Count an attempt that ended, and record it if its run time is known."""
        super().ended(queue, name, result, run_s)
        if run_s is not None:
            error_type = error_type_of(error) if result in _FAILED else None
            self._meters.ended(queue, name, result, run_s=max(0.0, run_s), error_type=error_type)

    def _count_waits(self, queue: str, name: str, waits: list[float]) -> None:
        for wait_s in waits:
            self._meters.started(queue, name, wait_s=max(0.0, wait_s))
        super()._count_waits(queue, name, waits)

    def _count_runs(self, queue: str, name: str, runs: list[float]) -> None:
        for run_s in runs:
            self._meters.ended(queue, name, "completed", run_s=max(0.0, run_s), error_type=None)
        super()._count_runs(queue, name, runs)


class _StoredError(Struct):
    code: str | None = None
    type: str | None = None


def error_type_of(error: bytes | None) -> str:
    """Return the code of a stored error, or the exception class if the code only says that the code raised an exception."""
    if error is None:
        return _UNKNOWN
    try:
        found = msgspec.json.decode(error, type=_StoredError)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return _UNKNOWN
    is_plain = found.code in (None, UNHANDLED_EXCEPTION)
    return (found.type if is_plain and found.type else found.code) or _UNKNOWN
