"""A primary and a streaming standby, for tests of promotions, standbys and servers that stop responding."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

import psutil
import psycopg
from psycopg import sql

from everbeat.embedded.identity import choose_identity
from everbeat.embedded.server import EmbeddedServer
from everbeat.embedded.settings import binaries
from tests.nats_server import free_port

# Commits wait for the standby where it is synchronous; no test cuts the power.
_SETTINGS: Final = {"fsync": "off", "full_page_writes": "off", "shared_buffers": "32MB"}
_PATIENCE_S: Final = 30.0
_POLL_S: Final = 0.05


class Pair:
    """A running primary and its hot standby, each on a Unix socket and on a port of 127.0.0.1."""

    def __init__(self, folder: Path, *, synchronous: bool, settings: dict[str, str]) -> None:
        self._folder = folder
        self._settings = _SETTINGS | settings
        self._standby_port = free_port()
        self._killed: set[Path] = set()
        self._frozen: list[psutil.Process] = []
        self.primary = self._open("primary", port=free_port())
        self._copy_primary()
        self.standby = self._open("standby", port=self._standby_port)
        self.url = (
            f"{_base(self.primary)},{_base(self.standby).removeprefix('postgresql://postgres@')}/postgres"
        )
        _until(self._streams, what="the standby streams")
        if synchronous:
            self.require_standby("*")

    @classmethod
    def open(cls, *, synchronous: bool = False, settings: dict[str, str] | None = None) -> Self:
        """Start both servers. `synchronous`: each commit on the primary waits for the standby."""
        folder = Path(tempfile.mkdtemp(prefix="eb-"))
        try:
            return cls(folder, synchronous=synchronous, settings=settings or {})
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def require_standby(self, names: str) -> None:
        """Set `synchronous_standby_names` of the primary; an empty string requires none."""
        with psycopg.connect(self.primary.url, autocommit=True) as connection:
            statement = sql.SQL("alter system set synchronous_standby_names = {}")
            connection.execute(statement.format(sql.Literal(names)))
            connection.execute("select pg_reload_conf()")

    def promote(self) -> None:
        """Promote the standby and wait until it accepts writes."""
        with psycopg.connect(self.standby.url, autocommit=True) as connection:
            connection.execute("select pg_promote(true, 60)")
            _until(
                lambda: not _value(connection, "select pg_is_in_recovery()"), what="the standby is promoted"
            )

    def wait_replayed(self) -> None:
        """Wait until the standby has replayed what the primary has written so far."""
        with psycopg.connect(self.primary.url, autocommit=True) as connection:
            written = _value(connection, "select pg_current_wal_lsn()::text")
        with psycopg.connect(self.standby.url, autocommit=True) as connection:
            _until(
                lambda: _value(connection, "select pg_last_wal_replay_lsn() >= %s::pg_lsn", written),
                what="the standby has replayed the primary's last write",
            )

    def freeze_primary(self) -> None:
        """Stop every process of the primary with SIGSTOP. Its kernel still accepts and acknowledges data."""
        server = psutil.Process(_pid(self.primary))
        frozen: list[psutil.Process] = []
        while found := [each for each in (server, *server.children(recursive=True)) if each not in frozen]:
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGSTOP)
                frozen.append(process)
        self._frozen = frozen
        _until(
            lambda: all(_is_stopped(process) for process in frozen), what="the primary's processes stopped"
        )

    def thaw_primary(self) -> None:
        """Let the primary continue."""
        for process in reversed(self._frozen):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self._frozen = []

    def kill_primary(self) -> None:
        """Kill every process of the primary with SIGKILL. It stays down."""
        server = psutil.Process(_pid(self.primary))
        processes = [server, *server.children(recursive=True)]
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_PATIENCE_S)
        self._frozen = []
        self._killed.add(self.primary.folder)

    def stop_standby(self) -> None:
        """Stop the standby."""
        self.standby.stop("fast")

    def start_standby(self) -> None:
        """Start the standby again and wait until it streams."""
        self.standby.restart("fast")
        _until(self._streams, what="the standby streams again")

    def close(self) -> None:
        """Stop both servers and delete their data."""
        self.thaw_primary()
        for server in (self.standby, self.primary):
            server.close()
            server.stop("immediate")
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, name: str, *, port: int) -> EmbeddedServer:
        return EmbeddedServer.open(self._folder / name, settings=self._settings, tcp_port=port)

    def _copy_primary(self) -> None:
        folder = self._folder / "standby"
        folder.mkdir(mode=0o700)
        program = binaries() / "pg_basebackup"
        identity = choose_identity(folder=folder, data=folder / "data", program=program)
        identity.give(folder)
        options = ("-D", "data", "-R", "-X", "stream", "-c", "fast", "-d", self.primary.tcp_url)
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        made = identity.run(str(program), *options, folder=folder, environment=environment)
        assert made.returncode == 0, f"pg_basebackup failed: {made.stdout}"

    def _streams(self) -> bool:
        with psycopg.connect(self.primary.url, autocommit=True) as connection:
            state = _value(connection, "select state from pg_stat_replication")
        return bool(state == "streaming")


def _base(server: EmbeddedServer) -> str:
    return server.tcp_url.removesuffix("/postgres")


def _pid(server: EmbeddedServer) -> int:
    pid = server.pid
    assert pid is not None, f"the server in {server.folder} does not run"
    return pid


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _value(connection: psycopg.Connection[Any], statement: str, *parameters: object) -> Any:
    row = connection.execute(statement.encode(), parameters).fetchone()
    return None if row is None else row[0]


def _until(holds: Callable[[], bool], *, what: str) -> None:
    give_up_at = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at, f"not within {_PATIENCE_S} s: {what}"
        time.sleep(_POLL_S)  # the server has no event for it
