"""A real PostgreSQL for every test that asks: one server for the whole run, one schema for each test.

What lives here: servers and schemas. What belongs to one room's tests lives in that room's own conftest.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg import sql

from everbeat.store.embedded import EmbeddedServer
from tests.replication import Pair

# Tests end before a power cut could matter to them.
FAST_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

# Examples may take their time: machines are shared. pytest --hypothesis-profile=... chooses another one.
for profile, examples in {"brief": 10, "usual": 40, "thorough": 400}.items():
    settings.register_profile(
        profile, deadline=None, max_examples=examples, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("usual")


def pytest_configure() -> None:
    """Started in the background, or by nohup, a process ignores the signals of a terminal, and so does all that it starts."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side, each process begins with its share of the stories: one that begins last would keep all others waiting."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes == 1:
        return
    stories = [item for item in items if item.get_closest_marker("story")]
    others = [item for item in items if not item.get_closest_marker("story")]
    share = -(-len(others) // processes)
    items[:] = [
        item
        for number in range(processes)
        for item in (*stories[number::processes], *others[number * share : (number + 1) * share])
    ]


class NewServer(Protocol):
    """Makes a server of the test's own, which it may restart and kill."""

    def __call__(
        self, *, settings: dict[str, str] | None = None, tcp_port: int | None = None
    ) -> EmbeddedServer: ...


class NewPair(Protocol):
    """Makes a primary and a streaming standby of the test's own."""

    def __call__(self, *, synchronous: bool = False, settings: dict[str, str] | None = None) -> Pair: ...


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Trees that tests kill leave their lock files here, not among those of the user's own workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedServer]:
    """The server all tests share; a test that wants to harm it takes `new_server`."""
    # Not tmp_path: its names are too long for a socket, and a folder of the day before would be kept.
    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer.open(Path(folder), settings=FAST_SETTINGS) as server,
    ):
        yield server


@pytest.fixture(scope="session")
def database_url(postgres: EmbeddedServer) -> str:
    """The libpq URL of the shared server."""
    return postgres.url


@pytest.fixture
def schema(database_url: str) -> Iterator[str]:
    """A schema name that nobody else uses; what is made under it is dropped afterwards."""
    name = f"test_{uuid4().hex[:12]}"
    yield name
    with psycopg.connect(database_url, autocommit=True) as connection:
        # A connection left open in a transaction is a mistake of the test, better reported than waited for.
        connection.execute("SET lock_timeout = '10s'")
        connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(name)))


@pytest.fixture
def new_server() -> Iterator[NewServer]:
    """A factory of servers of the test's own, stopped and removed after it."""
    opened: list[tuple[Path, EmbeddedServer]] = []

    def open_server(*, settings: dict[str, str] | None = None, tcp_port: int | None = None) -> EmbeddedServer:
        folder = Path(tempfile.mkdtemp(prefix="eb-"))
        server = EmbeddedServer.open(folder, settings=FAST_SETTINGS | (settings or {}), tcp_port=tcp_port)
        opened.append((folder, server))
        return server

    yield open_server
    for folder, server in opened:
        server.close()
        server.stop("immediate")  # other processes of the test may still count as users
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_pair() -> Iterator[NewPair]:
    """A factory of primaries with a streaming standby, stopped and removed after the test."""
    opened: list[Pair] = []

    def open_pair(*, synchronous: bool = False, settings: dict[str, str] | None = None) -> Pair:
        opened.append(Pair.open(synchronous=synchronous, settings=settings))
        return opened[-1]

    yield open_pair
    for pair in opened:
        pair.close()
