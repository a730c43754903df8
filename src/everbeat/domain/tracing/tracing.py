"""The tracers of an app, called in such a way that their errors never reach a send, a task or a recovery.

In a worker, this includes exceptions such as SystemExit. An attempt without an end would keep its lease. In a program that sends,
these exceptions belong to the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Generic, TypeAlias, TypeVar

from everbeat.domain.tracing.carrier import Carrier, encode_carrier, merged
from everbeat.domain.tracing.model import (
    TracedAttempt,
    TracedEnd,
    TracedRecovery,
    TracedSend,
    TracedWorkflow,
    TraceIds,
    Tracer,
)
from everbeat.errors import TaskStopped

T = TypeVar("T")
R = TypeVar("R")
TracerReport: TypeAlias = Callable[[Tracer, str, BaseException], None]
"""Reports that a method of a tracer raised an exception: the tracer, the method's name and the exception."""
_LONGEST_ID: Final = 100


class Tracing:
    """The tracers of an app. `report` is called at the first error of each method of each tracer."""

    def __init__(self, tracers: Sequence[Tracer], report: TracerReport) -> None:
        self.tracers = tuple(tracers)
        self._report = report
        self._reported: set[tuple[int, str]] = set()

    def database(self, host: str, port: int) -> None:
        """Note the database of the app."""
        self._each("database", lambda tracer: tracer.database(host, port))

    def sending(self, sends: Sequence[TracedSend]) -> Surround[Sequence[Carrier], list[str | None]]:
        """Surround the statement that sends these tasks, and give the JSON text of a carrier, or None, for each of them."""

        def texts(given: Sequence[Sequence[Carrier]]) -> list[str | None]:
            whole = [carriers for carriers in given if len(carriers) == len(sends)]
            return [encode_carrier(merged(each)) for each in zip(*whole, strict=True)] or [None] * len(sends)

        return Surround(self, "sending", lambda tracer: tracer.sending(sends), texts)

    def starting(self, workflow: TracedWorkflow) -> Surround[Carrier, str | None]:
        """Surround the statement that starts a workflow, and give the JSON text of its carrier, or None."""
        return Surround(
            self,
            "starting",
            lambda tracer: tracer.starting(workflow),
            lambda given: encode_carrier(merged(given)),
        )

    def running(self, attempt: TracedAttempt, end: TracedEnd) -> Surround[object, None]:
        """Surround the code of an attempt. The caller fills in `end` inside the block."""
        return Surround(
            self, "running", lambda tracer: tracer.running(attempt, end), _nothing, ignored=BaseException
        )

    def killed(self, attempt: TracedAttempt, end: TracedEnd, ended_at: datetime) -> None:
        """Note an attempt whose task process was killed, so that the code's surroundings did not exit."""
        self._each("killed", lambda tracer: tracer.killed(attempt, end, ended_at), ignored=BaseException)

    def step(self, name: str) -> Surround[object, None]:
        """Surround the call of a step's function."""
        return Surround(self, "step", lambda tracer: tracer.step(name), _nothing)

    def committing(self) -> Surround[object, None]:
        """Surround the block of a `Context.commit`."""
        return Surround(self, "committing", lambda tracer: tracer.committing(), _nothing)

    def step_recorded(self, name: str) -> None:
        """Note that a step is not called, because an earlier attempt recorded its result."""
        self._each("step_recorded", lambda tracer: tracer.step_recorded(name))

    def recovered(self, recoveries: Sequence[TracedRecovery]) -> None:
        """Note recoveries that were committed."""
        self._each("recovered", lambda tracer: tracer.recovered(recoveries), ignored=BaseException)

    def ids(self) -> TraceIds | None:
        """Return the trace id and the span id for log records of the running code, or None."""
        found = self._each("ids", lambda tracer: _checked(tracer.ids()), ignored=BaseException)
        return next((ids for ids in found if ids is not None), None)

    def failed(self, tracer: Tracer, method: str, problem: BaseException) -> None:
        """Report an error of a tracer, unless the same method of the tracer has failed before."""
        if (place := (id(tracer), method)) not in self._reported:
            self._reported.add(place)
            self._report(tracer, method, problem)

    def _each(
        self,
        method: str,
        call: Callable[[Tracer], T],
        *,
        ignored: type[BaseException] = Exception,
    ) -> list[T]:
        found: list[T] = []
        for tracer in self.tracers:
            try:
                found.append(call(tracer))
            except TaskStopped:
                raise
            except ignored as problem:  # a tracer must not break the work that it observes
                self.failed(tracer, method, problem)
        return found


class Surround(AbstractContextManager[R], Generic[T, R]):
    """The context managers of all tracers around one operation. They cannot suppress the operation's exceptions.

    `ignored` are the exceptions of tracers that do not reach the operation. TaskStopped always does.
    """

    __slots__ = ("_entered", "_ignored", "_joined", "_make", "_method", "_tracing")

    def __init__(
        self,
        tracing: Tracing,
        method: str,
        make: Callable[[Tracer], AbstractContextManager[T]],
        joined: Callable[[Sequence[T]], R],
        *,
        ignored: type[BaseException] = Exception,
    ) -> None:
        self._tracing = tracing
        self._method = method
        self._make = make
        self._joined = joined
        self._ignored = ignored
        self._entered: list[tuple[Tracer, AbstractContextManager[Any]]] = []

    def __enter__(self) -> R:
        given: list[T] = []
        for tracer in self._tracing.tracers:
            try:
                manager = self._make(tracer)
                given.append(manager.__enter__())
                self._entered.append((tracer, manager))
            except TaskStopped:
                raise
            except self._ignored as problem:  # a tracer must not break the work that it observes
                self._tracing.failed(tracer, self._method, problem)
        try:
            return self._joined(given)
        except Exception as problem:  # noqa: BLE001 - a tracer might give anything as a carrier
            self._tracing.failed(self._tracing.tracers[0], self._method, problem)
            return self._joined([])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tracer, manager in reversed(self._entered):
            try:
                manager.__exit__(kind, error, trace)
            except TaskStopped:
                raise
            except self._ignored as problem:  # as above
                if problem is not error:
                    self._tracing.failed(tracer, self._method, problem)


def _checked(ids: TraceIds | None) -> TraceIds | None:
    """Return the ids of a tracer. Raises ValueError if they cannot be a part of log lines and carriers."""
    if ids is None:
        return None
    trace_id, span_id = ids
    for each in (trace_id, span_id):
        if not (isinstance(each, str) and each.isprintable() and len(each) <= _LONGEST_ID):
            raise ValueError(f"an id is not a printable text of at most {_LONGEST_ID} characters")
    return trace_id, span_id


def _nothing(given: Sequence[object]) -> None:
    del given
