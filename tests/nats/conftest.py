"""Fixtures: real NATS servers, and the workers of tests/worker for tests of the relay and the sweeper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.nats_server import NatsServer
from tests.worker.conftest import harness as harness


@pytest.fixture(scope="session")
def shared_nats() -> Iterator[NatsServer]:
    """Yield a server that all tests share and that no test stops. Each test has its own schema."""
    with NatsServer() as server:
        yield server


@pytest.fixture
def nats_server() -> Iterator[NatsServer]:
    """Yield a server for this test alone."""
    with NatsServer() as server:
        yield server
