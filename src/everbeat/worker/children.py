"""One worker process as its supervisor sees it: the process, the line to it, and what it has said."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, Self

from msgspec.structs import replace

from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.clock import Clock
from everbeat.runtime.exit_report import EXIT_CODE_RUNS, EXIT_UNSETTLED, ExitReport
from everbeat.runtime.frames import ChannelError
from everbeat.runtime.process import ChildProcess
from everbeat.worker.protocol import Drain, FromWorkerProcess, Refused, Stop, ToWorkerProcess
from everbeat.worker.seat import Seat

GRACE_OVER: Final = "its grace was over"


class Child:
    """From the spawn to the exit."""

    def __init__(self, process: ChildProcess, channel: AsyncChannel, *, clock: Clock) -> None:
        self.process = process
        self.channel = channel
        self.started_at = clock.monotonic()
        self.heard_at = self.started_at
        self.seat: Seat | None = None
        self.report: ExitReport | None = None
        self.refusal: Refused | None = None
        self.is_welcome = False
        self.is_ready = False
        self.has_left = False
        self.leaves_code = False
        self.is_told_to_leave = False
        self.killed_because: str | None = None
        self.retired = asyncio.Event()
        self.fell_silent = asyncio.Event()

    @classmethod
    async def adopt(cls, process: ChildProcess, *, clock: Clock) -> Self:
        """Opens the line to a process that was just spawned."""
        channel = await AsyncChannel.open(process.channel_socket, messages=FromWorkerProcess)
        return cls(process, channel, clock=clock)

    def tell(self, message: ToWorkerProcess) -> None:
        """Queues a message; a process that is gone, or reads nothing any more, is found out by other ways."""
        self.is_told_to_leave |= isinstance(message, Drain | Stop)
        with contextlib.suppress(ChannelError):
            self.channel.send_nowait(message)

    def kill(self, *, because: str) -> None:
        """Ends it at once; the reason goes into its exit report."""
        self.killed_because = because
        self.process.kill()

    def explained(self, report: ExitReport) -> ExitReport:
        """Return its exit report with why it was killed, and whether it ended because it was told to leave."""
        # The exit code too: its last word may not have been read.
        unsettled = self.is_told_to_leave and report.exit_code in (EXIT_UNSETTLED, EXIT_CODE_RUNS)
        overdue = self.killed_because == GRACE_OVER and report.signal_number is not None
        stopped = self.leaves_code or unsettled or overdue
        return replace(report.explained(self.killed_because), stopped=stopped)

    def close(self) -> None:
        """Gives back what the process took of ours."""
        self.channel.close()
        self.process.close()
