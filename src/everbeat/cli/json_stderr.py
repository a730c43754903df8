"""Converting the stderr of a whole tree to JSON lines, with a separate process that reads it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep
from typing import Final

from everbeat.runtime import log_pump
from everbeat.runtime.processes import ExitReport

_BETWEEN_STARTS_S: Final = 1.0
_END_PATIENCE_S: Final = 2.0


@contextmanager
def stderr_as_json() -> Iterator[None]:
    """Convert everything that this process and its children write to stderr, even from C code, to JSON lines.

    On exit, waits up to 2 s for the last lines, because a container stops when its first process exits.
    """
    ours, theirs = socket.socketpair()
    if hasattr(socket, "SO_PASSCRED"):
        theirs.setsockopt(
            socket.SOL_SOCKET, socket.SO_PASSCRED, 1
        )  # each read then identifies the process that wrote the data
    sys.stderr.flush()
    before = os.dup(2)
    pump = _start(theirs, before)
    os.dup2(ours.fileno(), 2)
    ours.close()
    keeper = threading.Thread(target=_keep, args=(pump, theirs, before), name="log pump", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os.dup2(before, 2)
        keeper.join(_END_PATIENCE_S)


def _start(source: socket.socket, out: int, *, instead_of: str = "") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(log_pump.__file__), instead_of],
        stdin=source.fileno(),
        stdout=out,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # only the tree receives Ctrl-C
    )


def _keep(pump: subprocess.Popen[bytes], source: socket.socket, out: int) -> None:
    """Restart the pump whenever it exits, until a pump has read to the end of the stream, which the last writer closes.

    This process keeps `source` open. Without a reader, each write to stderr in the tree would raise BrokenPipeError.
    This thread must not log: it would wait for a pump that only it can start. The new pump logs the replacement.
    """
    started = monotonic()
    while (cause := _cause_of_end(pump)) is not None:
        if monotonic() - started < _BETWEEN_STARTS_S:
            sleep(_BETWEEN_STARTS_S)  # do not restart in a tight loop a pump that cannot run
        started = monotonic()
        while True:
            try:
                pump = _start(source, out, instead_of=cause)
                break
            except OSError:  # out of processes or memory
                sleep(_BETWEEN_STARTS_S)
    source.close()
    os.close(out)


def _cause_of_end(pump: subprocess.Popen[bytes]) -> str | None:
    """Wait until the pump exits. Return the cause, or None if the pump read to the end.

    A suspended pump is killed, because writers would block.
    """
    _, status = os.waitpid(pump.pid, os.WUNTRACED)
    if stopped := os.WIFSTOPPED(status):
        os.kill(pump.pid, signal.SIGKILL)
        _, status = os.waitpid(pump.pid, 0)
    pump.returncode = os.waitstatus_to_exitcode(status)
    if pump.returncode == 0:
        return None
    return "stopped" if stopped else ExitReport.from_wait_status(pump.pid, status).cause
