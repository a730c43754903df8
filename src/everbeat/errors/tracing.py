"""Errors of tracing."""

from __future__ import annotations

from everbeat.errors.tree import EverbeatError


class OpenTelemetryNotInstalled(EverbeatError):
    """The app uses everbeat.tracing.OpenTelemetry, but the package opentelemetry-api is not installed."""

    code = "OPENTELEMETRY_NOT_INSTALLED"

    def __init__(self) -> None:
        super().__init__(
            "everbeat.tracing.OpenTelemetry needs the package opentelemetry-api, which is not installed.",
            fix="run pip install 'everbeat[otel]', or omit App(tracing=...).",
        )
