"""Start child processes and report how they exit. In the child, connect to the parent and exit when the parent does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

from everbeat.runtime.channel import channel_pair
from everbeat.runtime.fork import close_in_forked_child
from everbeat.runtime.identity import TREE_LOCK_VARIABLE, adopt_tree_locks, held_descriptors
from everbeat.runtime.inherited import open_standard_streams

EXIT_SOFTWARE: Final = 70
"""The exit code of a process that exited by itself because an essential part had crashed."""
EXIT_SLOTS_LEAKED: Final = 74
"""Every slot of an executor is blocked by code that ignored its cancellation. The process has finished its work and must be replaced."""
EXIT_UNSETTLED: Final = 75
"""The worker had to exit at once and could not reach the database to store the results of its tasks."""
EXIT_CODE_RUNS: Final = 76
"""The worker had to shut down, but the code of some tasks did not stop. Exiting the process stops that code."""
OWN_EXITS: Final = frozenset({EXIT_SOFTWARE, EXIT_SLOTS_LEAKED, EXIT_UNSETTLED, EXIT_CODE_RUNS})
"""Exit codes of everbeat's own processes for exits that no task caused."""
KILLED_BY_US: Final = ", killed by its supervisor"
"""The suffix that a cause of death gets if the parent sent SIGKILL."""


class ExitReport(Struct, frozen=True, kw_only=True):
    """How a child exited: with an exit code or by a signal. Both fields are None if other code collected the exit status.

    `killed_because` says why its parent sent SIGKILL. `stopped` means that the worker had to shut down, and its process exited while code
    of its tasks was still running.
    """

    pid: int
    exit_code: int | None = None
    signal_number: int | None = None
    signal_name: str | None = None
    out_of_memory: bool = False
    max_rss_bytes: int | None = None
    killed_because: str | None = None
    stopped: bool = False

    @classmethod
    def from_wait_status(
        cls, pid: int, status: int, *, max_rss: int | None = None, out_of_memory: bool = False
    ) -> Self:
        """Decode a status from `os.wait4`. `max_rss` is in the platform's unit."""
        peak = max_rss if max_rss is None or sys.platform == "darwin" else max_rss * 1024
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            return cls(
                pid=pid,
                signal_number=number,
                signal_name=signal_name(number),
                out_of_memory=out_of_memory,
                max_rss_bytes=peak,
            )
        return cls(pid=pid, exit_code=os.WEXITSTATUS(status), max_rss_bytes=peak)

    def with_cause(self, because: str | None) -> Self:
        """Return the report with the parent's reason for sending SIGKILL. The report of any other exit is returned unchanged."""
        is_ours = because is not None and self.signal_number == signal.SIGKILL
        return replace(self, killed_because=because) if is_ours else self

    @property
    def is_success(self) -> bool:
        """Return whether the child exited by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def cause(self) -> str:
        """Return the cause as one phrase, for logs and death certificates."""
        if self.out_of_memory:
            return f"killed by {self.signal_name}: out of memory (cgroup oom_kill counter rose)"
        if self.killed_because is not None:
            return f"{self.killed_because}{KILLED_BY_US}"
        if self.signal_name is not None:
            return f"killed by {self.signal_name}"
        if self.exit_code is not None:
            return (
                f"exit code {self.exit_code}{' (stopped, and code of its tasks ran)' if self.stopped else ''}"
            )
        return "gone (its exit status was taken by other code in the parent)"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL` for 9, or `signal 34` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


CHANNEL_FD_VARIABLE: Final = "EVERBEAT_CHANNEL_FD"
PARENT_PID_VARIABLE: Final = "EVERBEAT_PARENT_PID"

EXIT_ORPHANED: Final = 71
"""The exit code of a child that exited by itself because its parent was gone."""

STACK_DUMP_SIGNAL: Final = getattr(signal, "SIGUSR2", signal.SIGTERM)

_PR_SET_PDEATHSIG = 1


def adopt_channel() -> socket.socket:
    """Return the socket that `spawn` left in the environment, adopt the locks, and arrange to die with the parent if possible.

    The variables are removed and the descriptor is set to close on exec, so that grandchildren inherit neither. Raises RuntimeError if the
    process was not started by `spawn`.
    """
    text = os.environ.pop(CHANNEL_FD_VARIABLE, None)
    parent_pid = os.environ.pop(PARENT_PID_VARIABLE, None)
    if text is None:
        raise RuntimeError(
            f"{CHANNEL_FD_VARIABLE} is not set: this program is started by everbeat's worker, not by hand. "
            "Fix: run `everbeat worker module:app`."
        )
    try:
        sock = socket.socket(fileno=int(text))
    except (ValueError, OSError) as error:
        raise RuntimeError(
            f"{CHANNEL_FD_VARIABLE} is {text!r}, which is not an open socket of this process."
        ) from error
    sock.set_inheritable(False)
    close_in_forked_child(sock)  # user code can fork while it is imported
    adopt_tree_locks()
    if parent_pid is not None:
        die_with_parent(int(parent_pid))
    return sock


def die_with_parent(parent_pid: int) -> bool:
    """Let the kernel send SIGKILL to this process when `parent_pid` exits. Return False if only end-of-file can reveal that exit.

    This is correct only if the *main* thread of the parent created this process: the signal depends on that thread. If the parent has
    already exited, exit with EXIT_ORPHANED.
    """
    armed = sys.platform == "linux" and _set_death_signal(signal.SIGKILL)
    # If the parent exited before the call above, the kernel sends no signal. The pid is not compared with 1: a subreaper also adopts orphans.
    if os.getppid() != parent_pid:
        exit_orphaned()
    return armed


FAREWELL_PATIENCE_S: Final = 1.0
"""How long log handlers, other threads and exit handlers can delay the exit of this process, in seconds."""


def cut_off_later(code: int) -> None:
    """Exit this process with `code` after `FAREWELL_PATIENCE_S` seconds, if it has not exited by then."""

    def cut_off() -> None:
        time.sleep(FAREWELL_PATIENCE_S)
        os._exit(code)

    threading.Thread(target=cut_off, name="everbeat-farewell", daemon=True).start()


def exit_orphaned() -> None:
    """Exit at once. A child uses this function as the `on_eof` callback of its channel.

    There is no cleanup, because another process might already have taken over its work.
    """
    os._exit(EXIT_ORPHANED)


def offer_stack_dumps() -> None:
    """On STACK_DUMP_SIGNAL, write the stacks of all threads to stderr, even while C code holds the GIL."""
    if hasattr(faulthandler, "register"):
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True, chain=False)


def _set_death_signal(number: int) -> bool:
    unused = 0
    return bool(ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), unused, unused, unused) == 0)


_MOUNTS = Path("/proc/self/mountinfo")
_MEMBERSHIP = Path("/proc/self/cgroup")


class OutOfMemoryCounter:
    """Distinguishes deaths caused by the out-of-memory killer from other deaths. The children of one process share one instance.

    Each increase of the counter explains one death, so a later manual kill of another child is not attributed to a lack of memory.
    """

    __slots__ = ("_explained", "_file")

    def __init__(self, file: Path | None = None) -> None:
        self._file = find_counter_file() if file is None else file
        self._explained = self.read()

    def read(self) -> int | None:
        """Return the number of out-of-memory kills in this cgroup so far, or None if the system does not report it."""
        return None if self._file is None else read_counter(self._file)

    def explains_a_death(self) -> bool:
        """Return whether the counter has increased since the last call, and count one increase as explained."""
        now = self.read()
        if now is None:
            return False
        if self._explained is None or now <= self._explained:
            self._explained = now
            return False
        self._explained += 1
        return True


def read_counter(file: Path) -> int | None:
    """Return the `oom_kill` value of `memory.events` (v2) or `memory.oom_control` (v1), or None if it cannot be read."""
    try:
        for line in file.read_text().splitlines():
            match line.split():
                case ["oom_kill", count]:
                    return int(count)
                case _:
                    pass
    except (OSError, ValueError):
        pass
    return None


def find_counter_file(*, mounts: Path = _MOUNTS, membership: Path = _MEMBERSHIP) -> Path | None:
    """Return the file that counts the kills in this process's cgroup, or None if no such file exists."""
    try:
        own = membership.read_text().splitlines()
        mounted = mounts.read_text().splitlines()
    except OSError:
        return None
    for candidate in _candidates(own, mounted):
        if read_counter(candidate) is not None:
            return candidate
    return None


def _candidates(own: list[str], mounted: list[str]) -> list[Path]:
    candidates: list[Path] = []
    for line in own:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            kind, name = "cgroup2", "memory.events"
        elif "memory" in controllers.split(","):
            kind, name = "cgroup", "memory.oom_control"
        else:
            continue
        for mount_point, root, file_system, options in map(_mount, mounted):
            if file_system != kind or (kind == "cgroup" and "memory" not in options.split(",")):
                continue
            # A container sees its own cgroup as the root of the mount, while its membership shows the host's path.
            inside = path.removeprefix(root) if root != "/" else path
            candidates += [Path(mount_point) / inside.lstrip("/") / name, Path(mount_point) / name]
    return candidates


def _mount(line: str) -> tuple[str, str, str, str]:
    # Fields 4 and 5 are the root and the mount point. A single dash is followed by type, source and options.
    left, _, right = line.partition(" - ")
    fields, kind = left.split(), right.split()
    if len(fields) < 5 or len(kind) < 3:
        return "", "", "", ""
    return fields[4], fields[3], kind[0], kind[2]


# Seconds between two checks for an exit if the kernel does not support pidfds.
_CHECK_EVERY_S = 0.02


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    out_of_memory: OutOfMemoryCounter | None = None,
    own_group: bool = False,
) -> ChildProcess:
    """Start `argv` with a channel to the child. Stdin is empty. The child inherits stdout, stderr and the locks of this tree.

    `env` is the child's whole environment (None: a copy of this process's environment). The channel's variables are added. With
    `own_group`, the child leads a process group. Signals from the terminal do not reach the group, and killing the child also kills the
    processes that it started. If this function is called outside the main thread, the child gets no death signal, because it would be sent
    when that *thread* exits. The child then relies on end-of-file. Raises OSError if the program cannot be started, and NotImplementedError
    on Windows.
    """
    if sys.platform == "win32":
        raise NotImplementedError("Windows can send tasks; to run workers use Linux or macOS.")
    open_standard_streams()
    counter = OutOfMemoryCounter() if out_of_memory is None else out_of_memory
    ours, theirs = channel_pair()
    environment = dict(os.environ if env is None else env)
    environment[CHANNEL_FD_VARIABLE] = str(theirs.fileno())
    environment.pop(PARENT_PID_VARIABLE, None)
    locks = held_descriptors()
    environment[TREE_LOCK_VARIABLE] = ",".join(map(str, locks))
    if threading.current_thread() is threading.main_thread():
        environment[PARENT_PID_VARIABLE] = str(os.getpid())
    try:
        popen = subprocess.Popen(
            list(argv),
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), *locks),
            process_group=0 if own_group else None,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ChildProcess(popen, channel_socket=ours, out_of_memory=counter, own_group=own_group)


class ChildProcess:
    """A child of this process, created by `spawn`. All methods may be called from any thread."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        *,
        channel_socket: socket.socket,
        out_of_memory: OutOfMemoryCounter,
        own_group: bool,
    ) -> None:
        self.pid = popen.pid
        self.channel_socket = channel_socket
        self._popen = popen
        self.out_of_memory = out_of_memory
        self._own_group = own_group
        self._lock = threading.Lock()
        self._report: ExitReport | None = None
        self._pidfd = _open_pidfd(popen.pid)
        self._exited: asyncio.Future[ExitReport] | None = None

    def poll(self) -> ExitReport | None:
        """Return the exit report, or None while the child is running. The call also collects the exit status from the kernel."""
        with self._lock:
            if self._report is None:
                self._report = self._reap()
            return self._report

    async def wait_exit(self) -> ExitReport:
        """Wait until the child has exited, and return its report. Any number of coroutines on one loop may wait, even after the exit."""
        report = self.poll()
        if report is not None:
            return report
        loop = asyncio.get_running_loop()
        if self._exited is None or self._exited.get_loop() is not loop:
            self._exited = loop.create_future()
            if self._pidfd is not None:
                loop.add_reader(self._pidfd, self._check, loop)
            else:
                loop.call_later(_CHECK_EVERY_S, self._check, loop)
        # Shielded, because cancelling one waiter must not cancel the future that the others share.
        return await asyncio.shield(self._exited)

    def terminate(self) -> bool:
        """Send SIGTERM to the child. Return False if it has already exited."""
        return self._send(signal.SIGTERM)

    def kill(self) -> bool:
        """Send SIGKILL to the child and, with `own_group`, to its process group. Return False if the child has already exited."""
        return self._send(signal.SIGKILL, group=self._own_group)

    def dump_stacks(self) -> bool:
        """Make a child that called `offer_stack_dumps` write the stacks of its threads to stderr.

        The dump works even while C code holds the GIL. The signal kills a child that has not called `offer_stack_dumps`.
        """
        return self._send(STACK_DUMP_SIGNAL)

    def close(self) -> None:
        """Close the descriptors, so that the child sees end-of-file. The call neither kills the child nor waits for its exit."""
        self.channel_socket.close()
        with self._lock:
            if self._exited is None or self._exited.done():
                self._close_pidfd()  # otherwise a loop would watch the pidfd until the child exits

    def _send(self, number: int, *, group: bool = False) -> bool:
        with self._lock:
            # Until the child is reaped, its pid and the process group that it leads cannot be reused.
            if self._report is None:
                self._report = self._reap()
            if self._report is not None:
                return False
            try:
                if group:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(self.pid, number)
                os.kill(self.pid, number)
            except ProcessLookupError:
                return False
            return True

    def _reap(self) -> ExitReport | None:
        try:
            if not _has_ended(self.pid):
                return None
            if self._own_group:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        except ChildProcessError:
            return self._finish(ExitReport(pid=self.pid))
        if pid == 0:
            return None
        by_sigkill = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        memory = by_sigkill and self.out_of_memory.explains_a_death()
        return self._finish(
            ExitReport.from_wait_status(pid, status, max_rss=usage.ru_maxrss, out_of_memory=memory)
        )

    def _finish(self, report: ExitReport) -> ExitReport:
        # Popen must not wait for a pid that no longer belongs to this child, and must not warn that the child was never awaited.
        by_signal = -(report.signal_number or 0)
        self._popen.returncode = by_signal if report.exit_code is None else report.exit_code
        return report

    def _check(self, loop: asyncio.AbstractEventLoop) -> None:
        report = self.poll()
        if report is None:
            if self._pidfd is None:
                loop.call_later(_CHECK_EVERY_S, self._check, loop)
            return
        if self._pidfd is not None:
            loop.remove_reader(self._pidfd)
            with self._lock:
                self._close_pidfd()
        if self._exited is not None and not self._exited.done():
            self._exited.set_result(report)

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None  # macOS, or a kernel before 5.3


def _has_ended(pid: int) -> bool:
    """Return whether `wait4` would report the child, which remains a zombie. Return True if the system has no `waitid`."""
    if not hasattr(os, "waitid"):
        return True
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
