"""The server process of a data folder, known only by the file it left: is it alive, ready, ended.

What lives here: looking at and signalling a process that this one did not start. What may not: starting one.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self
from urllib.parse import quote

from msgspec import Struct

_POLL_S = 0.01
_PROBE_TIMEOUT_S = 5.0


class Postmaster(Struct, frozen=True, kw_only=True):
    """What a living server wrote about itself into postmaster.pid."""

    data: Path
    pid: int
    port: int
    socket_folder: Path
    status: str

    @classmethod
    def of(cls, data: Path) -> Self | None:
        """The server of `data`, None when none lives; a file left by a dead one counts for nothing."""
        try:
            lines = (data / "postmaster.pid").read_text(errors="surrogateescape").splitlines()
            lines += [""] * (8 - len(lines))  # it is written piece by piece
            pid, port = int(lines[0]), int(lines[3] or 0)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        if not _is_server_of(pid, data=data):
            return None
        return cls(data=data, pid=pid, port=port, socket_folder=Path(lines[4]), status=lines[7].strip())

    @property
    def ready(self) -> bool:
        """Whether it takes connections: the file alone may speak of a state that has passed."""
        if self.status != "ready":
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(_PROBE_TIMEOUT_S)
            try:
                probe.connect(str(self.socket_folder / f".s.PGSQL.{self.port}"))
            except OSError:
                return False
        return True

    @property
    def url(self) -> str:
        """The libpq URL of its Unix socket; it names the port because PGPORT may be set to another."""
        place = quote(str(self.socket_folder), safe="/")
        return f"postgresql://postgres@/postgres?host={place}&port={self.port}"

    def signal_and_wait(self, sent: signal.Signals, *, timeout_s: float) -> bool:
        """Send a signal and wait for the process to end; False when it outlives `timeout_s` seconds."""
        if sys.platform == "linux":
            try:
                descriptor = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            except OSError:
                return self._signal_and_poll(sent, timeout_s=timeout_s)  # some sandboxes forbid it
            try:
                # The descriptor holds on to one process: after this check the number cannot mean another.
                if not _is_server_of(self.pid, data=self.data):
                    return True
                signal.pidfd_send_signal(descriptor, sent)
                return bool(select.select([descriptor], [], [], timeout_s)[0])
            finally:
                os.close(descriptor)
        return self._signal_and_poll(sent, timeout_s=timeout_s)

    def _signal_and_poll(self, sent: signal.Signals, *, timeout_s: float) -> bool:
        if _is_server_of(self.pid, data=self.data):
            os.kill(self.pid, sent)
        deadline = time.monotonic() + timeout_s
        while _is_server_of(self.pid, data=self.data):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True


def pid_is_taken(data: Path) -> bool:
    """Whether any process or zombie has the number in postmaster.pid."""
    try:
        os.kill(int((data / "postmaster.pid").read_text().splitlines()[0]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, IndexError, OverflowError):
        return False
    return True


def _is_server_of(pid: int, *, data: Path) -> bool:
    """Whether `pid` lives and is the PostgreSQL of `data`; numbers are used again, in containers soon."""
    if pid <= 1:
        return False
    if not Path("/proc/self/exe").exists():
        listed = subprocess.run(
            ["ps", "-p", str(pid), "-o", "comm="], capture_output=True, text=True, check=False
        )
        return listed.stdout.strip().endswith("postgres")
    process = Path("/proc", str(pid))
    try:
        program = (process / "exe").readlink().name.removesuffix(" (deleted)")
        return program == "postgres" and (process / "cwd").readlink() == data.resolve()
    except PermissionError:
        # Another user's process shows its name only, and whether it is a zombie.
        return _name_of_living(process) == "postgres"
    except OSError:
        return False


def _name_of_living(process: Path) -> str | None:
    try:
        name, _, rest = (process / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
    except OSError:
        return None
    return None if rest.strip().startswith(("Z", "X")) else name
