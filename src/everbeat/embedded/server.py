"""The embedded PostgreSQL server. It runs in a folder and is shared by its users; the last user stops it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import MappingProxyType, TracebackType
from typing import Self

from msgspec import Struct
from psycopg.conninfo import conninfo_to_dict

from everbeat.embedded.cluster import Cluster, Postmaster, StopMode
from everbeat.embedded.identity import make_folder
from everbeat.embedded.settings import binaries, differences, requested
from everbeat.errors import EmbeddedUnavailable, EverbeatError
from everbeat.runtime.fork import close_in_forked_child

if sys.platform != "win32":
    import fcntl

_POLL_S = 0.01


class FileLock:
    """A lock on the file at `path`. The file is created if missing and must never be deleted."""

    __slots__ = ("__weakref__", "_descriptor", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        close_in_forked_child(self)
        if os.geteuid() == 0:
            # Root might be acting in another user's folder. The folder's owner must be able to take the lock later.
            owner = path.parent.stat()
            os.fchown(self._descriptor, owner.st_uid, owner.st_gid)

    def share(self) -> None:
        """Take the lock in shared mode. Wait while another process holds it exclusively."""
        fcntl.flock(self._opened(), fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Try to take the lock exclusively. Return False if another process holds it.

        In that case, a lock held in shared mode may have been lost, so call `release`.
        """
        try:
            fcntl.flock(self._opened(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def exclusive(self, *, timeout_s: float) -> bool:
        """Take the lock exclusively. Return False if it cannot be taken within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not self.try_exclusive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        """Release the lock permanently. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Unlock before closing, because a child that was forked just now may still have a copy of the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def fileno(self) -> int:
        """Return the descriptor, or a negative number if the lock has been released."""
        return -1 if self._descriptor is None else self._descriptor

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"The lock on {self.path} was released and cannot be taken again.")
        return self._descriptor


_PATIENCE_S = 120.0  # other processes may each need a minute to start and stop the server


@contextmanager
def alone(folder: Path, *, within_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the start lock of `folder` within the block.

    Raises EmbeddedUnavailable if another process does not release the lock within `within_s` seconds.
    """
    lock = _lock(folder / "start.lock")
    try:
        if not lock.exclusive(timeout_s=within_s):
            raise EmbeddedUnavailable(
                f"Another process has been starting or stopping the PostgreSQL in {folder} "
                f"for {within_s:.0f} s.",
                fix=f"find and end it: fuser {lock.path}",
            )
        yield
    finally:
        lock.release()


class Membership(Struct):
    """This process's use of a folder. It counts as one use, however often the process has opened the folder."""

    lock: FileLock
    opened: int = 0

    @classmethod
    def join(cls, folder: Path) -> Membership:
        """Register this process as a user of the folder."""
        lock = _lock(folder / "users.lock")
        lock.share()
        return cls(lock)

    def was_last(self) -> bool:
        """Return whether no other process uses the folder. Call this once, before `leave`, while holding the start lock."""
        return self.lock.try_exclusive()

    def leave(self) -> None:
        """Stop using the folder."""
        self.lock.release()


class Memberships:
    """The folders that this process uses. In a forked child, the table starts empty, and the child must join the folders itself."""

    __slots__ = ("by_folder", "guard")

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.by_folder: dict[Path, Membership] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def alone(self, folder: Path, *, within_s: float = _PATIENCE_S) -> Iterator[None]:
        """Hold the start lock of `folder` within the block, and exclude the other threads of this process."""
        give_up_at = monotonic() + within_s
        guard = self.guard
        if not guard.acquire(timeout=within_s):
            raise EmbeddedUnavailable(
                f"Another thread of this process has been starting or stopping a PostgreSQL for {within_s:.0f} s.",
                fix=f"wait longer, or read {folder / 'server.log'}.",
            )
        try:
            with alone(folder, within_s=max(0.0, give_up_at - monotonic())):
                yield
        finally:
            guard.release()

    def _forget(self) -> None:
        # Another thread of the parent might have held the guard. FileLock itself closes the lock files.
        self.guard = threading.RLock()
        self.by_folder = {}


def _lock(path: Path) -> FileLock:
    try:
        return FileLock(path)
    except PermissionError as error:
        folder = path.parent
        raise EmbeddedUnavailable(
            f"The embedded PostgreSQL in {folder} belongs to uid {folder.stat().st_uid}, and this process is "
            f"uid {os.geteuid()}, which cannot use it.",
            fix="run as that user, or choose another folder.",
        ) from error
    except OSError as error:
        raise EmbeddedUnavailable(
            f"The lock file {path} cannot be used: {error.strerror}.",
            fix="choose a folder on a local disk that this user can write in.",
        ) from error


DEFAULT_FOLDER = Path(".everbeat")

_logger = logging.getLogger(__name__)
_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})
_memberships = Memberships()


class EmbeddedStatus(Struct, frozen=True, kw_only=True):
    """The state of a folder, determined without becoming a user of its server."""

    folder: Path
    initialised: bool
    running: bool
    pid: int | None
    url: str | None


class EmbeddedServer:
    """A handle to the PostgreSQL server in a folder. The server stops when the last handle in any process is closed.

    The handles of a killed process no longer count, but the server keeps running until the next last handle is closed or `shut_down` is
    called. A forked child has no handle until it calls `open` itself.
    """

    __slots__ = ("_closed", "_pid", "folder", "url")

    def __init__(self, folder: Path, server: Postmaster) -> None:
        """Create a handle. Only `open` calls this."""
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
        """Start the server of `folder`, or join the running server. This takes about 1 s for a new folder and 0.15 s later.

        The call waits up to `stopping_s` seconds for a server that is stopping, and up to `within_s` seconds in total. `settings` are
        PostgreSQL settings that apply when the server starts. If `tcp_port` is set, the server also listens on 127.0.0.1, where every local
        user can connect without a password. Raises EmbeddedUnavailable if the server cannot run here or is already running with other
        settings. Raises ConfigurationError if a setting is invalid.
        """
        if sys.platform == "win32":
            raise EmbeddedUnavailable(
                "The embedded PostgreSQL does not run on Windows.", fix="use a PostgreSQL by URL."
            )
        wanted = requested(settings, tcp_port=tcp_port)
        binaries()  # reports missing programs before a folder is created
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
                f"The PostgreSQL in {cluster.folder} already runs with other settings: {other}.",
                fix="open it without these settings, or stop it first (everbeat db stop).",
            )
        return server

    @property
    def pid(self) -> int | None:
        """Return the process id of the server, or None if it is not running."""
        server = Cluster(self.folder).postmaster()
        return None if server is None else server.pid

    @property
    def tcp_url(self) -> str:
        """Return the libpq URL of the server's TCP port on 127.0.0.1.

        Raises EmbeddedUnavailable if the server was started without `tcp_port`.
        """
        settings = Cluster(self.folder).settings()
        if not settings.get("listen_addresses"):
            raise EmbeddedUnavailable(
                f"The embedded PostgreSQL in {self.folder} listens on a Unix socket only.",
                fix="open it with tcp_port=....",
            )
        return f"postgresql://postgres@127.0.0.1:{settings['port']}/postgres"

    def close(self) -> bool:
        """Close this handle. Return True if it was the last handle in any process and the server was therefore stopped."""
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
                    return False  # the folder was deleted while in use; PostgreSQL notices this by itself
                with alone(self.folder):
                    return membership.was_last() and Cluster(self.folder).stop("fast")
            finally:
                membership.leave()

    def stop(self, mode: StopMode = "fast") -> bool:
        """Stop the server even if other processes are using it. Return whether it was running. `restart` and `open` start it again."""
        return self.shut_down(self.folder, mode=mode)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server even if other processes are using it, and start it again with the same settings at the same URL."""
        cluster = Cluster(self.folder)
        with alone(self.folder):
            cluster.stop(mode)
            cluster.start(cluster.settings())

    @staticmethod
    def shut_down(folder: Path = DEFAULT_FOLDER, *, mode: StopMode = "fast") -> bool:
        """Stop the server of `folder` even if other processes are using it. Return whether it was running."""
        path = folder.resolve()
        if not path.exists():
            return False
        with alone(path):
            return Cluster(path).stop(mode)

    @staticmethod
    def status(folder: Path = DEFAULT_FOLDER) -> EmbeddedStatus:
        """Return the state of `folder` without changing it."""
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
        """Return the path of the psql program that came with the server.

        Raises EmbeddedUnavailable if the `embedded` extra is not installed.
        """
        return binaries() / "psql"

    def psql_environment(self) -> dict[str, str]:
        """Return environment variables that let libpq programs find the server. Options such as `-d` and `-U` override them."""
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
