"""The private PostgreSQL of a run: on a disk that can be filled, with a clock that can be shifted, to be stopped at any time.

What lives here: the server. What may not: what is asked of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psycopg
from psycopg import Connection

from everbeat.store.embedded import EmbeddedServer
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
_BASE_MB: Final = 384
_MB_PER_SECOND: Final = 0.5
_TERMINATE: Final = """
    select count(pg_terminate_backend(pid)) from pg_stat_activity
    where backend_type = 'client backend' and application_name <> %s
"""


class Cluster:
    """A running server. `no_small_disk` says why its disk cannot be filled here, if so."""

    def __init__(self, folder: Path, *, seconds: float) -> None:
        self.clock = ServerClock(folder)
        self._place = folder / "pg"  # a short name: the socket lies in it
        self._place.mkdir()
        self.no_small_disk = _mount(self._place, size_mb=round(_BASE_MB + seconds * _MB_PER_SECOND))
        with self.clock.ticking():
            self._server = EmbeddedServer.open(self._place, settings=_SETTINGS)
        self.url = self._server.url

    @property
    def log(self) -> str:
        """What the server wrote."""
        paths = [self._place / "server.log.old", self._place / "server.log"]
        return "".join(path.read_text(errors="replace") for path in paths if path.exists())

    @contextmanager
    def connection(self) -> Iterator[Connection[Any]]:
        """A connection of the run's own, which no fault of sessions hits."""
        with psycopg.connect(self.url, autocommit=True, application_name=APPLICATION) as connection:
            yield connection

    def terminate_sessions(self) -> int:
        """Ends every session but those of the run itself; answers how many."""
        with self.connection() as connection:
            row = connection.execute(_TERMINATE, [APPLICATION]).fetchone()
        return int(row[0]) if row else 0

    def stop_at_once(self) -> None:
        """As `pg_ctl stop -m immediate`: every session is gone, and the next start recovers from the log."""
        self._server.stop("immediate")

    def start(self) -> None:
        """Starts it again, if it does not run."""
        if not EmbeddedServer.status(self._place).running:
            with self.clock.ticking():
                self._server.restart("immediate")

    @property
    def runs(self) -> bool:
        """Whether it takes connections."""
        return EmbeddedServer.status(self._place).running

    def fill_disk(self) -> int:
        """Takes all the room that is left, as often as it is called; answers how many bytes."""
        room = os.statvfs(self._place)
        free = room.f_bavail * room.f_frsize
        with (self._place / "filler").open("ab") as filler, suppress(OSError):
            os.posix_fallocate(filler.fileno(), filler.tell(), max(1, free))
        return free

    def free_disk(self) -> None:
        """Gives the room back."""
        (self._place / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        """Stops it and forgets its data."""
        self._server.close()
        with suppress(OSError):
            self._server.stop("immediate")
        if not self.no_small_disk:
            subprocess.run(["umount", "--lazy", str(self._place)], capture_output=True, timeout=20)
        shutil.rmtree(self._place, ignore_errors=True)


def _mount(place: Path, *, size_mb: int) -> str:
    """Puts a disk of that size there; answers what stood in the way. Only where nobody else sees the mount."""
    if not is_isolated():
        return "mounts would be seen by others: the run has no mount namespace of its own"
    command = ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=0700", "chaos", str(place)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return "" if made.returncode == 0 else made.stderr.strip()[-300:] or "mount failed"
