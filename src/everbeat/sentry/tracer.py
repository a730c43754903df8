"""The tracer that creates Sentry's spans of sends and attempts, and reports their failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import sentry_sdk
from sentry_sdk.crons import MonitorStatus, capture_checkin
from sentry_sdk.tracing import Span

from everbeat.domain.tracing import names
from everbeat.domain.tracing.carrier import NO_CARRIER, Carrier
from everbeat.domain.tracing.model import (
    TracedAttempt,
    TracedEnd,
    TracedRecovery,
    TracedSend,
    TracedWorkflow,
    Tracer,
)
from everbeat.runtime.clock import SystemClock
from everbeat.sentry.events import ORIGIN, Incidents, about, capture_failure

if TYPE_CHECKING:
    from everbeat.sentry.integration import EverbeatIntegration

PUBLISH: Final = "queue.publish"
PROCESS: Final = "queue.process"
TRANSACTION: Final = "queue.task.everbeat"
MOST_SPANS: Final = 100
"""Up to how many tasks of one send have a span each."""
_LATENCY: Final = "messaging.message.receive.latency"
_RETRIES: Final = "messaging.message.retry.count"
_FAILED: Final = frozenset({"failed", "declined", None})
_UNFINISHED: Final = frozenset({"suspended", "postponed"})


class SentryTracer(Tracer):
    """Creates Sentry's spans and events. `active` returns the integration of the current client, or None."""

    def __init__(self, active: Callable[[], EverbeatIntegration | None]) -> None:
        self._active = active
        self._incidents = Incidents()

    @contextmanager
    def sending(self, sends: Sequence[TracedSend], /) -> Iterator[Sequence[Carrier]]:
        """Create a span for each task of a send, or one span for more than 100 tasks."""
        integration = self._active()
        if integration is None:
            yield [NO_CARRIER] * len(sends)
            return
        stores = integration.propagate_traces
        if len(sends) == 1:
            with _span(PUBLISH, sends[0].name) as span:
                _describe(span, _of_send(sends[0]))
                yield [_carrier(span, stores=stores)]
            return
        queues = sorted({send.queue for send in sends})
        with _span(PUBLISH, "send_many") as whole:
            _describe(whole, {names.BATCH_COUNT: len(sends), names.DESTINATION: ",".join(queues)})
            if len(sends) > MOST_SPANS:
                yield [_carrier(whole, stores=stores)] * len(sends)
                return
            spans = [whole.start_child(op=PUBLISH, name=send.name, origin=ORIGIN) for send in sends]
            for span, send in zip(spans, sends, strict=True):
                _describe(span, _of_send(send))
            try:
                yield [_carrier(span, stores=stores) for span in spans]
            finally:
                for span in spans:
                    span.finish()

    @contextmanager
    def starting(self, workflow: TracedWorkflow, /) -> Iterator[Carrier]:
        """Create a span for the start of a workflow. Its tasks continue this trace."""
        integration = self._active()
        if integration is None:
            yield NO_CARRIER
            return
        with _span(PUBLISH, workflow.name) as span:
            _describe(
                span, {names.MESSAGE_ID: str(workflow.workflow_id), names.WORKFLOW_NODES: workflow.nodes}
            )
            yield _carrier(span, stores=integration.propagate_traces)

    @contextmanager
    def running(self, attempt: TracedAttempt, end: TracedEnd, /) -> Iterator[object]:
        """Create the transaction of an attempt, and report its failure unless the task runs again."""
        integration = self._active()
        if integration is None:
            yield None
            return
        with sentry_sdk.isolation_scope() as scope:
            scope.clear_breadcrumbs()
            scope.add_event_processor(about(attempt, integration.hide))
            transaction = sentry_sdk.continue_trace(
                dict(attempt.carrier), op=TRANSACTION, name=attempt.name, source="task", origin=ORIGIN
            )
            sampled = {"everbeat_task": {"task": attempt.name, "queue": attempt.queue}}
            is_monitored = integration.monitor_schedules and attempt.schedule is not None
            checks = _check_in(attempt, end) if is_monitored else nullcontext()
            with sentry_sdk.start_transaction(transaction, custom_sampling_context=sampled) as whole:
                with _span(PROCESS, attempt.name) as span, checks:
                    _describe(span, _of_attempt(attempt))
                    yield None
                    for each in (span, whole):
                        each.set_status(_status(end))
                if end.how in _FAILED and (integration.capture_retries or not end.will_retry):
                    capture_failure(attempt, end)

    def killed(self, attempt: TracedAttempt, end: TracedEnd, ended_at: datetime, /) -> None:
        """Report the failure of an attempt whose task process was killed, so that it could not report it."""
        del ended_at
        integration = self._active()
        if (
            integration is None
            or end.how not in _FAILED
            or (end.will_retry and not integration.capture_retries)
        ):
            return
        with sentry_sdk.isolation_scope() as scope:
            scope.add_event_processor(about(attempt, integration.hide))
            capture_failure(attempt, end)

    def recovered(self, recoveries: Sequence[TracedRecovery], /) -> None:
        """Report deaths of workers, one event for each incident."""
        if self._active() is not None:
            self._incidents.capture(recoveries)


def _span(op: str, name: str) -> Any:
    return sentry_sdk.start_span(op=op, name=name, origin=ORIGIN)


def _describe(span: Span, facts: dict[str, Any]) -> None:
    for name, value in ({names.SYSTEM: names.SYSTEM_NAME} | facts).items():
        span.set_data(name, value)


def _of_send(send: TracedSend) -> dict[str, Any]:
    task_id = {} if send.task_id is None else {names.MESSAGE_ID: str(send.task_id)}
    return task_id | {names.DESTINATION: send.queue, names.BODY_SIZE: send.size}


def _of_attempt(attempt: TracedAttempt) -> dict[str, Any]:
    began_at = attempt.started_at or SystemClock().wall()
    latency_ms = (began_at - attempt.due_at).total_seconds() * 1_000
    return {
        names.MESSAGE_ID: str(attempt.task_id),
        names.DESTINATION: attempt.queue,
        names.BODY_SIZE: attempt.size,
        _LATENCY: round(max(0.0, latency_ms)),
        _RETRIES: attempt.retry_count,
        names.ATTEMPT: attempt.attempt,
    }


def _carrier(span: Span, *, stores: bool) -> Carrier:
    if not stores:
        return NO_CARRIER
    return dict(sentry_sdk.get_current_scope().iter_trace_propagation_headers(span=span))


def _status(end: TracedEnd) -> str:
    if end.how in _FAILED:
        return "internal_error"
    return "aborted" if end.how == "cancelled" else "ok"


@contextmanager
def _check_in(attempt: TracedAttempt, end: TracedEnd) -> Iterator[None]:
    """Send check-ins of a schedule's run. A run that sleeps or runs again is still in progress."""
    slug, began_at = attempt.schedule, monotonic()
    check_in = capture_checkin(monitor_slug=slug, status=MonitorStatus.IN_PROGRESS)
    yield
    if end.how in _UNFINISHED or end.will_retry:
        return
    status = MonitorStatus.ERROR if end.how in _FAILED else MonitorStatus.OK
    capture_checkin(monitor_slug=slug, check_in_id=check_in, status=status, duration=monotonic() - began_at)
