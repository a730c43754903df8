"""How a process ended, in words and numbers."""

from __future__ import annotations

import os
import signal
import sys
from typing import Final, Self

from msgspec import Struct
from msgspec.structs import replace

EXIT_SOFTWARE: Final = 70
"""A process ended itself because a part it cannot live without had crashed."""
EXIT_SLOTS_LEAKED: Final = 74
"""Every slot of a kind was kept by code that had been given up; the process has settled its work and wants to be replaced."""
EXIT_UNSETTLED: Final = 75
"""The worker was told to leave at once, and the database could not be reached to settle its work."""
EXIT_CODE_RUNS: Final = 76
"""The worker was told to leave, and code of its tasks does not end: the end of the process ends it."""
OWN_EXITS: Final = frozenset({EXIT_SOFTWARE, EXIT_SLOTS_LEAKED, EXIT_UNSETTLED, EXIT_CODE_RUNS})
"""What a process of ours exits with for reasons that no task gave it."""
KILLED_BY_US: Final = ", killed by its supervisor"
"""How the cause of a death ends where its parent sent SIGKILL."""


class ExitReport(Struct, frozen=True, kw_only=True):
    """The end of one child: an exit code or a signal; neither if other code took its exit status.

    `killed_because`: why its parent itself sent SIGKILL. `stopped`: the worker was told to leave, and its process ended while
    code of its tasks ran.
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
        """Read what `os.wait4` answered; `max_rss` in the platform's own unit."""
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

    def explained(self, because: str | None) -> Self:
        """The same with the reason of a parent that sent SIGKILL; it explains no other end."""
        is_ours = because is not None and self.signal_number == signal.SIGKILL
        return replace(self, killed_because=because) if is_ours else self

    @property
    def is_success(self) -> bool:
        """Ended by itself with exit code 0."""
        return self.exit_code == 0

    @property
    def cause(self) -> str:
        """One phrase for logs and death certificates."""
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
    """`SIGKILL` for 9; `signal 34` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
