"""Tracing with OpenTelemetry. Only the package `opentelemetry-api` is needed, and it is loaded only by apps that use it."""
