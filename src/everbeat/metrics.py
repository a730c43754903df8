"""The names for metrics: the recorder for OpenTelemetry, and the base class of recorders."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from everbeat.domain.metrics.meters import Meters as Meters
from everbeat.errors import OpenTelemetryNotInstalled as _NotInstalled

if TYPE_CHECKING:
    from everbeat.otel.metrics import OpenTelemetryMetrics as OpenTelemetryMetrics


def __getattr__(name: str) -> Any:
    if name != "OpenTelemetryMetrics":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return import_module("everbeat.otel.metrics").OpenTelemetryMetrics
    except ModuleNotFoundError as problem:
        if (problem.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise _NotInstalled from None
