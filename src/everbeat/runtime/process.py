"""Starting children and watching them end: one socket pair, one pid that is never mistaken for another's.

What lives here: the parent's side. The child's side is `parent.py`. What may not: what children are for, and
restarting.

A child is reaped only here and signalled only while it is not reaped, so no signal can reach a process that
got its pid.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.inherited import open_standard_streams
from everbeat.runtime.out_of_memory import OutOfMemoryCounter
from everbeat.runtime.parent import CHANNEL_FD_VARIABLE, PARENT_PID_VARIABLE, STACK_DUMP_SIGNAL
from everbeat.runtime.sockets import channel_pair
from everbeat.runtime.tree_lock import TREE_LOCK_VARIABLE, held_descriptors

# Where the kernel cannot tell a file descriptor about an exit: how often to look, in seconds.
_LOOK_EVERY_S = 0.02


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    out_of_memory: OutOfMemoryCounter | None = None,
    own_group: bool = False,
) -> ChildProcess:
    """Start `argv` with a channel to it; stdin is empty; stdout, stderr and the locks of our tree are inherited.

    `env` is the child's whole environment (None: a copy of ours); the channel's variables are added. With
    `own_group` the child leads a process group: terminal signals pass it by, and what it starts ends with it.
    Called outside the main thread the child gets no death signal (it would fire when that *thread* ends) and
    relies on end-of-file. Raises OSError where the program cannot be started, NotImplementedError on Windows.
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
    """One child of this process; made by `spawn`. Its methods may be called from any thread."""

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
        self._out_of_memory = out_of_memory
        self._own_group = own_group
        self._lock = threading.Lock()
        self._report: ExitReport | None = None
        self._pidfd = _open_pidfd(popen.pid)
        self._exited: asyncio.Future[ExitReport] | None = None

    def poll(self) -> ExitReport | None:
        """The report if the child has ended, None while it lives; takes the exit status from the kernel."""
        with self._lock:
            if self._report is None:
                self._report = self._reap()
            return self._report

    async def wait_exit(self) -> ExitReport:
        """Wait until the child has ended; for any number of coroutines of one loop, and again later."""
        report = self.poll()
        if report is not None:
            return report
        loop = asyncio.get_running_loop()
        if self._exited is None or self._exited.get_loop() is not loop:
            self._exited = loop.create_future()
            if self._pidfd is not None:
                loop.add_reader(self._pidfd, self._look, loop)
            else:
                loop.call_later(_LOOK_EVERY_S, self._look, loop)
        # Shielded: one waiter that is cancelled must not take the answer from the others.
        return await asyncio.shield(self._exited)

    def terminate(self) -> bool:
        """Ask the child to end (SIGTERM); False if it has ended already."""
        return self._send(signal.SIGTERM)

    def kill(self) -> bool:
        """End the child at once (SIGKILL), with `own_group` also what it started; False if already ended."""
        return self._send(signal.SIGKILL, group=self._own_group)

    def dump_stacks(self) -> bool:
        """Make a child that called `offer_stack_dumps` write the stacks of its threads to stderr.

        It works while the GIL is held; a child that offered nothing is killed by the signal.
        """
        return self._send(STACK_DUMP_SIGNAL)

    def close(self) -> None:
        """Give back the descriptors (the child sees end-of-file); it is neither killed nor waited for."""
        self.channel_socket.close()
        with self._lock:
            if self._exited is None or self._exited.done():
                self._close_pidfd()  # Otherwise a loop still watches it, until the exit.

    def _send(self, number: int, *, group: bool = False) -> bool:
        with self._lock:
            # Not reaped means that the pid, and the group it leads, is still this child's.
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
        memory = by_sigkill and self._out_of_memory.explains_a_death()
        return self._finish(
            ExitReport.from_wait_status(pid, status, max_rss=usage.ru_maxrss, out_of_memory=memory)
        )

    def _finish(self, report: ExitReport) -> ExitReport:
        # Popen must neither wait for a pid that is not ours any more nor warn that nobody did.
        by_signal = -(report.signal_number or 0)
        self._popen.returncode = by_signal if report.exit_code is None else report.exit_code
        return report

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        report = self.poll()
        if report is None:
            if self._pidfd is None:
                loop.call_later(_LOOK_EVERY_S, self._look, loop)
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
    """Whether `wait4` would answer; leaves the child a zombie. Where the system cannot tell: yes, try."""
    if not hasattr(os, "waitid"):
        return True
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
