"""The OpenTelemetry tracer: spans of sends, attempts, steps, commits, recoveries and ticks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from traceback import format_exception
from typing import Any, Final, Literal

from opentelemetry import context as contexts
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode, TracerProvider

from everbeat.domain.settings.checks import one_of, public
from everbeat.domain.task.current import current_attempt
from everbeat.domain.tracing import names
from everbeat.domain.tracing.carrier import Carrier
from everbeat.domain.tracing.model import (
    PreviousAttempt,
    TracedAttempt,
    TracedEnd,
    TracedRecovery,
    TracedSend,
    TracedWorkflow,
    TraceIds,
    Tracer,
)
from everbeat.errors import UNHANDLED_EXCEPTION, WORKER_CRASHED
from everbeat.errors.wording import class_name, safe_text

MOST_CREATED: Final = 100
"""The largest send of many tasks for which each task gets its own span."""
_LONGEST_TEXT: Final = 1_000
_LONGEST_STACK: Final = 16_000
_PLAIN: Final = (str, bool, int, float)
_Attributes = dict[str, str | bool | int | float | Sequence[str]]


@public
class OpenTelemetry(Tracer):
    """Creates OpenTelemetry spans with the API's tracer provider, or with `provider`.

    With `trace="link"`, each attempt begins a new trace, which is linked to the send. With "parent", the attempt is a child of the
    send, in the same trace. `labels` are the names of the labels that spans get as attributes.

        app = App(tracing=OpenTelemetry())
    """

    def __init__(
        self,
        *,
        trace: Literal["link", "parent"] = "link",
        labels: Iterable[str] = (),
        provider: TracerProvider | None = None,
    ) -> None:
        self._is_parent = one_of("link", "parent")(trace, subject="OpenTelemetry.trace") == "parent"
        self._labels = frozenset(labels)
        self._tracer = _tracer(provider)
        self._server: _Attributes = {}
        self._databases = 0

    def database(self, host: str, port: int, /) -> None:
        """Name the server in the spans of sends, attempts and recoveries, unless apps with different databases share this tracer."""
        server: _Attributes = {names.SERVER_ADDRESS: host, names.SERVER_PORT: port}
        self._databases += server != self._server
        self._server = server if self._databases == 1 else {}

    @contextmanager
    def sending(self, sends: Sequence[TracedSend], /) -> Iterator[Sequence[Carrier]]:
        """Create the spans of a send. Each task of a send of up to 100 tasks gets its own span."""
        if len(sends) == 1:
            (send,) = sends
            attributes = self._sent(send) | _operation("send", "send", send.queue)
            with self._span(f"send {send.queue}", SpanKind.PRODUCER, attributes):
                yield [_carrier()]
            return
        queues = sorted({send.queue for send in sends})
        shown = queues[0] if len(queues) == 1 else ""
        attributes = self._server | _operation("send", "send", shown) | {names.BATCH_COUNT: len(sends)}
        with self._span(f"send {shown}".rstrip(), SpanKind.CLIENT, attributes):
            yield (
                [self._created(send) for send in sends]
                if len(sends) <= MOST_CREATED
                else [_carrier()] * len(sends)
            )

    def _created(self, send: TracedSend) -> Carrier:
        attributes = self._sent(send) | _operation("create", "create", send.queue)
        with self._span(f"create {send.queue}", SpanKind.PRODUCER, attributes):
            return _carrier()

    @contextmanager
    def starting(self, workflow: TracedWorkflow, /) -> Iterator[Carrier]:
        """Create the span of a workflow's start. The attempts of its tasks are linked to this span."""
        attributes: _Attributes = self._server | {
            names.SYSTEM: names.SYSTEM_NAME, names.OPERATION_NAME: "start", names.OPERATION_TYPE: "create",
            names.CONVERSATION_ID: str(workflow.workflow_id), names.WORKFLOW_ID: str(workflow.workflow_id),
            names.WORKFLOW_NAME: workflow.name, names.WORKFLOW_NODES: workflow.nodes, **_key(workflow.key),
        }  # fmt: skip
        with self._span(f"start {workflow.name}", SpanKind.PRODUCER, attributes):
            yield _carrier()

    @contextmanager
    def running(self, attempt: TracedAttempt, end: TracedEnd, /) -> Iterator[None]:
        """Create the span of an attempt, and make it current in the task's code."""
        span, around = self._begun(attempt)
        token = contexts.attach(trace.set_span_in_context(span, around))
        try:
            yield
        finally:
            contexts.detach(token)
            _close(span, end)

    def killed(self, attempt: TracedAttempt, end: TracedEnd, ended_at: datetime, /) -> None:
        """Create the span of an attempt whose task process was killed, so that it could not end its span."""
        began_at = attempt.started_at or ended_at
        span, _ = self._begun(attempt, at=began_at)
        span.set_attribute(names.SYNTHESIZED, True)
        _close(span, end, at=max(began_at, ended_at))

    def _begun(self, attempt: TracedAttempt, *, at: datetime | None = None) -> tuple[Span, Context]:
        """Start the span of an attempt, now or at a time in the past, and return it with the context around it."""
        carrier = attempt.carrier
        if not carrier and attempt.tick is not None and attempt.attempt == 1:
            carrier = self._ticked(attempt)
        around, links = self._around(carrier)
        links += [_link_to(attempt.previous)] if attempt.previous is not None else []
        span = self._tracer.start_span(
            f"process {attempt.queue}", around, SpanKind.CONSUMER, self._attempt(attempt), links,
            start_time=None if at is None else _ns(at),
        )  # fmt: skip
        return span, around

    @contextmanager
    def step(self, name: str, /) -> Iterator[None]:
        """Create the span of a step's function."""
        attributes = _inside() | {names.STEP: name}
        with self._span(names.STEP_SPAN.format(name), SpanKind.INTERNAL, attributes):
            yield

    def step_recorded(self, name: str, /) -> None:
        """Add an event to the span of the attempt."""
        trace.get_current_span().add_event(names.STEP_RECORDED, {names.STEP: name})

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Create the span of a commit's block."""
        with self._span(names.COMMIT_SPAN, SpanKind.INTERNAL, _inside()):
            yield

    def recovered(self, recoveries: Sequence[TracedRecovery], /) -> None:
        """Create the span that the dead process could not end, and the span of the recovery."""
        for recovery in recoveries:
            around, links = self._around(recovery.carrier)
            dead = self._died(recovery, around, links)
            if dead is not None:
                links = [*links, Link(dead, {names.LINK: "attempt"})]
            noticed_at = _later(recovery.last_beat_at or recovery.recovered_at, recovery.certificate)
            span = self._tracer.start_span(
                names.RECOVER_SPAN, around, SpanKind.INTERNAL, self._server | _recovery(recovery), links,
                start_time=_ns(min(noticed_at, recovery.recovered_at)),
            )  # fmt: skip
            span.end(_ns(recovery.recovered_at))

    def ids(self) -> TraceIds | None:
        """Return the ids of the current span."""
        found = trace.get_current_span().get_span_context()
        return (
            (trace.format_trace_id(found.trace_id), trace.format_span_id(found.span_id))
            if found.is_valid
            else None
        )

    def _around(self, carrier: Carrier) -> tuple[Context, list[Link]]:
        """Return the context in which an attempt runs, and its links to the send."""
        around = propagate.extract(dict(carrier), context=Context())
        sent = trace.get_current_span(around).get_span_context()
        if self._is_parent or not sent.is_valid:
            return around, []
        return trace.set_span_in_context(trace.INVALID_SPAN, around), [Link(sent, {names.LINK: "send"})]

    def _ticked(self, attempt: TracedAttempt) -> Carrier:
        """Create the spans of the tick that sent the task. The supervisor that sent it runs no user code, and so has no tracer."""
        assert attempt.tick is not None
        schedule = attempt.schedule or ""
        sent_at = attempt.sent_at or attempt.due_at
        made: _Attributes = {
            names.SYNTHESIZED: True,
            names.SCHEDULE: schedule,
            names.TICK: attempt.tick.isoformat(),
        }
        tick = self._tracer.start_span(
            names.TICK_SPAN.format(schedule), Context(), SpanKind.INTERNAL, made,
            start_time=_ns(min(attempt.tick, sent_at)),
        )  # fmt: skip
        inside = trace.set_span_in_context(tick, Context())
        attributes = made | _message(attempt) | _operation("send", "send", attempt.queue)
        send = self._tracer.start_span(
            f"send {attempt.queue}", inside, SpanKind.PRODUCER, attributes, start_time=_ns(sent_at)
        )
        carrier: dict[str, str] = {}
        propagate.inject(carrier, trace.set_span_in_context(send, inside))
        send.end(_ns(sent_at))
        tick.end(_ns(sent_at))
        return carrier

    def _died(self, recovery: TracedRecovery, around: Context, links: Sequence[Link]) -> SpanContext | None:
        """Create the span of an attempt whose process died, if its code had started."""
        if recovery.started_at is None:
            return None
        span = self._tracer.start_span(
            f"process {recovery.queue}", around, SpanKind.CONSUMER, self._server | _death(recovery), links,
            start_time=_ns(recovery.started_at),
        )  # fmt: skip
        span.set_status(Status(StatusCode.ERROR, recovery.cause[:_LONGEST_TEXT]))
        span.end(_ns(max(recovery.started_at, recovery.last_beat_at or recovery.started_at)))
        return span.get_span_context()

    def _sent(self, send: TracedSend) -> _Attributes:
        found: _Attributes = {
            names.TASK_NAME: send.name, names.BODY_SIZE: send.size, **_key(send.key), **self._server,
        }  # fmt: skip
        if send.task_id is not None:
            found[names.MESSAGE_ID] = str(send.task_id)
        if send.parent_id is not None:
            found[names.PARENT_ID] = str(send.parent_id)
        return found | self._chosen(send.labels)

    def _attempt(self, attempt: TracedAttempt) -> _Attributes:
        found = _message(attempt) | _operation("process", "process", attempt.queue) | {
            names.CLIENT_ID: attempt.worker_id, names.BODY_SIZE: attempt.size, names.ATTEMPT: attempt.attempt,
            names.RETRY_COUNT: attempt.retry_count, names.CRASH_COUNT: attempt.crash_count, names.FENCE: attempt.fence,
            **_key(attempt.key), **_workflow(attempt), **self._chosen(attempt.labels), **self._server,
        }  # fmt: skip
        if attempt.started_at is not None:
            waited = attempt.started_at - attempt.due_at
            found[names.WAIT_MS] = max(0, round(waited.total_seconds() * 1_000))
        if attempt.limits:
            found[names.LIMIT] = attempt.limits
        if attempt.parent_id is not None:
            found[names.PARENT_ID] = str(attempt.parent_id)
        if attempt.schedule is not None:
            found[names.SCHEDULE] = attempt.schedule
        return found

    def _chosen(self, labels: Mapping[str, str]) -> _Attributes:
        return {f"{names.LABEL}{name}": text for name, text in labels.items() if name in self._labels}

    @contextmanager
    def _span(self, name: str, kind: SpanKind, attributes: _Attributes) -> Iterator[Span]:
        with self._tracer.start_as_current_span(
            name, kind=kind, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:
                _fail(span, type(error).__name__, error=error)
                raise


def _tracer(provider: TracerProvider | None) -> trace.Tracer:
    return trace.get_tracer("everbeat", tracer_provider=provider)


def _carrier() -> Carrier:
    """Return the carrier of the current span."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return carrier


def _inside() -> _Attributes:
    """Return the id of the running task, by which a span can be found if the span of its attempt was lost."""
    attempt = current_attempt()
    return {} if attempt is None else {names.MESSAGE_ID: str(attempt.task_id)}


def _operation(name: str, kind: str, queue: str) -> _Attributes:
    found: _Attributes = {
        names.SYSTEM: names.SYSTEM_NAME, names.OPERATION_NAME: name, names.OPERATION_TYPE: kind,
    }  # fmt: skip
    return found | {names.DESTINATION: queue} if queue else found


def _message(one: TracedAttempt | TracedRecovery) -> _Attributes:
    found: _Attributes = {names.MESSAGE_ID: str(one.task_id), names.TASK_NAME: one.name}
    return found | {names.CONVERSATION_ID: str(one.workflow_id)} if one.workflow_id is not None else found


def _key(key: str | None) -> _Attributes:
    return {} if key is None else {names.KEY: key}


def _workflow(attempt: TracedAttempt) -> _Attributes:
    if attempt.workflow_id is None:
        return {}
    found: _Attributes = {names.WORKFLOW_ID: str(attempt.workflow_id)}
    return found if attempt.node is None else found | {names.WORKFLOW_NODE: attempt.node}


def _recovery(recovery: TracedRecovery) -> _Attributes:
    return _message(recovery) | {
        names.SYSTEM: names.SYSTEM_NAME, names.DESTINATION: recovery.queue, names.ATTEMPT: recovery.attempt,
        names.RECOVERY_ACTION: recovery.action, names.CLIENT_ID: recovery.recovered_by,
    }  # fmt: skip


def _death(recovery: TracedRecovery) -> _Attributes:
    """Return the attributes of a dead attempt's span, with what its death certificate says."""
    facts = {f"{names.CERTIFICATE}{name}": fact for name, fact in recovery.certificate.items()}
    return _message(recovery) | _operation("process", "process", recovery.queue) | {
        names.CLIENT_ID: recovery.worker_id, names.ATTEMPT: recovery.attempt, names.FENCE: recovery.fence,
        names.SYNTHESIZED: True, names.ERROR_TYPE: WORKER_CRASHED, names.OUTCOME: "crashed",
        f"{names.CERTIFICATE}cause": recovery.cause, f"{names.CERTIFICATE}noticed_by": recovery.noticed_by,
        **{name: fact for name, fact in facts.items() if isinstance(fact, _PLAIN)},
    }  # fmt: skip


def _link_to(previous: PreviousAttempt) -> Link:
    context = SpanContext(int(previous.trace_id, 16), int(previous.span_id, 16), is_remote=True)
    return Link(context, {names.LINK: "attempt", names.ATTEMPT: previous.number})


def _close(span: Span, end: TracedEnd, *, at: datetime | None = None) -> None:
    try:
        if end.how is not None:
            span.set_attribute(names.OUTCOME, end.how)
        if end.how in (None, "failed", "declined"):
            code = (
                None if end.code == UNHANDLED_EXCEPTION else end.code
            )  # the class says more, as in the metrics
            _fail(span, code or end.type or end.code or "unknown", error=end.exception, message=end.message)
    finally:
        span.end(None if at is None else _ns(at))


def _fail(span: Span, kind: str, *, error: BaseException | None = None, message: str | None = None) -> None:
    span.set_attribute(names.ERROR_TYPE, kind)
    span.set_status(Status(StatusCode.ERROR, (message or kind)[:_LONGEST_TEXT]))
    if isinstance(error, Exception):
        # Not `record_exception`: the text of a user's exception can raise, and a lone surrogate makes an exporter drop a whole batch.
        facts = {
            "exception.type": class_name(type(error)),
            "exception.message": safe_text(error, limit=_LONGEST_TEXT),
            "exception.stacktrace": safe_text(error, limit=_LONGEST_STACK, render=_stack),
        }
        span.add_event("exception", facts)


def _stack(error: object) -> str:
    assert isinstance(error, BaseException)
    return "".join(format_exception(error))


def _later(moment: datetime, certificate: Mapping[str, Any]) -> datetime:
    """Return when the death was noticed, or `moment` if the certificate does not say so."""
    noticed = certificate.get("detected_at")
    try:
        return max(moment, datetime.fromisoformat(noticed)) if isinstance(noticed, str) else moment
    except (ValueError, TypeError):
        return moment


def _ns(moment: datetime) -> int:
    """Return the moment in nanoseconds since 1970."""
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000_000 + since.microseconds * 1_000
