"""A death as it was noticed: by whom, of what, how fast.

What lives here: the value and how it is read from an exit report or from the row of an ended worker. What may not: consequences.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Final, Self

from msgspec import Struct

from everbeat.domain.hooks import Reason
from everbeat.domain.recovery import Blame
from everbeat.domain.stall import Stall
from everbeat.runtime.exit_report import KILLED_BY_US, OWN_EXITS, ExitReport
from everbeat.store.leases import Lease

CHILD_EXIT: Final = "child_exit"
SESSION: Final = "session"
AGE: Final = "age"
STARTUP: Final = "startup"
SWEEP: Final = "sweep"
OPERATOR: Final = "operator"
PROGRESS: Final = "progress"
_WAYS: Final = frozenset({CHILD_EXIT, SESSION, AGE, STARTUP, SWEEP, OPERATOR})
_OWN_CAUSES: Final = frozenset(ExitReport(pid=0, exit_code=code).cause for code in OWN_EXITS)
_SIGNALS_OF_CODE: Final = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT})


class Death(Struct, frozen=True, kw_only=True):
    """One death. `noticed_after_ms` counts from the last proof of life, that of a child exit from the exit itself.

    None: from the last beat of each lease; of a child exit, that nobody measured it.

    `pid`: of the process that died, where it is not the worker itself; `rss_bytes`: the most memory that it had. `hanged`: it
    was killed because it stood still. `is_ours`: we ended it ourselves, for a reason that no code gave.
    """

    noticed_by: str
    cause: str
    noticed_after_ms: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    pid: int | None = None
    rss_bytes: int | None = None
    hanged: bool = False
    is_ours: bool = False
    reason: Reason = "worker_crashed"
    stall: Stall | None = None

    @classmethod
    def by_stall(cls, stall: Stall) -> Self:
        """Nobody died: code that lived said nothing for its stall_timeout."""
        return cls(
            noticed_by=PROGRESS,
            cause=stall.cause,
            noticed_after_ms=round(stall.silent_s * 1_000),
            reason="task_stalled",
            stall=stall,
        )

    @classmethod
    def by_exit(cls, report: ExitReport, *, after_s: float, pid: int | None = None) -> Self:
        """A process whose parent saw it end `after_s` seconds ago."""
        return cls(
            noticed_by=CHILD_EXIT,
            cause=report.cause,
            noticed_after_ms=round(after_s * 1_000),
            exit_code=report.exit_code,
            signal=report.signal_number,
            out_of_memory=report.out_of_memory,
            pid=pid,
            rss_bytes=report.max_rss_bytes,
            hanged=_stood_still(report.cause),
            is_ours=is_our_doing(report.cause),
        )

    @classmethod
    def on_record(cls, lease: Lease) -> Self:
        """What the row of an ended worker says, whoever ended it."""
        noticed_by = lease.ended_how if lease.ended_how in _WAYS else SWEEP
        after_ms = None
        if lease.ended_at is not None and noticed_by not in (CHILD_EXIT, SWEEP):
            after_ms = round((lease.ended_at - lease.last_beat_at).total_seconds() * 1_000)
        cause = lease.ended_cause or f"ended ({lease.ended_how or 'how is not recorded'}) without settling"
        return cls(
            noticed_by=noticed_by,
            cause=cause,
            noticed_after_ms=after_ms,
            exit_code=lease.exit_code,
            signal=lease.signal,
            out_of_memory="out of memory" in cause,
            hanged=_stood_still(cause),
            is_ours=is_our_doing(cause),
        )

    def after_ms(self, lease: Lease) -> int | None:
        """How soon it was noticed, as far as is known."""
        if self.noticed_after_ms is None and self.noticed_by != CHILD_EXIT:
            return lease.silent_ms
        return self.noticed_after_ms

    @property
    def blame(self) -> Blame:
        """Whose fault it was, as far as it shows."""
        of_the_code = not self.is_ours and (
            self.signal in _SIGNALS_OF_CODE or self.exit_code is not None or self.out_of_memory or self.hanged
        )
        return Blame(
            of_the_code=of_the_code,
            of_the_process=self.noticed_by == CHILD_EXIT and not is_killed_by_us(self.cause),
        )


def _stood_still(cause: str) -> bool:
    return "stood still" in cause


def is_our_doing(cause: str) -> bool:
    """Whether a process with this cause of death was ended by everbeat, for a reason that no code gave."""
    return cause in _OWN_CAUSES or is_killed_by_us(cause)


def is_killed_by_us(cause: str) -> bool:
    """Whether everbeat sent the SIGKILL, for a reason that no code gave.

    Unlike an exit code of everbeat, this cannot be imitated by code, which might exit with the same number again and again.
    """
    return cause.endswith(KILLED_BY_US) and not _stood_still(cause)


DeathOf = Callable[[Lease], Death]
