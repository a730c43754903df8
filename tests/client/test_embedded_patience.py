"""Test that calls keep their time limits while an embedded server stops or another process holds it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest

from everbeat import App
from everbeat.client.database_access import database_of
from everbeat.embedded.server import EmbeddedServer, alone
from everbeat.errors import DatabaseError
from tests.conftest import NewServer

SLACK_S = 3.0


@pytest.fixture
def server(new_server: NewServer) -> EmbeddedServer:
    return new_server()


@pytest.fixture
def app(server: EmbeddedServer) -> Iterator[App]:
    app = App(f"embedded:{server.folder}", patience="1s", auto_migrate=True)

    @app.task
    def work() -> None: ...

    yield app
    app.close()


@pytest.fixture
def stopping(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """Yield a server that was asked to stop and waits until its last client, such as a worker, disconnects."""
    with psycopg.connect(server.url):
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        file = server.folder / "data" / "postmaster.pid"
        give_up_at = time.monotonic() + 10
        while "stopping" not in file.read_text():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)  # PostgreSQL reports this only in a file
        yield server


def test_result_ends_at_its_timeout_while_the_embedded_server_stops(
    stopping: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseError, match="accepts no connections"):
        app.handle(uuid4()).result(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK_S


async def test_aresult_ends_at_its_timeout_while_the_embedded_server_stops(
    stopping: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseError, match="accepts no connections"):
        await app.handle(uuid4()).aresult(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK_S


def test_a_send_ends_with_its_patience_while_the_embedded_server_stops(
    stopping: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseError, match="accepts no connections"):
        app.send_by_name("work")
    assert time.monotonic() - began < 1 + SLACK_S


def test_result_ends_at_its_timeout_while_another_process_starts_the_embedded_server(
    server: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with alone(server.folder), pytest.raises(DatabaseError, match="starting or stopping"):
        app.handle(uuid4()).result(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK_S


def test_result_ends_at_its_timeout_while_another_thread_opens_the_database(
    server: EmbeddedServer, app: App
) -> None:
    with alone(server.folder):
        opening = threading.Thread(target=app.send_by_name, args=("work",))
        opening.start()
        while not database_of(app)._lock.locked():
            time.sleep(0.01)  # the thread has just begun
        began = time.monotonic()
        with pytest.raises(DatabaseError, match="Another thread"):
            app.handle(uuid4()).result(timeout=0.5)
        assert time.monotonic() - began < 0.5 + SLACK_S
    opening.join(30)
    assert not opening.is_alive()


def test_the_last_query_after_a_timeout_adds_at_most_half_a_second(server: EmbeddedServer, app: App) -> None:
    handle = app.send_by_name("work")
    server.stop("immediate")
    began = time.monotonic()
    with pytest.raises(DatabaseError):
        handle.result(timeout=0.5)
    assert time.monotonic() - began < 1 + SLACK_S
