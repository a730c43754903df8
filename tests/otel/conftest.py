"""Fixtures: the spans that a real OpenTelemetry SDK has exported, and an app that is traced with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from everbeat import App
from everbeat.store.target import Target
from everbeat.tracing import OpenTelemetry, Tracer

NewApp = Callable[..., App]


class Exported:
    """The spans that have ended."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> list[ReadableSpan]:
        return list(self.exporter.get_finished_spans())

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        found = self.named(name)
        assert len(found) == 1, [span.name for span in self.spans]
        return found[0]


@pytest.fixture
def exported() -> Iterator[Exported]:
    made = Exported()
    yield made
    made.provider.shutdown()


@pytest.fixture
def new_app(database_url: str, migrated: Target, exported: Exported) -> Iterator[NewApp]:
    """Yield a factory of apps in one schema. Without `tracing`, an app has the OpenTelemetry tracer with these options."""
    opened: list[App] = []

    def new(tracing: Tracer | Sequence[Tracer] | None = None, **options: Any) -> App:
        tracer = OpenTelemetry(provider=exported.provider, **options) if tracing is None else tracing
        opened.append(App(database_url, schema=migrated.schema, tracing=tracer))
        return opened[-1]

    yield new
    for each in opened:
        each.close()
