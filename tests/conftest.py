"""Fixtures that give each test a real PostgreSQL: one server for the whole test run, and one schema per test."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Protocol

import psycopg
import pytest
from hypothesis import HealthCheck, settings

from everbeat.embedded.server import EmbeddedServer
from everbeat.runtime.loading import no_collection
from everbeat.store.target import Target
from tests.migrated import MigratedSchemas, drop, new_name
from tests.replication import Pair

# Durability settings are off, because tests do not have to survive a power failure.
FAST_SETTINGS = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}

# Machines are shared, so examples have no time limit. The same commit gets the same examples and therefore the same
# verdict. Only the thorough profile (make test-long) draws new examples. To choose another profile, use
# pytest --hypothesis-profile=...
for profile, examples in {"brief": 10, "usual": 40, "thorough": 400}.items():
    settings.register_profile(
        profile,
        deadline=None,
        max_examples=examples,
        derandomize=profile != "thorough",
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("usual")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without the garbage collector, which takes half the time: thousands of tests are millions of objects that stay."""
    with no_collection():
        return (yield)


def pytest_configure() -> None:
    """Restore the default signal handlers.

    A process that was started in the background or by nohup ignores terminal signals, and its child processes inherit this.
    """
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let each xdist process start its share of the slow stories first, because stories that start last delay the whole run."""
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
    """Creates a server for one test, which the test can restart and kill."""

    def __call__(
        self, *, settings: dict[str, str] | None = None, tcp_port: int | None = None
    ) -> EmbeddedServer: ...


class NewPair(Protocol):
    """Creates a primary server and a streaming standby for one test."""

    def __call__(self, *, synchronous: bool = False, settings: dict[str, str] | None = None) -> Pair: ...


@pytest.fixture(scope="session", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a separate runtime folder, so that killed process trees leave no lock files in the user's folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedServer]:
    """Yield the server that all tests share. A test that would disturb other tests must use `new_server` instead."""
    # Do not use tmp_path: its names are too long for a socket, and pytest would keep folders of earlier runs.
    with (
        tempfile.TemporaryDirectory(prefix="eb-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer.open(Path(folder), settings=FAST_SETTINGS) as server,
    ):
        yield server


@pytest.fixture(scope="session")
def database_url(postgres: EmbeddedServer) -> str:
    """Return the libpq URL of the shared server."""
    return postgres.url


@pytest.fixture(scope="session")
def migrated_schemas(database_url: str) -> Iterator[MigratedSchemas]:
    """Yield the schemas that the tests of this process migrate and use again."""
    lent = MigratedSchemas(database_url)
    yield lent
    lent.close()


@pytest.fixture
def schema(
    request: pytest.FixtureRequest, database_url: str, migrated_schemas: MigratedSchemas
) -> Iterator[str]:
    """Yield a schema name: of a migrated and empty schema for tests that use `migrated`, and otherwise of none that exists.

    NATS servers keep messages of a schema, so the tests with NATS get new schemas.
    """
    if "migrated" in request.fixturenames:
        name = migrated_schemas.take()
        yield name
        migrated_schemas.give_back(name, is_reusable="shared_nats" not in request.fixturenames)
        return
    name = new_name()
    yield name
    with psycopg.connect(database_url, autocommit=True) as connection:
        # An open transaction is a bug in the test, and should be reported instead of waited for.
        connection.execute("set lock_timeout = '10s'")
        drop(connection, name)


@pytest.fixture
def migrated(database_url: str, schema: str) -> Target:
    """Return the test's schema, which is migrated, audited and empty."""
    return Target.parse(database_url, schema=schema)


@pytest.fixture(scope="session")
def blank_data() -> Iterator[Path]:
    """Yield the data folder of a new server that was stopped, of which `new_server` makes copies: initdb takes a second."""
    folder = Path(tempfile.mkdtemp(prefix="eb-"))
    with EmbeddedServer.open(folder, settings=FAST_SETTINGS):
        pass
    yield folder / "data"
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_server(blank_data: Path) -> Iterator[NewServer]:
    """Yield a factory that creates servers for one test. The servers are stopped and removed after the test."""
    opened: list[tuple[Path, EmbeddedServer]] = []

    def open_server(*, settings: dict[str, str] | None = None, tcp_port: int | None = None) -> EmbeddedServer:
        folder = Path(tempfile.mkdtemp(prefix="eb-"))
        # With -a, the copy belongs to the user who runs the server, who is not always the user who runs the tests.
        subprocess.run(["cp", "-a", blank_data, folder / "data"], check=True)
        server = EmbeddedServer.open(folder, settings=FAST_SETTINGS | (settings or {}), tcp_port=tcp_port)
        opened.append((folder, server))
        return server

    yield open_server
    for folder, server in opened:
        server.close()
        server.stop("immediate")  # other processes of the test might still count as users
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def new_pair() -> Iterator[NewPair]:
    """Yield a factory that creates primaries with a streaming standby, which are stopped and removed after the test."""
    opened: list[Pair] = []

    def open_pair(*, synchronous: bool = False, settings: dict[str, str] | None = None) -> Pair:
        opened.append(Pair.open(synchronous=synchronous, settings=settings))
        return opened[-1]

    yield open_pair
    for pair in opened:
        pair.close()
