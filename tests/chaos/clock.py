"""Two clocks: the machine's clock, on which everything is measured, and the database server's wall clock, which can be shifted.

The server is started with a small library that adds the number of seconds in a file to every time that the server reads.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_SOURCE: Final = Path(__file__).with_name("clock_shim.c")


def boot_s() -> float:
    """Return the seconds since boot, on a clock that no fault shifts and that all processes share. SQL reads it from /proc/uptime."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ServerClock:
    """The wall clock of a server that was started inside `ticking`. `obstacle` is the reason why it cannot be shifted, if any."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "clock-shift"
        self._library = folder / "clock-shim.so"
        self.farthest_s = 0
        self.shift(0)
        self.obstacle = self._compile()

    def _compile(self) -> str:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            return "no C compiler is installed"
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(self._library), str(_SOURCE), "-ldl"]
        made = subprocess.run(command, capture_output=True, text=True, timeout=60)
        return "" if made.returncode == 0 else f"the compiler failed: {made.stderr.strip()[-300:]}"

    def shift(self, seconds: int) -> None:
        """Set how many seconds the server's clock is ahead of the machine's clock."""
        self.farthest_s = max(self.farthest_s, seconds)
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, struct.pack("q", seconds), 0)
        finally:
            os.close(descriptor)

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Give this clock to a server that starts inside the block."""
        if self.obstacle:
            yield
            return
        os.environ |= {"LD_PRELOAD": str(self._library), "CHAOS_CLOCK": str(self._file)}
        try:
            yield
        finally:
            del os.environ["LD_PRELOAD"], os.environ["CHAOS_CLOCK"]
