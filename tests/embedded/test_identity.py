"""Test the embedded PostgreSQL as root, as users with and without a name, and without namespaces."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from everbeat.embedded.server import EmbeddedServer
from tests.conftest import FAST_SETTINGS
from tests.variants import long_except

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0,
    reason="LOUD: needs root on Linux to become other users; this run says nothing about other identities",
)

_NOBODY = 65534
_NAMELESS = 54321

# Starts, queries, stops and restarts a server; prints the user that the server runs as.
_STORY = """
import os, sys
from pathlib import Path
import psycopg
from everbeat.embedded.server import EmbeddedServer
folder = Path(sys.argv[1])
for _ in range(2):
    with EmbeddedServer.open(folder, settings={"fsync": "off"}) as server:
        with psycopg.connect(server.url) as connection:
            connection.execute("select 1")
        print(Path("/proc", str(server.pid)).stat().st_uid, (folder / "data").stat().st_uid, flush=True)
print(EmbeddedServer.status(folder).running)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="eb-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def told_as(
    user: int | None, folder: Path, *, wrapper: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Run the program as `user`, with an interpreter that this user can execute."""
    for interpreter in (sys.executable, "/usr/bin/python3"):
        options = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        version = f"import sys, psycopg; sys.exit(sys.version_info[:2] != {sys.version_info[:2]})"
        try:
            fits = subprocess.run(
                [interpreter, "-c", version], env=environment, capture_output=True, **options
            )  # type: ignore[call-overload]
        except OSError:
            continue
        if fits.returncode == 0:
            return subprocess.run(  # type: ignore[no-any-return, call-overload]
                [*wrapper, interpreter, "-c", _STORY, str(folder)],
                env=environment,
                cwd="/",
                capture_output=True,
                text=True,
                timeout=100,
                **options,
            )
    pytest.skip(f"LOUD: uid {user} may not run any interpreter with everbeat's dependencies")


def test_root_runs_the_embedded_server_in_a_user_namespace_and_owns_its_files(place: Path) -> None:
    told = told_as(None, place / "db")
    assert told.stdout.split() == ["0", "0"] * 2 + ["False"], told.stderr
    assert "everbeat" not in told.stderr


@pytest.mark.parametrize("user", long_except([_NOBODY, _NAMELESS], _NAMELESS))
def test_users_with_and_without_a_name_run_the_embedded_server_as_themselves(place: Path, user: int) -> None:
    os.chown(place, user, user)
    told = told_as(user, place / "db")
    assert told.stdout.split() == [str(user), str(user)] * 2 + ["False"], told.stderr


def test_root_runs_the_embedded_server_of_a_users_folder_as_that_user(place: Path) -> None:
    os.chown(place, _NOBODY, _NOBODY)
    place.chmod(0o700)  # root without its privileges, as in a namespace, could not enter
    with EmbeddedServer.open(place / "db", settings=FAST_SETTINGS) as server:
        assert Path("/proc", str(server.pid)).stat().st_uid == _NOBODY
    told = told_as(_NOBODY, place / "db")
    assert told.stdout.split() == [str(_NOBODY), str(_NOBODY)] * 2 + ["False"], told.stderr


def test_an_embedded_folder_of_another_user_is_refused_with_both_uids(place: Path) -> None:
    EmbeddedServer.open(place / "db", settings=FAST_SETTINGS).close()
    told = told_as(_NOBODY, place / "db")
    assert told.returncode != 0
    assert "belongs to uid 0, and this process is uid 65534" in told.stderr


# Becomes root of a user namespace that forbids further ones, and of a mount namespace with its own /etc.
_FORBIDDING = """
import ctypes, os, subprocess, sys
etc, *command = sys.argv[1:]
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
entered, mapped = os.pipe(), os.pipe()
pid = os.fork()
if pid:
    os.read(entered[0], 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{pid}/{name}", "w") as file:
            file.write("0 0 65536")
    os.write(mapped[1], b".")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
    os._exit(99)
os.write(entered[1], b".")
os.read(mapped[0], 1)
subprocess.run(["cp", "-a", "/etc/.", etc], check=True)
subprocess.run(["mount", "--bind", etc, "/etc"], check=True)
with open("/proc/sys/user/max_user_namespaces", "w") as file:
    file.write("0")
os.execvp(command[0], command)
"""


def test_without_namespaces_root_runs_the_embedded_server_as_a_system_user(place: Path) -> None:
    (place / "etc").mkdir()
    wrapper = (sys.executable, "-c", _FORBIDDING, str(place / "etc"))
    possible = subprocess.run([*wrapper, "true"], capture_output=True, text=True, timeout=30)
    if possible.returncode != 0:
        pytest.skip(f"LOUD: namespaces cannot be forbidden here: {possible.stderr}")
    told = told_as(None, place / "db", wrapper=wrapper)
    *uids, running = told.stdout.split()
    assert running == "False", told.stderr
    assert len(set(uids)) == 1, told.stdout
    assert uids[0] not in ("0", str(_NOBODY))
    assert told.stderr.count("runs as the system user 'everbeat', which now owns that folder") == 1
