"""Who uses the embedded server of a folder: two lock files, and this process's account of what it has open.

`start.lock` is held alone while somebody starts or stops the server, `users.lock` is held together by every
process that uses it. The kernel frees both when a process ends in whatever way: the dead are never counted.
What may not live here: PostgreSQL.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from msgspec import Struct

from everbeat.errors import EmbeddedUnavailable
from everbeat.store.file_lock import FileLock

_PATIENCE_S = 120.0  # others may need a minute each to start and to stop


@contextmanager
def alone(folder: Path, *, within_s: float = _PATIENCE_S) -> Iterator[None]:
    """Hold the start lock of `folder`; raises EmbeddedUnavailable when another keeps it for `within_s` seconds."""
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
    """This process's one use of a folder, however often it was opened."""

    lock: FileLock
    opened: int = 0

    @classmethod
    def join(cls, folder: Path) -> Membership:
        """Become a user of the folder."""
        lock = _lock(folder / "users.lock")
        lock.share()
        return cls(lock)

    def was_last(self) -> bool:
        """Whether nobody else uses the folder; asked once, holding the start lock, before leaving."""
        return self.lock.try_exclusive()

    def leave(self) -> None:
        """Stop being a user."""
        self.lock.release()


class Memberships:
    """What this process uses, by folder; empty again in a forked child, which must join by itself."""

    __slots__ = ("by_folder", "guard")

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.by_folder: dict[Path, Membership] = {}
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def alone(self, folder: Path, *, within_s: float = _PATIENCE_S) -> Iterator[None]:
        """Hold the start lock of `folder`, and keep the other threads of this process away."""
        give_up_at = monotonic() + within_s
        guard = self.guard
        if not guard.acquire(timeout=within_s):
            raise EmbeddedUnavailable(
                f"Another thread of this process has been starting or stopping a PostgreSQL for {within_s:.0f} s.",
                fix=f"wait longer, or see what {folder / 'server.log'} says.",
            )
        try:
            with alone(folder, within_s=max(0.0, give_up_at - monotonic())):
                yield
        finally:
            guard.release()

    def _forget(self) -> None:
        # Another thread of the parent may hold the guard. The lock files are closed by FileLock itself.
        self.guard = threading.RLock()
        self.by_folder = {}


def _lock(path: Path) -> FileLock:
    try:
        return FileLock(path)
    except PermissionError as error:
        folder = path.parent
        raise EmbeddedUnavailable(
            f"The embedded PostgreSQL in {folder} belongs to uid {folder.stat().st_uid}, and this process is "
            f"uid {os.geteuid()}, which may not use it.",
            fix="run as that user, or choose another folder.",
        ) from error
    except OSError as error:
        raise EmbeddedUnavailable(
            f"The lock file {path} cannot be used: {error.strerror}.",
            fix="choose a folder on a local disk that this user may write in.",
        ) from error
