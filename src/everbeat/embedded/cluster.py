"""Initialize one PostgreSQL data folder, and start, inspect and stop its server process."""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import quote

from msgspec import Struct

from everbeat.embedded.identity import Identity, choose_identity
from everbeat.embedded.settings import DEFAULT_SETTINGS, binaries, parsed, rendered, socket_folder
from everbeat.errors import EmbeddedUnavailable

_CHECK_EVERY_S = 0.01
_PROBE_TIMEOUT_S = 5.0


class Postmaster(Struct, frozen=True, kw_only=True):
    """A running server, as described by its postmaster.pid file."""

    data: Path
    pid: int
    port: int
    socket_folder: Path
    status: str

    @classmethod
    def of(cls, data: Path) -> Self | None:
        """Return the server of `data`, or None if no server is running. A file left by a dead server is ignored."""
        try:
            lines = (data / "postmaster.pid").read_text(errors="surrogateescape").splitlines()
            lines += [""] * (8 - len(lines))  # the file is written piece by piece
            pid, port = int(lines[0]), int(lines[3] or 0)
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None
        if not _is_server_of(pid, data=data):
            return None
        return cls(data=data, pid=pid, port=port, socket_folder=Path(lines[4]), status=lines[7].strip())

    @property
    def ready(self) -> bool:
        """Return whether the server accepts connections. This is tested, because the file alone may be out of date."""
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
        """Return the libpq URL of the server's Unix socket. The URL contains the port, because PGPORT may be set to another one."""
        place = quote(str(self.socket_folder), safe="/")
        return f"postgresql://postgres@/postgres?host={place}&port={self.port}"

    def signal_and_wait(self, sent: signal.Signals, *, timeout_s: float) -> bool:
        """Send a signal and wait for the process to exit. Return False if it is still running after `timeout_s` seconds."""
        if sys.platform == "linux":
            try:
                descriptor = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            except OSError:
                return self._signal_and_poll(sent, timeout_s=timeout_s)  # some sandboxes forbid pidfd_open
            try:
                # The descriptor refers to one process. After this check, the pid can no longer belong to another process.
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
            time.sleep(_CHECK_EVERY_S)
        return True


def pid_is_taken(data: Path) -> bool:
    """Return whether any process, including a zombie, has the pid in postmaster.pid."""
    try:
        os.kill(int((data / "postmaster.pid").read_text().splitlines()[0]), 0)
    except PermissionError:
        return True
    except (OSError, ValueError, IndexError, OverflowError):
        return False
    return True


def _is_server_of(pid: int, *, data: Path) -> bool:
    """Return whether `pid` is running and is the PostgreSQL server of `data`. Pids are reused, particularly quickly in containers."""
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
        # If the process belongs to another user, only its name and state are visible.
        return _name_of_living(process) == "postgres"
    except OSError:
        return False


def _name_of_living(process: Path) -> str | None:
    try:
        name, _, rest = (process / "stat").read_text(errors="replace").partition("(")[2].rpartition(")")
    except OSError:
        return None
    return None if rest.strip().startswith(("Z", "X")) else name


StopMode = Literal["smart", "fast", "immediate"]

_STOP_SIGNALS: Final[dict[str, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": getattr(
        signal, "SIGQUIT", signal.SIGTERM
    ),  # Windows has no SIGQUIT, and nothing here runs on Windows
}
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.005
_LOG_LIMIT_BYTES: Final = 8 * 1024 * 1024
_SETTINGS_FILE: Final = "everbeat.conf"


class Cluster:
    """The PostgreSQL server of one folder. `data` is its data folder, and `log` is its log file."""

    __slots__ = ("data", "folder", "log")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "server.log"

    @property
    def initialised(self) -> bool:
        """Return whether the data folder has been initialized."""
        return (self.data / "PG_VERSION").exists()

    def postmaster(self) -> Postmaster | None:
        """Return the server process of this folder, whether it is ready or not, or None if no server is running."""
        return Postmaster.of(self.data)

    def running(
        self, *, stopping_s: float = _START_TIMEOUT_S, within_s: float = _START_TIMEOUT_S
    ) -> Postmaster | None:
        """Return the server once it is ready, or None if no server is running.

        A server that is stopping has `stopping_s` seconds to exit. Any other server has `within_s` seconds to become ready. Raises
        EmbeddedUnavailable if that time has passed.
        """
        began_at = time.monotonic()
        while (server := self.postmaster()) is not None:
            if server.ready:
                return server
            patience_s = min(stopping_s, within_s) if server.status == "stopping" else within_s
            if time.monotonic() - began_at >= patience_s:
                raise self._failure(
                    f"PostgreSQL (pid {server.pid}, {server.status!r}) in {self.folder} accepts no connections"
                )
            time.sleep(_POLL_S)
        return None

    def settings(self) -> dict[str, str]:
        """Return the settings with which the server was last started."""
        try:
            return parsed((self.data / _SETTINGS_FILE).read_text())
        except FileNotFoundError:
            return {}

    def start(self, settings: Mapping[str, str], *, within_s: float = _START_TIMEOUT_S) -> Postmaster:
        """Start the server. A new folder is initialized first.

        Raises EmbeddedUnavailable, with the end of the log, if the server does not start or is not ready after `within_s` seconds. A server
        that is not ready continues to start.
        """
        version = (self.data / "PG_VERSION").read_text().strip() if self.initialised else None
        programs = binaries(version=version)
        identity = choose_identity(folder=self.folder, data=self.data, program=programs / "postgres")
        if not self.initialised:
            self._initialise(programs, identity=identity, durable=settings.get("fsync", "on") != "off")
        place = socket_folder(self.data, owner=identity)
        self._write_settings(
            {**DEFAULT_SETTINGS, **settings, "unix_socket_directories": str(place)}, identity=identity
        )
        if self.log.exists() and self.log.stat().st_size > _LOG_LIMIT_BYTES:
            self.log.replace(self.log.with_suffix(".log.old"))
        deadline = time.monotonic() + min(within_s, _START_TIMEOUT_S)
        while True:
            self._forget_the_dead(place)
            left_s = max(1.0, deadline - time.monotonic())
            server, said = self._launch(programs, identity=identity, within_s=left_s)
            if server is not None:
                return server
            # The backends of a killed server need a short time to exit, and PostgreSQL cannot start before then.
            if "shared memory block" not in said or time.monotonic() >= deadline:
                raise self._failure(f"PostgreSQL did not start in {self.folder}", said=said)
            time.sleep(0.1)

    def stop(self, mode: StopMode) -> bool:
        """Stop the server. If `mode` has no effect within 30 s, use stronger signals. Return whether a server was running."""
        server = self.postmaster()
        if server is None:
            return False
        for sent in (_STOP_SIGNALS[mode], _STOP_SIGNALS["fast"], _STOP_SIGNALS["immediate"]):
            if server.signal_and_wait(sent, timeout_s=_STOP_TIMEOUT_S):
                if server.socket_folder != self.data:
                    with suppress(OSError):
                        server.socket_folder.rmdir()
                return True
        raise self._failure(f"PostgreSQL (pid {server.pid}) in {self.folder} does not stop")

    def _initialise(self, programs: Path, *, identity: Identity, durable: bool) -> None:
        # The folder is renamed when it is complete, so that an interrupted initdb leaves nothing that looks like data.
        fresh = self.folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        identity.give(fresh)
        options = [
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-instructions",
        ]
        options += [] if durable else ["--no-sync"]
        command = (str(programs / "initdb"), "-D", fresh.name, *options)
        made = identity.run(*command, folder=self.folder, environment=_environment())
        if made.returncode != 0:
            raise self._failure(f"initdb failed in {self.folder}", said=made.stdout)
        with (fresh / "postgresql.conf").open("a") as configuration:
            configuration.write(f"\ninclude_if_exists = '{_SETTINGS_FILE}'\n")
        fresh.rename(self.data)

    def _write_settings(self, settings: Mapping[str, str], *, identity: Identity) -> None:
        path = self.data / _SETTINGS_FILE
        path.write_text(rendered(settings))
        identity.give(path)

    def _forget_the_dead(self, place: Path) -> None:
        # No server is running here. If another process or a zombie has the recorded pid, PostgreSQL refuses to start. Otherwise PostgreSQL
        # removes the file itself, after stricter checks.
        if pid_is_taken(self.data):
            (self.data / "postmaster.pid").unlink(missing_ok=True)
        for left in place.glob(".s.PGSQL.*.lock"):
            left.unlink()

    def _launch(
        self, programs: Path, *, identity: Identity, within_s: float
    ) -> tuple[Postmaster | None, str]:
        said_before = self.log.stat().st_size if self.log.exists() else 0
        # The names are relative to the folder: pg_ctl passes them to a shell, which would expand special characters in a path.
        files = ("-D", self.data.name, "-l", self.log.name)
        command = (str(programs / "pg_ctl"), "start", "-s", "-w", "-t", str(int(within_s)), *files)
        started = identity.run(*command, folder=self.folder, environment=_environment())
        server = self.running() if started.returncode == 0 else None
        return server, f"{started.stdout}\n{self._said(since=said_before)}"

    def _said(self, *, since: int = 0) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace")

    def _failure(self, what: str, *, said: str = "") -> EmbeddedUnavailable:
        words = (said.strip() or self._said()).strip().splitlines()[-10:]
        last = "\n".join(f"    {line}" for line in words) or "    (nothing)"
        return EmbeddedUnavailable(
            f"{what}. The end of its log:\n{last}\n",
            fix=f"read {self.log}, or pass the URL of your own PostgreSQL.",
        )


def _environment() -> dict[str, str]:
    # PGPORT, PGDATA and similar variables are meant for other servers and would affect this one.
    return {name: os.environ[name] for name in os.environ if not name.startswith("PG")} | {"LC_ALL": "C"}
