"""An embedded server that stops, or that another process holds, does not stretch the time limit of a call."""

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
from everbeat.errors import DatabaseError
from everbeat.store.embedded import EmbeddedServer
from everbeat.store.embedded_sharing import alone
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
    """Asked to stop, it goes on as long as somebody is connected, as a worker is."""
    with psycopg.connect(server.url):
        assert server.pid is not None
        os.kill(server.pid, signal.SIGTERM)
        file = server.folder / "data" / "postmaster.pid"
        give_up_at = time.monotonic() + 10
        while "stopping" not in file.read_text():
            assert time.monotonic() < give_up_at
            time.sleep(0.01)  # PostgreSQL says so in a file only
        yield server


def test_a_result_is_waited_for_no_longer_than_its_limit_while_the_server_stops(
    stopping: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseError, match="takes no connection"):
        app.handle(uuid4()).result(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK_S


async def test_a_result_is_awaited_no_longer_than_its_limit_while_the_server_stops(
    stopping: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseError, match="takes no connection"):
        await app.handle(uuid4()).aresult(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK_S


def test_a_send_ends_with_its_patience_while_the_server_stops(stopping: EmbeddedServer, app: App) -> None:
    began = time.monotonic()
    with pytest.raises(DatabaseError, match="takes no connection"):
        app.send_by_name("work")
    assert time.monotonic() - began < 1 + SLACK_S


def test_a_result_is_waited_for_no_longer_than_its_limit_while_another_process_starts_the_server(
    server: EmbeddedServer, app: App
) -> None:
    began = time.monotonic()
    with alone(server.folder), pytest.raises(DatabaseError, match="starting or stopping"):
        app.handle(uuid4()).result(timeout=0.5)
    assert time.monotonic() - began < 0.5 + SLACK_S


def test_a_result_is_waited_for_no_longer_than_its_limit_while_another_thread_opens_the_database(
    server: EmbeddedServer, app: App
) -> None:
    with alone(server.folder):
        opening = threading.Thread(target=app.send_by_name, args=("work",))
        opening.start()
        while not app.door._lock.locked():
            time.sleep(0.01)  # the thread has just begun
        began = time.monotonic()
        with pytest.raises(DatabaseError, match="Another thread"):
            app.handle(uuid4()).result(timeout=0.5)
        assert time.monotonic() - began < 0.5 + SLACK_S
    opening.join(30)
    assert not opening.is_alive()


def test_the_last_look_after_a_wait_adds_half_a_second_at_most(server: EmbeddedServer, app: App) -> None:
    handle = app.send_by_name("work")
    server.stop("immediate")
    began = time.monotonic()
    with pytest.raises(DatabaseError):
        handle.result(timeout=0.5)
    assert time.monotonic() - began < 1 + SLACK_S
