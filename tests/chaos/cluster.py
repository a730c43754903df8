"""The private PostgreSQL server of a run. Its disk can be filled, its clock shifted, and the server stopped at any time.

A paired cluster also has a synchronous standby that can be promoted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil
import psycopg
from psycopg import Connection, sql

from everbeat.embedded.identity import choose_identity
from everbeat.embedded.server import EmbeddedServer
from everbeat.embedded.settings import binaries
from tests.chaos.clock import ServerClock
from tests.chaos.isolation import is_isolated

APPLICATION: Final = "chaos"

_SETTINGS: Final = {
    "fsync": "off",  # processes die here, machines do not
    "full_page_writes": "off",
    "max_wal_size": "96MB",
    "min_wal_size": "32MB",
    "deadlock_timeout": "2s",
    "log_lock_waits": "on",
}
# A shifted clock must not interrupt the replication, and a standby whose primary was restarted must reconnect soon.
_OF_A_PAIR: Final = {
    "wal_sender_timeout": "0",
    "wal_receiver_timeout": "0",
    "wal_retrieve_retry_interval": "200ms",
    "wal_keep_size": "64MB",
}
_PATIENCE_S: Final = 60.0
_POLL_S: Final = 0.02
_BASE_MB: Final = 384
_MB_PER_SECOND: Final = 0.5
SESSIONS: Final = """
    select format('%%s %%s %%s', pid, application_name, state) from pg_stat_activity
    where backend_type = 'client backend' and application_name <> %s
    union all
    select format('advisory lock of %%s', pid) from pg_locks where locktype = 'advisory'
"""
_TERMINATE: Final = """
    select count(pg_terminate_backend(pid)) from pg_stat_activity
    where backend_type = 'client backend' and application_name <> %s
"""


class Cluster:
    """A running server, or a primary and its standby. `no_small_disk` is the reason why its disk cannot be filled, if any."""

    def __init__(self, folder: Path, *, seconds: float, paired: bool = False) -> None:
        self.clock = ServerClock(folder)
        # Short names: the paths of the sockets must be short.
        self._places = [folder / "pg", folder / "pg2"] if paired else [folder / "pg"]
        self._settings = _SETTINGS | (_OF_A_PAIR if paired else {})
        self._servers: dict[Path, EmbeddedServer] = {}
        self.no_small_disk = ""
        for place in self._places:
            place.mkdir(mode=0o700)
            obstacle = _mount(place, size_mb=round(_BASE_MB + seconds * _MB_PER_SECOND))
            self.no_small_disk = self.no_small_disk or obstacle
        self._place = self._places[0]
        self._open(self._place)
        if paired:
            self.renew_standby()

    @property
    def url(self) -> str:
        """Return the libpq URL of the server that accepts writes."""
        return self._servers[self._place].url

    @property
    def urls(self) -> Sequence[str]:
        """Return the URLs of all servers, which stay the same."""
        return [self._servers[place].url for place in self._places]

    @property
    def log(self) -> str:
        """Return the logs of the servers."""
        paths = [place / name for place in self._places for name in ("server.log.old", "server.log")]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """Yield a connection of the run itself, which faults that terminate sessions do not affect."""
        with psycopg.connect(self.url, autocommit=True, application_name=APPLICATION) as connection:
            yield connection

    def terminate_sessions(self) -> int:
        """Terminate every session except those of the run itself. Return the number of terminated sessions."""
        with self.connection() as connection:
            return self.terminate_sessions_over(connection)

    @staticmethod
    def terminate_sessions_over(connection: Connection[Any]) -> int:
        """Do the same as `terminate_sessions`, over an existing connection."""
        row = connection.execute(_TERMINATE, [APPLICATION]).fetchone()
        return int(row[0]) if row else 0

    def stop_at_once(self) -> None:
        """Stop the server like `pg_ctl stop -m immediate`. All sessions close, and the next start recovers from the WAL."""
        self._servers[self._place].stop("immediate")

    def start(self) -> None:
        """Start the server if it is not running."""
        if not EmbeddedServer.status(self._place).running:
            with self.clock.ticking():
                self._servers[self._place].restart("immediate")

    @property
    def runs(self) -> bool:
        """Return whether the server accepts connections."""
        return EmbeddedServer.status(self._place).running

    def fill_disk(self) -> int:
        """Fill all free disk space, and return the number of bytes written. Can be called repeatedly."""
        room = os.statvfs(self._place)
        free = room.f_bavail * room.f_frsize
        with (self._place / "filler").open("ab") as filler, suppress(OSError):
            os.posix_fallocate(filler.fileno(), filler.tell(), max(1, free))
        return free

    def free_disk(self) -> None:
        """Release the disk space that `fill_disk` used."""
        (self._place / "filler").unlink(missing_ok=True)

    def set_read_only(self, read_only: bool) -> None:
        """Set `default_transaction_read_only` for every session, including open ones."""
        value = sql.SQL("on" if read_only else "off")
        with self.connection() as connection:
            connection.execute(sql.SQL("alter system set default_transaction_read_only = {}").format(value))
            connection.execute("select pg_reload_conf()")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend every process of the primary during the block. The kernel still acknowledges incoming data."""
        processes = self._processes(self._place)
        _send(signal.SIGSTOP, processes)
        _send(signal.SIGSTOP, late := [one for one in self._processes(self._place) if one not in processes])
        try:
            yield
        finally:
            _send(signal.SIGCONT, [*late, *reversed(processes)])

    def kill_primary(self) -> None:
        """Kill every process of the primary with SIGKILL. It stays down."""
        self._kill(self._place)

    def kill_old_primary(self) -> None:
        """Kill the server that was the primary before the promotion, if it is still running."""
        self._kill(self._other)

    def await_standby(self) -> None:
        """Wait until the standby is streaming and has received every acknowledged commit."""
        query = "select 1 from pg_stat_replication where state = 'streaming' and sync_state = 'sync'"
        with self.connection() as connection:
            _until(lambda: connection.execute(query).fetchone() is not None, "the standby to stream")

    def promote(self) -> None:
        """Promote the standby. The caller must kill the former primary before or afterwards."""
        self._place = self._other
        with self.connection() as connection:
            connection.execute("select pg_promote(true, 60)")
            query = "select 1 where not pg_is_in_recovery()"
            _until(lambda: connection.execute(query).fetchone() is not None, "the promotion")

    def renew_standby(self) -> None:
        """Create a standby in place of the killed primary, if there is no standby."""
        place = self._other
        shutil.rmtree(place / "data", ignore_errors=True)
        program = binaries() / "pg_basebackup"
        identity = choose_identity(folder=place, data=place / "data", program=program)
        identity.give(place)
        options = ("-D", "data", "-R", "-X", "stream", "-c", "fast", "-d", self.url)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        made = identity.run(str(program), *options, folder=place, environment=kept)
        if made.returncode != 0:
            raise RuntimeError(f"pg_basebackup failed: {made.stdout[-500:]}")
        self._open(place)
        # Do this only now, because the copy must not require its own standby when it is promoted.
        with self.connection() as connection:
            connection.execute("alter system set synchronous_standby_names = '*'")
            connection.execute("select pg_reload_conf()")
        self.await_standby()

    @property
    def _other(self) -> Path:
        return next(place for place in self._places if place != self._place)

    def _open(self, place: Path) -> None:
        with self.clock.ticking():
            server = EmbeddedServer.open(place, settings=self._settings)
        before = self._servers.get(place)
        self._servers[place] = server
        if before is not None:
            before.close()

    def _kill(self, place: Path) -> None:
        processes = self._processes(place)
        _send(signal.SIGKILL, processes)
        _until(lambda: not any(_lives(one) for one in processes), "the end of the killed primary")

    def _processes(self, place: Path) -> list[psutil.Process]:
        pid = self._servers[place].pid
        if pid is None:
            return []
        server = psutil.Process(pid)
        return [server, *server.children(recursive=True)]

    def close(self) -> None:
        """Stop the servers and delete their data."""
        for place in reversed(self._places):
            server = self._servers.get(place)
            if server is not None:
                server.close()
                with suppress(OSError):
                    server.stop("immediate")
            if not self.no_small_disk:
                subprocess.run(["umount", "--lazy", str(place)], capture_output=True, timeout=20)
            shutil.rmtree(place, ignore_errors=True)


def _send(number: signal.Signals, processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _until(truth: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not truth():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {_PATIENCE_S:g} s for {what}")
        time.sleep(_POLL_S)  # the server sends no event when this changes


def _mount(place: Path, *, size_mb: int) -> str:
    """Mount a disk of this size at `place`, if no other process sees the mount. Return the reason for a failure, if any."""
    if not is_isolated():
        return "mounts would be seen by others: the run has no mount namespace of its own"
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=0700", "chaos", str(place)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return "" if made.returncode == 0 else made.stderr.strip()[-300:] or "mount failed"
