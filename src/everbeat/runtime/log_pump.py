"""The program that turns the stderr output of a tree into JSON lines. It passes JSON objects through and wraps all other text.

`worker --log-format json` starts it as `python -I -S`, without site-packages, so it imports only the standard library. Even while the
supervisor is frozen, it keeps reading until the last process of the tree has exited.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import sys
from datetime import UTC, datetime
from time import monotonic, time
from typing import Final

_READ_BYTES: Final = 65_536
_QUIET_S: Final = 0.1
"""Lines from one process belong together (a traceback or a stack dump) until the process has written nothing for this many seconds."""
_LONGEST_S: Final = 1.0
_MOST_PUMPED_BYTES: Final = 1_048_576
_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid
_DELETE: Final = "\x7f"  # the one control character that JSON does not escape


class _Writer:
    """The output of one process that the pump has received but not yet written.

    `rest` is the start of an incomplete line. `text` holds the lines that are not JSON; `since` is when the first of them arrived.
    """

    def __init__(self) -> None:
        self.rest = b""
        self.text: list[bytes] = []
        self.size = 0
        self.since = 0.0
        self.heard_at = 0.0

    def add_text(self, line: bytes, *, at: float) -> None:
        if not self.text:
            self.since = at
        self.text.append(line)
        self.size += len(line) + 1

    def is_due(self, at: float) -> bool:
        if self.size >= _MOST_PUMPED_BYTES:
            return True
        return bool(self.text) and (at - self.heard_at >= _QUIET_S or at - self.since >= _LONGEST_S)


class Pump:
    """Reads what processes write to a socket, and writes it as JSON lines to a descriptor."""

    def __init__(self, source: socket.socket, out: int) -> None:
        self._source = source
        self._out = out
        self._writers: dict[int | None, _Writer] = {}

    def run(self) -> None:
        """Pump until the last process that could write has exited."""
        while True:
            waits = any(each.text or each.rest for each in self._writers.values())
            if select.select([self._source], [], [], _QUIET_S if waits else None)[0]:
                text, ancillary, _, _ = self._source.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
                )
                if not text:
                    break
                self._hear(_pid_of(ancillary), text)
            self._flush_due(monotonic())
        for pid, writer in self._writers.items():
            self._flush(pid, writer, also_rest=True)

    def _hear(self, pid: int | None, text: bytes) -> None:
        writer = self._writers.setdefault(pid, _Writer())
        writer.heard_at = at = monotonic()
        *lines, writer.rest = (writer.rest + text).split(b"\n")
        for line in lines:
            if is_object(line):
                self._flush(pid, writer)
                self.write(line + b"\n")
            else:
                writer.add_text(line, at=at)

    def _flush_due(self, at: float) -> None:
        for pid, writer in list(self._writers.items()):
            is_old = bool(writer.rest) and at - writer.heard_at >= _LONGEST_S
            if is_old or len(writer.rest) >= _MOST_PUMPED_BYTES or writer.is_due(at):
                self._flush(pid, writer, also_rest=is_old or len(writer.rest) >= _MOST_PUMPED_BYTES)
            if not writer.text and not writer.rest:
                del self._writers[pid]

    def _flush(self, pid: int | None, writer: _Writer, *, also_rest: bool = False) -> None:
        if also_rest and writer.rest:
            writer.add_text(writer.rest, at=writer.heard_at)
            writer.rest = b""
        text = b"\n".join(writer.text).decode(errors="backslashreplace").rstrip()
        writer.text, writer.size = [], 0
        if text:
            self.write(wrapped(text, pid=pid))

    def write(self, line: bytes) -> None:
        """Write the line, or drop it if it cannot be written."""
        while line:
            try:
                line = line[os.write(self._out, line) :]
            except BlockingIOError:
                select.select([], [self._out], [])
            except (
                OSError
            ):  # the reader has exited or the disk is full, which must not affect the tree's processes
                return


def is_object(line: bytes) -> bool:
    """Return whether the line is a single JSON object."""
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def moment() -> str:
    """Return the current time in the log's timestamp format."""
    return datetime.fromtimestamp(time(), UTC).isoformat(timespec="milliseconds")


def wrapped(text: str, *, pid: int | None) -> bytes:
    """Return a log line that wraps text that is not JSON."""
    document = {
        "time": moment(),
        "level": "WARNING",
        "logger": "stderr",
        "message": text,
        "pid": pid,
    }
    return json.dumps(document).replace(_DELETE, "\\u007f").encode() + b"\n"


def _pid_of(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """Return the writer's pid, which only Linux reports."""
    for _, kind, data in ancillary:
        if kind == getattr(socket, "SCM_CREDENTIALS", None):
            return int(_CREDENTIALS.unpack(data[: _CREDENTIALS.size])[0]) or None
    return None


def replacement(cause: str) -> bytes:
    """Return the line that reports that the previous pump has exited."""
    document = {
        "time": moment(),
        "level": "WARNING",
        "logger": "everbeat.process",
        "message": f"log_pump_replaced cause={cause}",
        "pid": os.getpid(),
        "event": "log_pump_replaced",
        "fields": {"cause": cause},
    }
    return json.dumps(document).encode() + b"\n"


def main() -> None:
    """Pump from stdin, which is a socket, to stdout, until the last writer has exited. Signals that shut down the tree are ignored.

    The argument says why the previous pump exited. It is empty for the first pump.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    pump = Pump(socket.socket(fileno=0), out=1)
    if sys.argv[1]:
        pump.write(replacement(sys.argv[1]))
    pump.run()


if __name__ == "__main__":
    main()
