"""The measured machine: its description, and the processor time that other processes use during a measurement."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from everbeat.bench.environment import BenchConnection, pause
from everbeat.runtime.clock import SystemClock
from everbeat.store.statement import compose

_PROC: Final = Path("/proc")
_KERNEL_THREAD: Final = 0x00200000  # PF_KTHREAD
_IDLE, _IO_WAIT, _INTERRUPTS, _SOFT_INTERRUPTS, _STOLEN = range(3, 8)  # columns of /proc/stat, after the name
_SAME_START_S: Final = 2.0
_TRIES: Final = 10


class Process(Struct, frozen=True, kw_only=True):
    """The counters of one process. `used_s` is its own processor time; `reaped_s` is the time of its descendants that have exited."""

    name: str
    parent: int
    is_kernel: bool
    used_s: float
    reaped_s: float
    start_ticks: int


class Reading(Struct, frozen=True, kw_only=True):
    """The machine's counters at one point in time. `busy_s` includes `stolen_s`, the time that the hypervisor gave to other machines."""

    at_s: float
    busy_s: float
    stolen_s: float
    processes: Mapping[int, Process]

    def with_descendants(self, roots: Iterable[int]) -> set[int]:
        """Return the ids of these processes and all their descendants."""
        children: dict[int, list[int]] = {}
        for pid, process in self.processes.items():
            children.setdefault(process.parent, []).append(pid)
        found: set[int] = set()
        waiting = [pid for pid in roots if pid in self.processes]
        while waiting:
            pid = waiting.pop()
            if pid not in found:
                found.add(pid)
                waiting += children.get(pid, ())
        return found


def read_machine() -> Reading | None:
    """Return the machine's counters, or None if the system does not report them.

    If a process exits during a reading, its time moves to its parent and would be lost or counted twice. In that case, the reading is
    repeated, up to a limit.
    """
    for _ in range(_TRIES - 1):
        pids = {*_pids()}
        reading = _read_once()
        if reading is None or pids <= {*reading.processes} & {*_pids()}:
            return reading
    return _read_once()


def _read_once() -> Reading | None:
    """Read all counters once. A processor that is not idle counts as busy.

    The kernel measures idle time exactly but only samples the other columns. In windows of 0.3 s, idle time was accurate to 0.01 cores,
    and the sum of the sampled columns to 0.03. Interrupts do not count as busy: the kernel charges them to no process, and the benchmark's
    own network traffic causes some of them.
    """
    at_s = SystemClock().monotonic()
    try:
        lines = (_PROC / "stat").read_text(encoding="ascii").splitlines()
        columns = [int(word) for word in lines[0].split()[1:]]
        stolen = columns[_STOLEN]
    except (OSError, ValueError, IndexError):
        return None
    if not columns[_IDLE]:  # some sandboxes write zeros
        return None
    processes = {pid: process for pid in _pids() if (process := _read(pid)) is not None}
    cores = sum(line.startswith("cpu") for line in lines) - 1
    unused = sum(columns[column] for column in (_IDLE, _IO_WAIT, _INTERRUPTS, _SOFT_INTERRUPTS))
    return Reading(
        at_s=at_s,
        busy_s=cores * at_s - unused / ticks_per_s(),
        stolen_s=stolen / ticks_per_s(),
        processes=processes,
    )


def named(reading: Reading, name: str) -> set[int]:
    """Return the ids of the processes with this name."""
    return {pid for pid, process in reading.processes.items() if process.name == name}


def postmaster_of(backend: int, started_at: float) -> int | None:
    """Return the pid of the PostgreSQL server whose backend `backend` started at this time, or None if the server is not on this machine.

    The server may run in a container on this machine, which has its own process ids. A server on another machine can have a backend with the
    same pid, but not one that started at the same time.
    """
    clock = SystemClock()
    booted_at = clock.wall().timestamp() - clock.monotonic()
    for pid in _pids():
        process = _read(pid)
        if process is None or "postgres" not in process.name or _innermost_pid(pid) != backend:
            continue
        if abs(booted_at + process.start_ticks / ticks_per_s() - started_at) < _SAME_START_S:
            return process.parent
    return None


def ticks_per_s() -> int:
    """Return the number of kernel clock ticks per second."""
    return os.sysconf("SC_CLK_TCK")


def _pids() -> Iterator[int]:
    try:
        names = [path.name for path in _PROC.iterdir()]
    except OSError:
        return
    yield from (int(name) for name in names if name.isdigit())


def _read(pid: int) -> Process | None:
    try:
        text = (_PROC / str(pid) / "stat").read_bytes()
        # The name is in parentheses and can itself contain spaces and parentheses.
        opened, closed = text.index(b"("), text.rindex(b")")
        fields = text[closed + 2 :].split()
        return Process(
            name=text[opened + 1 : closed].decode("utf-8", "replace"),
            parent=int(fields[1]),
            is_kernel=bool(int(fields[6]) & _KERNEL_THREAD),
            used_s=(int(fields[11]) + int(fields[12])) / ticks_per_s(),
            reaped_s=(int(fields[13]) + int(fields[14])) / ticks_per_s(),
            start_ticks=int(fields[19]),
        )
    except (OSError, ValueError, IndexError):  # it has exited
        return None


def _innermost_pid(pid: int) -> int | None:
    """Return the id of a process in its own PID namespace."""
    try:
        lines = (_PROC / str(pid) / "status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    numbers = next((line.split()[1:] for line in lines if line.startswith("NSpid:")), [])
    return int(numbers[-1]) if numbers else pid


LIMIT_CORES: Final = 0.15
STOLEN: Final = "stolen by the hypervisor"
ENDED: Final = "processes that have ended"
_NATS_SERVER: Final = "nats-server"
_SHOWN: Final = 3
_WORTH_SHOWING: Final = 0.01
_CHECK_S: Final = 1.0
_PR_SET_CHILD_SUBREAPER: Final = 36


class ProcessorUser(Struct, frozen=True, kw_only=True):
    """A user of processor time. `pid` is None if the user is not a single process."""

    name: str
    pid: int | None
    cores: float


class OtherUsage(Struct, frozen=True, kw_only=True):
    """The processor usage, in cores, of other processes and of the benchmark itself during `over_s` seconds.

    `busiest` lists up to three of the other processes.
    """

    cores: float
    own_cores: float
    over_s: float
    busiest: tuple[ProcessorUser, ...]

    @property
    def shown(self) -> str:
        """Return the other users as text. Command lines are left out, because they can contain secrets."""
        return ", ".join(
            f"{user.name}{'' if user.pid is None else f' (pid {user.pid})'} {user.cores:.2f}"
            for user in self.busiest
        )


class Meter:
    """Measures the processor time of all processes that belong neither to this command nor to the servers that it measures."""

    def __init__(self, connection: BenchConnection, schema: str, *, with_nats: bool = False) -> None:
        row = connection.execute(compose("bench/read_backend", schema)).fetchone()
        server = None if row is None else postmaster_of(int(row[0]), float(row[1]))
        self._roots = {os.getpid(), *(() if server is None else (server,))}
        self._with_nats = with_nats
        _adopt_orphans()

    @property
    def can_measure(self) -> bool:
        """Return whether this system reports the processor time of processes."""
        return read_machine() is not None

    def during(self, work: Callable[[], Any]) -> OtherUsage | None:
        """Do the work. Return the processor usage of other processes in the meantime, or None if the system does not report it."""
        before = read_machine()
        work()
        after = read_machine()
        if before is None or after is None:
            return None
        roots = set(self._roots)
        if self._with_nats:
            roots |= named(before, _NATS_SERVER) | named(after, _NATS_SERVER)
        return between(before, after, roots)

    def wait_until_quiet(self, limit_cores: float, *, until_s: float) -> OtherUsage | None:
        """Wait for one second in which other processes stay within the limit, and return None.

        If there is no such second before `until_s`, return the last reading.
        """
        while True:
            seen = self.during(lambda: pause(_CHECK_S))
            if seen is None or seen.cores <= limit_cores:
                return None
            if SystemClock().monotonic() >= until_s:
                return seen


def between(before: Reading, after: Reading, roots: Set[int]) -> OtherUsage:
    """Return the usage of other processes: all processor time except that of the roots and their descendants.

    Another process therefore counts even if it starts and exits between the readings. If one of the benchmark's own processes exits, its
    time moves to its parent and still counts as the benchmark's own time.
    """
    over_s = max(after.at_s - before.at_s, 1e-3)
    own_before, own_after = before.with_descendants(roots), after.with_descendants(roots)
    own_s = _used(after, own_after) - _used(before, own_before)
    busy_s = after.busy_s - before.busy_s
    cores = max(0.0, (busy_s - own_s - _used_by_kernel(before, after)) / over_s)
    users = [
        ProcessorUser(name=name, pid=pid, cores=round(used_s / over_s, 4))
        for name, pid, used_s in _others(before, after, own_before | own_after)
    ]
    users.append(
        ProcessorUser(name=ENDED, pid=None, cores=round(cores - sum(user.cores for user in users), 4))
    )
    users.sort(key=lambda user: -user.cores)
    return OtherUsage(
        cores=round(cores, 4),
        own_cores=round(own_s / over_s, 4),
        over_s=round(over_s, 3),
        busiest=tuple(user for user in users[:_SHOWN] if user.cores >= _WORTH_SHOWING),
    )


def _used(reading: Reading, pids: Set[int]) -> float:
    return sum(reading.processes[pid].used_s + reading.processes[pid].reaped_s for pid in pids)


def _used_by_kernel(before: Reading, after: Reading) -> float:
    """Return the processor time of kernel threads, which mostly write the data of the measured processes to disk."""
    return sum(_since(before, pid, process) for pid, process in after.processes.items() if process.is_kernel)


def _others(before: Reading, after: Reading, own: set[int]) -> Iterator[tuple[str, int | None, float]]:
    """Yield the seconds that the hypervisor stole, and the seconds that each other process and its reaped children used."""
    yield STOLEN, None, after.stolen_s - before.stolen_s
    ended_s: dict[int, float] = {}  # by pid: the earlier time of its descendants that have now exited
    for pid, process in before.processes.items():
        if pid not in after.processes:
            heir = _heir(before, after, process)
            ended_s[heir] = ended_s.get(heir, 0.0) + process.used_s + process.reaped_s
    for pid, process in after.processes.items():
        if pid in own or process.is_kernel:
            continue
        earlier = before.processes.get(pid)
        reaped_s = process.reaped_s - (0.0 if earlier is None else earlier.reaped_s) - ended_s.get(pid, 0.0)
        # The first process reaps orphans, whose earlier time is unknown.
        yield process.name, pid, _since(before, pid, process) + (max(0.0, reaped_s) if pid != 1 else 0.0)


def _heir(before: Reading, after: Reading, ended: Process) -> int:
    """Return the closest ancestor that still exists. It has received the time of the process that exited."""
    pid = ended.parent
    while pid not in after.processes and pid in before.processes:
        pid = before.processes[pid].parent
    return pid


def _since(before: Reading, pid: int, process: Process) -> float:
    earlier = before.processes.get(pid)
    if earlier is None or earlier.start_ticks != process.start_ticks:  # the pid was reused
        return process.used_s
    return process.used_s - earlier.used_s


def _adopt_orphans() -> None:
    """Make orphans of the measured processes children of this process, so that their time still counts as the benchmark's own.

    Orphans that exit remain zombies until this command exits. If another process reaped them, their time would be lost.
    """
    if sys.platform == "linux":
        unused = 0
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, unused, unused, unused)


def machine_document() -> dict[str, object]:
    """Return a description of the machine and its software. A value is None if the system does not report it."""
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "processor": _processor(),
        "python": platform.python_version(),
        "everbeat": version("everbeat"),
        "psycopg": version("psycopg"),
    }


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)
