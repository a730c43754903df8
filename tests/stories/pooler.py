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
    """PgBouncer and the environment it needs; skips the test, in so many words, where there is none."""
    found = shutil.which("pgbouncer")
    if found is not None:
        return found, {}
    unpacked = _UNPACKED / "usr" / "sbin" / "pgbouncer"
    if unpacked.exists():
        libraries = sorted({str(each.parent) for each in _UNPACKED.glob("usr/lib/**/*.so*")})
        return str(unpacked), {"LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    pytest.skip("LOUD: no PgBouncer here, so nothing is known about life behind a transaction pooler.")


@contextmanager
def pooled(url: str, *, mode: str = "transaction") -> Iterator[str]:
    """The URL of a pooler before the server of `url`, with 30 server sessions."""
    binary, environment = program()
    given = conninfo_to_dict(url)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="eb-pool-") as made:
        folder = Path(made)
        users = folder / "users.txt"
        users.write_text(f'"{given["user"]}" ""\n')
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            f"[databases]\n* = host={given['host']} port={given.get('port', 5432)} user={given['user']}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\nauth_file = {users}\npool_mode = {mode}\nmax_client_conn = 500\ndefault_pool_size = 30\n"
            f"ignore_startup_parameters = extra_float_digits\nlogfile = {folder / 'log'}\n"
        )
        # It refuses to run as root, and then the server's socket must be open to whom it runs as.
        as_user = ["-u", "nobody"] if os.geteuid() == 0 else []
        if as_user:
            folder.chmod(0o777)
        process = subprocess.Popen(
            [binary, *as_user, str(settings)],
            env=os.environ | environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        pool_url = f"postgresql://{given['user']}@127.0.0.1:{port}/{given['dbname']}"
        try:
            _wait(process, pool_url, folder / "log")
            yield pool_url
        finally:
            process.terminate()
            process.wait(timeout=20)


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
        time.sleep(0.1)  # nothing tells when it listens
    raise AssertionError(f"PgBouncer does not answer: {last}")
