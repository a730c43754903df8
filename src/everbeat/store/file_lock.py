"""File locks (`flock`): free when their process ends, however it ends, and never inherited by a forked child.

What lives here: one lock on one file. What may not: what the lock stands for.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from everbeat.runtime.fork import close_in_forked_child

if sys.platform != "win32":
    import fcntl

_POLL_S = 0.01


class FileLock:
    """A lock on the file at `path`, which is made when missing and must never be deleted."""

    __slots__ = ("__weakref__", "_descriptor", "path")

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        close_in_forked_child(self)
        if os.geteuid() == 0:
            # root may be at work in somebody's folder: its owner must be able to take the lock later.
            owner = path.parent.stat()
            os.fchown(self._descriptor, owner.st_uid, owner.st_gid)

    def share(self) -> None:
        """Take the lock together with others; waits while somebody has it alone."""
        fcntl.flock(self._opened(), fcntl.LOCK_SH)

    def try_exclusive(self) -> bool:
        """Take the lock alone if nobody else has it; False means that a shared hold may be gone, so `release`
        it.
        """
        try:
            fcntl.flock(self._opened(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def exclusive(self, *, timeout_s: float) -> bool:
        """Take the lock alone, waiting at most `timeout_s` seconds; False when that was not enough."""
        deadline = time.monotonic() + timeout_s
        while not self.try_exclusive():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def release(self) -> None:
        """Give the lock back for good; a second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Unlocking, not only closing: a child that was forked a moment ago still has a copy of the
            # descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def fileno(self) -> int:
        """The descriptor; negative once released."""
        return -1 if self._descriptor is None else self._descriptor

    def _opened(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"The lock on {self.path} was released and cannot be taken again.")
        return self._descriptor
