"""A PgBouncer between the trees and PostgreSQL: from PATH, or unpacked below .venv by `make test`."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

_UNPACKED = Path(__file__).parents[2] / ".venv" / "pgbouncer"


def program() -> tuple[str, dict[str, str]]:
    """Return PgBouncer and the environment it needs; skip the test with a clear reason if there is none."""
    found = shutil.which("pgbouncer")
    if found is not None:
        return found, {}
    unpacked = _UNPACKED / "usr" / "sbin" / "pgbouncer"
    if unpacked.exists():
        libraries = sorted({str(each.parent) for each in _UNPACKED.glob("usr/lib/**/*.so*")})
        return str(unpacked), {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    pytest.skip("LOUD: no PgBouncer here, so nothing is known about life behind a transaction pooler.")


class Pooler:
    """A PgBouncer with 30 server connections in front of the server of one URL."""

    def __init__(self, url: str, folder: Path, *, mode: str) -> None:
        self._binary, self._environment = program()
        given = conninfo_to_dict(url)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"postgresql://{given['user']}@127.0.0.1:{port}/{given['dbname']}"
        self._log = folder / "log"
        users = folder / "users.txt"
        users.write_text(f'"{given["user"]}" ""\n')
        self._settings = folder / "pgbouncer.ini"
        self._settings.write_text(
            f"[databases]\n* = host={given['host']} port={given.get('port', 5432)} user={given['user']}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\nauth_file = {users}\npool_mode = {mode}\nmax_client_conn = 500\ndefault_pool_size = 30\n"
            f"ignore_startup_parameters = extra_float_digits\nlogfile = {self._log}\n"
        )
        # PgBouncer refuses to run as root, so its user must be able to open the server's socket.
        self._as_user = ["-u", "nobody"] if os.geteuid() == 0 else []
        if self._as_user:
            folder.chmod(0o777)
        self.start()

    def start(self) -> None:
        """Start PgBouncer and wait until it accepts connections."""
        self._process = subprocess.Popen(
            [self._binary, *self._as_user, str(self._settings)],
            env=os.environ | self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait(self._process, self.url, self._log)

    def kill(self) -> None:
        """Kill PgBouncer at once, with every connection through it."""
        self._process.kill()
        self._process.wait(timeout=20)

    def stop(self) -> None:
        """Stop PgBouncer in order."""
        self._process.terminate()
        self._process.wait(timeout=20)


@contextmanager
def pooler_before(url: str, *, mode: str = "transaction") -> Iterator[Pooler]:
    """Run a pooler in front of the server of `url`; the block can kill and start it again."""
    with tempfile.TemporaryDirectory(prefix="eb-pool-") as made:
        pooler = Pooler(url, Path(made), mode=mode)
        try:
            yield pooler
        finally:
            pooler.stop()


@contextmanager
def pooled(url: str, *, mode: str = "transaction") -> Iterator[str]:
    """Yield the URL of a pooler in front of the server of `url`."""
    with pooler_before(url, mode=mode) as pooler:
        yield pooler.url


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    for _ in range(100):
        try:
            psycopg.connect(url, connect_timeout=2, prepare_threshold=None).close()
            return
        except psycopg.OperationalError as problem:
            said = log.read_text() if log.exists() else ""
            if process.poll() is not None:
                raise AssertionError(f"PgBouncer ended: {said}") from problem
            last = problem
        time.sleep(0.1)  # the pooler sends no event when it listens
    raise AssertionError(f"PgBouncer does not answer: {last}")
