"""The worker trees of the demo: `everbeat worker` as anybody starts it, and the signals that strike it.

What lives here: processes and signals, only ever to the demo's own. What may not: what the database thinks of it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from everbeat.cli.own_tree import start_own_tree

LOCATOR: Final = "everbeat.cli.demo.tasks:app"

_GRACE_S: Final = 10.0
_TAIL: Final = 2_000


class Tree:
    """One supervisor with its worker processes and their task processes; it logs to a file."""

    def __init__(self, number: int, *, environment: Mapping[str, str], folder: Path) -> None:
        self.number = number
        self.log = folder / f"tree-{number}.log"
        with self.log.open("wb") as output:
            self._process = start_own_tree(LOCATOR, environment=environment, output=output)

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How the supervisor ended; None while it lives."""
        return self._process.poll()

    def holds(self, pid: int) -> bool:
        """Whether a process is of this tree: whoever it is, it is in the session that the supervisor leads."""
        try:
            return self.exit_code is None and os.getsid(pid) == self.pid
        except OSError:  # it has ended, or is somebody else's
            return False

    def strike(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to one process of this tree; to none that is not."""
        if self.holds(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def strike_all(self, number: signal.Signals) -> None:
        """Sends a signal to every process of this tree, the supervisor first: it must not see its children fall."""
        members = [pid for pid in _processes() if pid != self.pid and self.holds(pid)]
        for pid in [self.pid, *members] if self.exit_code is None else []:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Ends every process at once and waits for the supervisor's end."""
        self.strike_all(signal.SIGSTOP)  # none of them may see another one fall
        self.strike_all(signal.SIGKILL)
        self._process.wait(timeout=_GRACE_S)

    def stop(self) -> None:
        """Asks for an orderly end; `wait` waits for it."""
        if self.exit_code is None:
            self._process.terminate()

    def wait(self) -> int:
        """The exit code; whoever does not end in time is killed."""
        try:
            return self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def refused(self) -> int:
        """How many late attempts of this tree were refused, by the database when they wrote or by word before that."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        named = re.findall(r"(?:leases_lost task_ids|zombie_refused task_id)=\"?([0-9a-f,-]+)", text)
        return len({task_id for ids in named for task_id in ids.split(",") if task_id})

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-_TAIL:]


def _processes() -> list[int]:
    """All process ids of this machine that can be seen."""
    if Path("/proc/self").exists():
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    listed = subprocess.run(["ps", "-A", "-o", "pid="], capture_output=True, text=True, check=True)
    return [int(pid) for pid in listed.stdout.split()]
