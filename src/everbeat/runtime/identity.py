"""The identity of a process (boot id, pid, start time), and a file lock by which other processes can prove that a tree has exited."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Final, Self

from msgspec import Struct

from everbeat.runtime.fork import close_in_forked_child

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_MACHINE_ID = Path("/etc/machine-id")
# An id is sent in application_name, which PostgreSQL truncates to 63 bytes. 32 + "-4194304" + "-8hexhexh" leave 14 bytes for a prefix.
_HOST_CHARACTERS = 32


class ProcessIdentity(Struct, frozen=True, kw_only=True):
    """One process in one boot of one machine. Facts that the system does not provide are None."""

    hostname: str
    pid: int
    boot_id: str | None
    pid_namespace: int | None
    start_ticks: int | None
    machine_id: str | None = None

    @classmethod
    def current(cls) -> Self:
        """Return the identity of the calling process."""
        pid = os.getpid()
        return cls(
            hostname=socket.gethostname(),
            pid=pid,
            boot_id=_boot_id(),
            pid_namespace=_pid_namespace(),
            start_ticks=start_ticks(pid),
            machine_id=_machine_id(),
        )

    def is_provably_gone(self) -> bool:
        """Return True only if this machine proves that the process has exited.

        False means that the process is alive *or* that nothing can be proven. Only processes of the same boot and pid namespace can be
        compared. The host name proves nothing, because containers and cloned machines share host names.
        """
        if self.boot_id is None or self.pid_namespace is None:
            return False
        if (self.boot_id, self.pid_namespace) != (_boot_id(), _pid_namespace()):
            return False
        if not _pid_exists(self.pid):
            return True
        stat = _stat(self.pid)
        if stat is None:
            return not _pid_exists(self.pid)
        return stat.has_ended or (self.start_ticks is not None and stat.start_ticks != self.start_ticks)


def new_id(pid: int | None = None) -> str:
    """Return a new unique `hostname-pid-8hex` for `pid` (default: this process), with at most 49 printable ASCII characters."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:_HOST_CHARACTERS] or "host"
    return f"{host}-{os.getpid() if pid is None else pid}-{secrets.token_hex(4)}"


def start_ticks(pid: int) -> int | None:
    """Return the start time of `pid` in clock ticks since boot. The start time distinguishes the process from a later process with the same pid."""
    stat = _stat(pid)
    return None if stat is None else stat.start_ticks


def rss_bytes(pid: int | None = None) -> int | None:
    """Return the resident memory of `pid` (default: this process) in bytes.

    Without /proc, return the peak memory for this process and None for others.
    """
    try:
        pages = int((_PROC / _name(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return _own_peak_rss_bytes() if pid in (None, os.getpid()) else None
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int | None = None) -> float | None:
    """Return the user plus system CPU time of `pid` (default: this process) in seconds, or None if unknown."""
    if pid in (None, os.getpid()):
        return time.process_time()
    stat = _stat(pid)
    return None if stat is None else stat.cpu_ticks / os.sysconf("SC_CLK_TCK")


def uptime_ms() -> int | None:
    """Return the milliseconds since the machine booted, including sleep, or None if the system does not provide this."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return None
    return round(time.clock_gettime(time.CLOCK_BOOTTIME) * 1_000)


class _Stat(Struct, frozen=True, kw_only=True):
    state: str
    cpu_ticks: int
    threads: int
    start_ticks: int

    @property
    def has_ended(self) -> bool:
        # If the main thread exits before the other threads, the process also appears as a zombie, but with more than one thread.
        return self.state in "ZXx" and self.threads <= 1


def _stat(pid: int | None) -> _Stat | None:
    try:
        text = (_PROC / _name(pid) / "stat").read_bytes()
        # The second field is the program's name in parentheses, and may itself contain spaces and parentheses.
        fields = text[text.rindex(b")") + 2 :].split()
        return _Stat(
            state=fields[0].decode("ascii"),
            cpu_ticks=int(fields[11]) + int(fields[12]),
            threads=int(fields[17]),
            start_ticks=int(fields[19]),
        )
    except (OSError, ValueError, IndexError):
        return None


def _name(pid: int | None) -> str:
    return "self" if pid is None else str(pid)


def _pid_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str | None:
    try:
        return _BOOT_ID.read_text().strip() or None
    except OSError:
        return None


def _machine_id() -> str | None:
    """Return a digest of the machine id. The id itself is confidential and must not leave the machine."""
    try:
        found = _MACHINE_ID.read_text().strip()
    except OSError:
        return None
    if not re.fullmatch(r"[0-9a-f]{32}", found):
        return None  # empty in many containers, or "uninitialized"
    return hashlib.blake2b(bytes.fromhex(found), digest_size=16, person=b"everbeat").hexdigest()


def _pid_namespace() -> int | None:
    try:
        return (_PROC / "self/ns/pid").stat().st_ino
    except OSError:
        return None


try:
    import resource
    import sys

    def _own_peak_rss_bytes() -> int | None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

except ImportError:  # Windows

    def _own_peak_rss_bytes() -> int | None:
        return None


if sys.platform != "win32":
    import fcntl

TREE_LOCK_VARIABLE: Final = "EVERBEAT_TREE_LOCK"
_log = logging.getLogger("everbeat.supervisor")
_SUFFIX: Final = ".lock"
_NAME = re.compile(r"everbeat-[0-9a-f]{16}")
_READ_BYTES: Final = 64
KEPT_S: Final = 30 * 86_400
"""In seconds. This is longer than any threshold (at most 200 h). After that, the age of the heartbeat proves the death without a lock file."""


class TreeVerdict(Enum):
    """The verdict that a lock file gives about the tree that created it."""

    GONE = auto()
    """All processes of the tree have exited."""
    HELD = auto()
    """At least one process of the tree still exists, even if it is stopped."""
    UNKNOWN = auto()
    """Nothing is proven: the file does not exist on this machine, or it is not the recorded file."""


class TreeLock:
    """A lock on a separate file. `name` is random and never reused; it is both the file's content and the stem of the file's name."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.name = path.stem
        self._held: _Held | None = _hold(descriptor)

    @classmethod
    def take(cls, folder: Path | None = None) -> Self:
        """Create a file in `folder`, or in the user's own folder, and lock it. Raises OSError if no such file can be created."""
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
        """Release the lock. If `remove` is set, also delete the file, which is no longer needed as a proof. A second call does nothing."""
        held, self._held = self._held, None
        if held is None or held not in _all_held:
            return  # already closed in a forked child
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()
        _all_held.remove(held)
        os.close(held.descriptor)


def take_tree_lock() -> TreeLock | None:
    """Return the lock file for a process tree that starts in this process, or None if the operating system refuses the lock."""
    try:
        return TreeLock.take()
    except OSError as problem:
        _log.warning("no_lock_file problem=%r", str(problem))
        return None


class _Held:
    """A descriptor of a locked file."""

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
    """Return a name for a tree: `everbeat-` and 16 hexadecimal digits."""
    return f"everbeat-{secrets.token_hex(8)}"


def held_descriptors() -> Sequence[int]:
    """Return the descriptors of the locks that this process holds, which its children inherit."""
    return tuple(held.descriptor for held in _all_held)


def adopt_tree_locks() -> None:
    """Adopt the locks that `spawn` left in the environment. Call this function in the child before user code is imported.

    The variable is removed and the descriptors are set to close on exec, so that programs started by user code get neither.
    """
    for text in os.environ.pop(TREE_LOCK_VARIABLE, "").split(","):
        with contextlib.suppress(ValueError, OSError):
            descriptor = int(text)
            os.set_inheritable(descriptor, False)
            _hold(descriptor)


def verdict_on(path: str, *, name: str) -> TreeVerdict:
    """Return the verdict of the lock file at `path` about the tree `name`. The caller needs permission to open the file."""
    try:
        descriptor = _open_recorded(path, name)
    except OSError:
        return TreeVerdict.UNKNOWN
    try:
        if os.read(descriptor, _READ_BYTES) != name.encode():
            return TreeVerdict.UNKNOWN
        # The lock is shared, so two processes that check at the same time do not mistake each other for the tree.
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
    """Remove the lock file of a tree that has exited. Return whether it was removed. Names are random, so no other tree uses the file."""
    if verdict_on(path, name=name) is not TreeVerdict.GONE:
        return False
    with contextlib.suppress(OSError):
        Path(path).unlink()
        return True
    return False


def remove_if_forgotten(path: str, *, name: str) -> bool:
    """Remove a dead tree's lock file if it was found unlocked more than `KEPT_S` seconds ago. This cleans up after abandoned databases.

    The first call that finds the file unlocked records the time: it updates the file's timestamps and removes its write permission. Return
    whether the file was removed.
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
    """Return the lock files in the user's own folder, by tree name."""
    with contextlib.suppress(OSError):
        found = (each for each in own_folder().iterdir() if each.suffix == _SUFFIX)
        return {each.stem: each for each in found if _NAME.fullmatch(each.stem)}
    return {}


def own_folder() -> Path:
    """Return the user's folder for lock files, created if missing. Raises OSError if another user owns the folder or may write to it."""
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
    """Open a path read from a database to which others might be able to write. Raises FileNotFoundError if the file cannot be a lock file."""
    if _NAME.fullmatch(name) is None or not Path(path).is_absolute() or Path(path).name != name + _SUFFIX:
        raise FileNotFoundError(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return descriptor


if hasattr(os, "register_at_fork"):
    # A forked child does not belong to the tree: it neither passes on nor releases any lock.
    os.register_at_fork(after_in_child=_all_held.clear)
