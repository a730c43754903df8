"""Fixtures: Sentry's real SDK with a transport in memory, and apps that are created after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sentry_sdk
from sentry_sdk.envelope import Envelope
from sentry_sdk.scope import global_event_processors
from sentry_sdk.transport import Transport

from everbeat import App
from everbeat.runtime import installed_tracers, task_links
from everbeat.sentry import EverbeatIntegration
from everbeat.store.target import Target

NewApp = Callable[..., App]


class Kept(Transport):
    """A transport that keeps what it is given."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.items: list[tuple[str, dict[str, Any]]] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        for item in envelope.items:
            payload = item.payload.json
            assert payload is not None
            self.items.append((item.type or "", payload))


class Sentry:
    """The items that the SDK has sent."""

    def __init__(self) -> None:
        self.transport = Kept()

    def init(self, **options: Any) -> None:
        """Set the SDK up as a program does."""
        settings = {name: options.pop(name) for name in [*options] if hasattr(EverbeatIntegration(), name)}
        sentry_sdk.init(
            dsn="https://key@127.0.0.1/1",
            transport=self.transport,
            integrations=[EverbeatIntegration(**settings)],
            **{"traces_sample_rate": 1.0, "auto_enabling_integrations": False} | options,
        )

    def of(self, kind: str) -> list[dict[str, Any]]:
        sentry_sdk.flush(2)
        return [payload for found, payload in self.transport.items if found == kind]

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.of("event")

    def transactions(self, op: str = "queue.task.everbeat") -> list[dict[str, Any]]:
        return [each for each in self.of("transaction") if each["contexts"]["trace"]["op"] == op]


@pytest.fixture
def sentry() -> Iterator[Sentry]:
    with forgotten():
        yield Sentry()


@contextmanager
def forgotten() -> Iterator[None]:
    """Remove the client at the end, and the integration, which the SDK sets up once in a process. Other tests' apps are not traced."""
    processors = [*global_event_processors]
    try:
        yield
    finally:
        sentry_sdk.get_client().close(timeout=0)
        sentry_sdk.get_global_scope().set_client(None)
        sentry_sdk.integrations._processed_integrations.discard("everbeat")
        sentry_sdk.integrations._installed_integrations.discard("everbeat")
        global_event_processors[:] = processors
        installed_tracers._installed.clear()


@pytest.fixture
def new_app(database_url: str, migrated: Target) -> Iterator[NewApp]:
    opened: list[App] = []
    kept = [*task_links._dashboard]

    def new(**settings: Any) -> App:
        opened.append(App(database_url, schema=migrated.schema, **settings))
        return opened[-1]

    yield new
    for each in opened:
        each.close()
    task_links._dashboard[:] = kept
