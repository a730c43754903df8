"""Errors of tracing and of the integration with Sentry."""

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


class SentryNotInstalled(EverbeatError):
    """The program imports everbeat.sentry, but the package sentry-sdk is not installed."""

    code = "SENTRY_NOT_INSTALLED"

    def __init__(self) -> None:
        super().__init__(
            "everbeat.sentry needs the package sentry-sdk, which is not installed.",
            fix="run pip install 'everbeat[sentry]', or do not import everbeat.sentry.",
        )
