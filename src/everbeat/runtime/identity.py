"""Who a process is and what it uses: the facts that prove, later and from outside, that it has ended.

What lives here: reading /proc and its fallbacks. What may not: what follows from a death.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Self

from msgspec import Struct

_PROC = Path("/proc")
_BOOT_ID = _PROC / "sys/kernel/random/boot_id"
_MACHINE_ID = Path("/etc/machine-id")
# An id travels in application_name, which PostgreSQL cuts at 63 bytes: 32 + "-4194304" + "-8hexhexh" leaves
# 14 for a prefix.
_HOST_CHARACTERS = 32


class ProcessIdentity(Struct, frozen=True, kw_only=True):
    """One process of one boot of one machine; None where the system does not tell."""

    hostname: str
    pid: int
    boot_id: str | None
    pid_namespace: int | None
    start_ticks: int | None
    machine_id: str | None = None

    @classmethod
    def current(cls) -> Self:
        """The identity of the calling process."""
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
        """True only if this machine knows that the process has ended; False: alive *or* not provable.

        Comparable are processes of the same boot and pid namespace; the host name proves nothing, since
        containers and cloned machines share names.
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
    """A fresh `hostname-pid-8hex` for `pid` (default: this process): never reused, at most 49 printable ASCII characters."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname())[:_HOST_CHARACTERS] or "host"
    return f"{host}-{os.getpid() if pid is None else pid}-{secrets.token_hex(4)}"


def start_ticks(pid: int) -> int | None:
    """When `pid` started, in clock ticks since boot: tells it from a later process of that number."""
    stat = _stat(pid)
    return None if stat is None else stat.start_ticks


def rss_bytes(pid: int | None = None) -> int | None:
    """Resident memory of `pid` (default: own) in bytes; without /proc the own peak, None for others."""
    try:
        pages = int((_PROC / _name(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return _own_peak_rss_bytes() if pid in (None, os.getpid()) else None
    return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int | None = None) -> float | None:
    """Processor time, user and system, that `pid` (default: own) has used, in seconds; None if unknown."""
    if pid in (None, os.getpid()):
        return time.process_time()
    stat = _stat(pid)
    return None if stat is None else stat.cpu_ticks / os.sysconf("SC_CLK_TCK")


def uptime_ms() -> int | None:
    """How long ago this machine was started, sleep included; None where the system does not tell."""
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
        # A main thread that ended before its siblings is shown as a zombie too, with more than one thread.
        return self.state in "ZXx" and self.threads <= 1


def _stat(pid: int | None) -> _Stat | None:
    try:
        text = (_PROC / _name(pid) / "stat").read_bytes()
        # The second field is the program's name in brackets and may itself hold spaces and brackets.
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
    """The machine's own id in a form that may be stored: it is confidential, so only its digest leaves this machine."""
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
