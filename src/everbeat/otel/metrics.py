"""Record metrics with OpenTelemetry's API. Without an SDK in the program, the API does nothing."""

from __future__ import annotations

from typing import Final

from opentelemetry import metrics
from opentelemetry.metrics import MeterProvider

from everbeat.domain.metrics.meters import Meters, Operation
from everbeat.domain.series import AttemptResult
from everbeat.domain.tracing import names

_BOUNDS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
"""The bounds that OpenTelemetry's conventions for messaging advise."""
_LONG_BOUNDS_S: Final = (*_BOUNDS_S, 30.0, 60.0, 300.0, 900.0, 3_600.0, 14_400.0, 86_400.0)


class OpenTelemetryMetrics(Meters):
    """Records metrics with the meter provider of OpenTelemetry's API, or with `provider`.

    app = App(metrics=OpenTelemetryMetrics())
    """

    def __init__(self, *, provider: MeterProvider | None = None) -> None:
        meter = (metrics if provider is None else provider).get_meter("everbeat")
        self._sent = meter.create_counter(
            names.SENT_MESSAGES, "{message}", "Tasks that this process has sent."
        )
        self._consumed = meter.create_counter(
            names.CONSUMED_MESSAGES, "{message}", "Attempts whose code began."
        )
        self._operation = meter.create_histogram(
            names.OPERATION_DURATION,
            "s",
            "The duration of sends, claims and settlements.",
            explicit_bucket_boundaries_advisory=_BOUNDS_S,
        )
        self._process = meter.create_histogram(
            names.PROCESS_DURATION,
            "s",
            "The time from the start of an attempt until its outcome was stored.",
            explicit_bucket_boundaries_advisory=_LONG_BOUNDS_S,
        )
        self._wait = meter.create_histogram(
            names.WAIT_DURATION,
            "s",
            "The time from due to started.",
            explicit_bucket_boundaries_advisory=_LONG_BOUNDS_S,
        )

    def sent(self, queue: str, name: str, /) -> None:
        """Count a task that was stored."""
        self._sent.add(1, _of_task(queue, name) | _of_operation("send"))

    def started(self, queue: str, name: str, /, *, wait_s: float) -> None:
        """Record the start of an attempt."""
        del name
        self._consumed.add(1, _of_queue(queue) | _of_operation("receive"))
        self._wait.record(wait_s, _of_queue(queue))

    def ended(
        self, queue: str, name: str, result: AttemptResult, /, *, run_s: float, error_type: str | None
    ) -> None:
        """Record the end of an attempt."""
        attributes = _of_task(queue, name) | {names.OPERATION_NAME: "process", names.OUTCOME: result}
        self._process.record(run_s, attributes | _of_error(error_type))

    def operated(
        self, operation: Operation, queue: str | None, /, *, took_s: float, error_type: str | None
    ) -> None:
        """Record a call of the database."""
        attributes = _of_operation(operation) | _of_error(error_type)
        self._operation.record(took_s, attributes | (_of_queue(queue) if queue is not None else _SYSTEM))


_SYSTEM: Final[dict[str, str]] = {names.SYSTEM: names.SYSTEM_NAME}


def _of_queue(queue: str) -> dict[str, str]:
    return _SYSTEM | {names.DESTINATION: queue}


def _of_task(queue: str, name: str) -> dict[str, str]:
    return _of_queue(queue) | {names.TASK_NAME: name}


def _of_operation(operation: Operation) -> dict[str, str]:
    return {names.OPERATION_NAME: operation, names.OPERATION_TYPE: operation}


def _of_error(error_type: str | None) -> dict[str, str]:
    return {} if error_type is None else {names.ERROR_TYPE: error_type}
