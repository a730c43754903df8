"""The embedded PostgreSQL: a server in a folder, shared by every process that asks, stopped by the last one.

What lives here: the public face, and when a server starts and ends. What may not: how PostgreSQL is run
(`embedded_cluster`) and how users are counted (`embedded_sharing`).
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Self

from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict

from everbeat.errors import EmbeddedUnavailable, EverbeatError
from everbeat.store.embedded_cluster import Cluster, StopMode
from everbeat.store.embedded_programs import binaries
from everbeat.store.embedded_settings import differences, requested
from everbeat.store.embedded_sharing import Membership, Memberships, alone
from everbeat.store.postmaster import Postmaster
from everbeat.store.server_identity import make_folder

DEFAULT_FOLDER = Path(".everbeat")

_logger = logging.getLogger(__name__)
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
_memberships = Memberships()


class EmbeddedStatus(Struct, frozen=True, kw_only=True):
    """What can be said of a folder without becoming a user of its server."""

    folder: Path
    initialised: bool
    running: bool
    pid: int | None
    url: str | None


class EmbeddedServer:
    """One use of the PostgreSQL in a folder; the last `close()` among all processes stops the server.

    A process that is killed counts no longer, but stops nothing: the next last one does, or `shut_down`.
    A forked child is no user until it opens for itself.
    """

    __slots__ = ("_closed", "_pid", "folder", "url")

    def __init__(self, folder: Path, server: Postmaster) -> None:
        """For `open` only."""
        self.folder = folder
        self.url = server.url
        self._pid = os.getpid()
        self._closed = False

    @classmethod
    def open(
        cls,
        folder: Path = DEFAULT_FOLDER,
        *,
        settings: Mapping[str, str] = _NO_SETTINGS,
        tcp_port: int | None = None,
        stopping_s: float = 60.0,
        within_s: float = 120.0,
    ) -> Self:
        """Start the server of `folder`, or join the one that runs: about 1 s for a new folder, 0.15 s later.

        A server that was asked to stop is waited for up to `stopping_s` seconds, and everything up to `within_s`.
        `settings` are PostgreSQL's and hold from its start on; `tcp_port` also opens 127.0.0.1 to every local
        user, who needs no password. Raises EmbeddedUnavailable when it cannot run here or already runs with
        other settings, and ConfigurationError for impossible settings.
        """
        if sys.platform == "win32":
            raise EmbeddedUnavailable(
                "The embedded PostgreSQL does not run on Windows.", fix="use a PostgreSQL by URL."
            )
        wanted = requested(settings, tcp_port=tcp_port)
        binaries()  # says what to install before a folder is made
        path = make_folder(folder)
        give_up_at = monotonic() + within_s
        with _memberships.alone(path, within_s=within_s):
            joined = _memberships.by_folder.get(path)
            membership = joined or Membership.join(path)
            try:
                left_s = max(0.0, give_up_at - monotonic())
                server = cls._started(Cluster(path), wanted=wanted, stopping_s=stopping_s, within_s=left_s)
            except BaseException:
                if joined is None:
                    membership.leave()
                raise
            _memberships.by_folder[path] = membership
            membership.opened += 1
        opened = cls(path, server)
        atexit.register(opened._close_at_exit)
        return opened

    @staticmethod
    def _started(
        cluster: Cluster, *, wanted: Mapping[str, str], stopping_s: float, within_s: float
    ) -> Postmaster:
        give_up_at = monotonic() + within_s
        server = cluster.running(stopping_s=stopping_s, within_s=min(60.0, within_s))
        if server is None:
            return cluster.start(wanted, within_s=give_up_at - monotonic())
        if other := differences(wanted, actual=cluster.settings()):
            raise EmbeddedUnavailable(
                f"The PostgreSQL in {cluster.folder} already runs, with the settings of its start: {other}.",
                fix="open it without these settings, or stop it first (everbeat db stop).",
            )
        return server

    @property
    def pid(self) -> int | None:
        """The process id of the server, None while it does not run."""
        server = Cluster(self.folder).postmaster()
        return None if server is None else server.pid

    @property
    def tcp_url(self) -> str:
        """The libpq URL on 127.0.0.1; raises EmbeddedUnavailable for a server started without `tcp_port`."""
        settings = Cluster(self.folder).settings()
        if not settings.get("listen_addresses"):
            raise EmbeddedUnavailable(
                f"The embedded PostgreSQL in {self.folder} listens on a Unix socket only.",
                fix="open it with tcp_port=....",
            )
        return f"postgresql://postgres@127.0.0.1:{settings['port']}/postgres"

    def close(self) -> bool:
        """End this use; True when it was the last of all processes and stopped the server."""
        if self._closed or self._pid != os.getpid():
            return False
        with _memberships.guard:
            self._closed = True
            atexit.unregister(self._close_at_exit)
            membership = _memberships.by_folder[self.folder]
            membership.opened -= 1
            if membership.opened:
                return False
            del _memberships.by_folder[self.folder]
            try:
                if not self.folder.exists():
                    return False  # deleted under its users; PostgreSQL notices by itself
                with alone(self.folder):
                    return membership.was_last() and Cluster(self.folder).stop("fast")
            finally:
                membership.leave()

    def stop(self, mode: StopMode = "fast") -> bool:
        """Stop the server under all its users; True when one ran. `restart` and `open` start it again."""
        return self.shut_down(self.folder, mode=mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server under all its users and start it with the same settings at the same URL."""
        cluster = Cluster(self.folder)
        with alone(self.folder):
            cluster.stop(mode)
            cluster.start(cluster.settings())

    @staticmethod
    def shut_down(folder: Path = DEFAULT_FOLDER, *, mode: StopMode = "fast") -> bool:
        """Stop the server of `folder` under all its users; False when none ran there."""
        path = folder.resolve()
        if not path.exists():
            return False
        with alone(path):
            return Cluster(path).stop(mode)

    @staticmethod
    def status(folder: Path = DEFAULT_FOLDER) -> EmbeddedStatus:
        """What runs in `folder`; changes nothing."""
        cluster = Cluster(folder.resolve())
        server = cluster.postmaster()
        running = server is not None and server.ready
        return EmbeddedStatus(
            folder=cluster.folder,
            initialised=cluster.initialised,
            running=running,
            pid=None if server is None else server.pid,
            url=server.url if server is not None and running else None,
        )

    @staticmethod
    def psql_binary() -> Path:
        """The psql that came with the server; raises EmbeddedUnavailable when the extra is not installed."""
        return binaries() / "psql"

    def psql_environment(self) -> dict[str, str]:
        """How programs of libpq find the server, unless their own options such as `-d` and `-U` say otherwise."""
        names = {"host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "dbname": "PGDATABASE"}
        given = conninfo_to_dict(self.url)
        return {names[name]: str(value) for name, value in given.items() if name in names}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except (EverbeatError, OSError):
            _logger.exception("The embedded PostgreSQL in %s could not be closed.", self.folder)
