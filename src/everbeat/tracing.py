"""The names for tracing: the OpenTelemetry tracer, and the classes for your own tracers."""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from everbeat.domain.tracing.carrier import Carrier as Carrier
from everbeat.domain.tracing.model import PreviousAttempt as PreviousAttempt
from everbeat.domain.tracing.model import TracedAttempt as TracedAttempt
from everbeat.domain.tracing.model import TracedEnd as TracedEnd
from everbeat.domain.tracing.model import TracedRecovery as TracedRecovery
from everbeat.domain.tracing.model import TracedSend as TracedSend
from everbeat.domain.tracing.model import TracedWorkflow as TracedWorkflow
from everbeat.domain.tracing.model import Tracer as Tracer
from everbeat.errors import OpenTelemetryNotInstalled as _OpenTelemetryNotInstalled

if _TYPE_CHECKING:
    from everbeat.otel.spans import OpenTelemetry as OpenTelemetry

__all__ = [
    "Carrier",
    "OpenTelemetry",
    "PreviousAttempt",
    "TracedAttempt",
    "TracedEnd",
    "TracedRecovery",
    "TracedSend",
    "TracedWorkflow",
    "Tracer",
]


def __getattr__(name: str) -> _Any:
    if name != "OpenTelemetry":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return _import_module("everbeat.otel.spans").OpenTelemetry
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise _OpenTelemetryNotInstalled from None
