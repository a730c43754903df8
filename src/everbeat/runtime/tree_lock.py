"""The lock file of a tree of processes: the kernel frees it when the last process of the tree is gone, however it went.

What lives here: taking it, handing it on to children, and asking from outside whether it is free. What may not: what
follows from a death. Every child that `process.spawn` starts inherits the lock, on purpose; programs that user code
starts do not, nor do processes that it forks.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Final, Self

from everbeat.runtime.fork import close_in_forked_child

if sys.platform != "win32":
    import fcntl

TREE_LOCK_VARIABLE: Final = "EVERBEAT_TREE_LOCK"
_SUFFIX: Final = ".lock"
_NAME = re.compile(r"everbeat-[0-9a-f]{16}")
_READ_BYTES: Final = 64
KEPT_S: Final = 30 * 86_400
"""Longer than any threshold, which is 200 h at most: by then age alone shows the death, and the proof is not needed."""


class TreeVerdict(Enum):
    """What a lock file proves of the tree that made it."""

    GONE = auto()
    """No process of the tree is left."""
    HELD = auto()
    """At least one process of the tree is there, even if it is stopped."""
    UNKNOWN = auto()
    """There is no such file here, or it is not the one that was recorded: nothing is proven."""


class TreeLock:
    """A lock on a file of its own whose content, and the stem of whose name, is `name`: random, and never used again."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.name = path.stem
        self._held: _Held | None = _hold(descriptor)

    @classmethod
    def take(cls, folder: Path | None = None) -> Self:
        """A new lock, in `folder` or in the user's own; raises OSError where no such file can be made."""
        home = own_folder() if folder is None else folder
        path = home / f"{new_tree_name()}{_SUFFIX}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(descriptor, path.stem.encode())
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self, *, remove: bool) -> None:
        """Lets go; with `remove` the file goes too: nobody needs its proof. A second call does nothing."""
        held, self._held = self._held, None
        if held is None or held not in _all_held:
            return  # in a forked child it is closed already
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        _all_held.remove(held)
        os.close(held.descriptor)


class _Held:
    """A descriptor whose open file is locked."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def fileno(self) -> int:
        return self.descriptor


_all_held: list[_Held] = []


def _hold(descriptor: int) -> _Held:
    held = _Held(descriptor)
    _all_held.append(held)
    close_in_forked_child(held)
    return held


def new_tree_name() -> str:
    """A name for a tree, `everbeat-` and 16 hexadecimal digits."""
    return f"everbeat-{secrets.token_hex(8)}"


def held_descriptors() -> Sequence[int]:
    """The locks that this process holds, its own and its tree's: what its children are to inherit."""
    return tuple(held.descriptor for held in _all_held)


def adopt_tree_locks() -> None:
    """Takes over the locks that `process.spawn` left in the environment, in the child, before user code is imported.

    The variable is removed and the descriptors are closed on exec again, so that what user code starts gets neither.
    """
    for text in os.environ.pop(TREE_LOCK_VARIABLE, "").split(","):
        with contextlib.suppress(ValueError, OSError):
            descriptor = int(text)
            os.set_inheritable(descriptor, False)
            _hold(descriptor)


def verdict_on(path: str, *, name: str) -> TreeVerdict:
    """What the lock file at `path`, recorded for the tree `name`, says now; for whoever may open it."""
    try:
        descriptor = _open_recorded(path, name)
    except OSError:
        return TreeVerdict.UNKNOWN
    try:
        if os.read(descriptor, _READ_BYTES) != name.encode():
            return TreeVerdict.UNKNOWN
        # Shared: two that ask at the same time do not take each other for the tree.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return TreeVerdict.HELD
    except OSError:
        return TreeVerdict.UNKNOWN
    else:
        return TreeVerdict.GONE
    finally:
        os.close(descriptor)


def remove_if_gone(path: str, *, name: str) -> bool:
    """Removes the lock file of a tree that is no more; names are random, so nobody makes the same one meanwhile."""
    if verdict_on(path, name=name) is not TreeVerdict.GONE:
        return False
    with contextlib.suppress(OSError):
        Path(path).unlink()
        return True
    return False


def remove_if_forgotten(path: str, *, name: str) -> bool:
    """Remove the lock file of a dead tree whose database is no longer used: one that was found free `KEPT_S` ago.

    The first call that finds the file free notes the time: it sets the file's times and takes the right to write away.
    """
    if verdict_on(path, name=name) is not TreeVerdict.GONE:
        return False
    with contextlib.suppress(OSError):
        file = Path(path)
        found = file.lstat()
        if found.st_mode & stat.S_IWUSR:
            os.utime(file)
            file.chmod(0o400)
        elif time.time() - found.st_mtime > KEPT_S:
            file.unlink()
            return True
    return False


def lock_files() -> dict[str, Path]:
    """The lock files in the user's own folder, by the names of their trees."""
    with contextlib.suppress(OSError):
        found = (each for each in own_folder().iterdir() if each.suffix == _SUFFIX)
        return {each.stem: each for each in found if _NAME.fullmatch(each.stem)}
    return {}


def own_folder() -> Path:
    """The user's folder of lock files, made when missing; raises OSError where it is not the user's alone."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    if runtime.is_absolute() and runtime.is_dir() and os.access(runtime, os.W_OK | os.X_OK):
        folder = runtime / "everbeat"
    else:
        folder = Path(tempfile.gettempdir()) / f"everbeat-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(
            f"{folder} is not a folder that only this user (uid {os.geteuid()}) may write to. "
            "Fix: remove it, or set XDG_RUNTIME_DIR to a folder of this user."
        )
    return folder


def _open_recorded(path: str, name: str) -> int:
    """Opens what was recorded in a database, which others may write to, if it can be a lock file at all."""
    if _NAME.fullmatch(name) is None or not Path(path).is_absolute() or Path(path).name != name + _SUFFIX:
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor


if hasattr(os, "register_at_fork"):
    # A child is not of the tree: it hands no lock on, and releases none.
    os.register_at_fork(after_in_child=_all_held.clear)
