"""One PostgreSQL data folder: initialise, start, look, stop.

What lives here: the files and programs of PostgreSQL. What may not: who shares the server, and when it should
end. Whoever changes something through this module holds the folder's start lock.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal

from everbeat.errors import EmbeddedUnavailable
from everbeat.store.embedded_programs import binaries
from everbeat.store.embedded_settings import DEFAULT_SETTINGS, parsed, rendered
from everbeat.store.embedded_socket import socket_folder
from everbeat.store.postmaster import Postmaster, pid_is_taken
from everbeat.store.server_identity import Identity, choose_identity

StopMode = Literal["smart", "fast", "immediate"]

_STOP_SIGNALS: Final[dict[str, signal.Signals]] = {
    "smart": signal.SIGTERM,
    "fast": signal.SIGINT,
    "immediate": getattr(signal, "SIGQUIT", signal.SIGTERM),  # Windows, where nothing of this runs, has none
}
_START_TIMEOUT_S: Final = 60.0
_STOP_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.005
_LOG_LIMIT_BYTES: Final = 8 * 1024 * 1024
_SETTINGS_FILE: Final = "everbeat.conf"


class Cluster:
    """The server of one folder: `data` is PostgreSQL's, `server.log` what it says."""

    __slots__ = ("data", "folder", "log")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.log = folder / "server.log"

    @property
    def initialised(self) -> bool:
        """Whether there is data to serve."""
        return (self.data / "PG_VERSION").exists()

    def postmaster(self) -> Postmaster | None:
        """The process that serves this folder, ready or not; None when none lives."""
        return Postmaster.of(self.data)

    def running(
        self, *, stopping_s: float = _START_TIMEOUT_S, within_s: float = _START_TIMEOUT_S
    ) -> Postmaster | None:
        """Return the server once it is ready, None when none lives.

        A server that was asked to stop may take `stopping_s` seconds to end, any other `within_s` to become ready.
        """
        began_at = time.monotonic()
        while (server := self.postmaster()) is not None:
            if server.ready:
                return server
            patience_s = min(stopping_s, within_s) if server.status == "stopping" else within_s
            if time.monotonic() - began_at >= patience_s:
                raise self._failure(
                    f"PostgreSQL (pid {server.pid}, {server.status!r}) in {self.folder} takes no connection"
                )
            time.sleep(_POLL_S)
        return None

    def settings(self) -> dict[str, str]:
        """The settings the server was last started with."""
        try:
            return parsed((self.data / _SETTINGS_FILE).read_text())
        except FileNotFoundError:
            return {}

    def start(self, settings: Mapping[str, str], *, within_s: float = _START_TIMEOUT_S) -> Postmaster:
        """Start the server, initialising a new folder first; one that is not ready after `within_s` seconds goes on starting.

        Raises EmbeddedUnavailable with the server's last words.
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
            # The backends of a killed server need a moment to notice; PostgreSQL does not start beside them.
            if "shared memory block" not in said or time.monotonic() >= deadline:
                raise self._failure(f"PostgreSQL did not start in {self.folder}", said=said)
            time.sleep(0.1)

    def stop(self, mode: StopMode) -> bool:
        """Stop the server, harder when `mode` is not obeyed in 30 s; True when one lived."""
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
        # Renamed when whole: an interrupted initdb leaves nothing that looks like data.
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
        # No server lives here, but somebody else or a zombie may have its number, and PostgreSQL would refuse
        # to start. Where nobody has, PostgreSQL clears up by itself, and looks closer.
        if pid_is_taken(self.data):
            (self.data / "postmaster.pid").unlink(missing_ok=True)
        for left in place.glob(".s.PGSQL.*.lock"):
            left.unlink()

    def _launch(
        self, programs: Path, *, identity: Identity, within_s: float
    ) -> tuple[Postmaster | None, str]:
        said_before = self.log.stat().st_size if self.log.exists() else 0
        # Names relative to the folder: pg_ctl hands them to a shell, which would expand what a path may hold.
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
            f"{what}. Its last words:\n{last}\n",
            fix=f"read {self.log}, or use a PostgreSQL of your own by URL.",
        )


def _environment() -> dict[str, str]:
    # PGPORT, PGDATA and their kin are meant for servers of the caller's own and would change this one.
    return {name: os.environ[name] for name in os.environ if not name.startswith("PG")} | {"LC_ALL": "C"}
