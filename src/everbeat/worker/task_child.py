"""One task process as its worker knows it: the process, the line to it, what runs in it, and how it is made to end.

What lives here: that one process. What may not: the pool (`process_executor`).
"""

from __future__ import annotations

import asyncio
from typing import Final

from everbeat.domain.context import StopReason
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.frames import ChannelError
from everbeat.runtime.process import ChildProcess
from everbeat.worker.attempt import Attempt
from everbeat.worker.protocol import CancelRun, LeaveIdle

EXIT_PATIENCE_S: Final = 1.0
STACKS_S: Final = 0.25
"""How long a process may take to write its stacks before it is killed."""


class TaskChild:
    """`attempt` is what runs in it; `tasks` counts what has run."""

    __slots__ = ("attempt", "channel", "child", "is_doomed", "kill_timer", "tasks")

    def __init__(self, child: ChildProcess, channel: AsyncChannel) -> None:
        self.child = child
        self.channel = channel
        self.attempt: Attempt | None = None
        self.is_doomed = False
        self.kill_timer: asyncio.TimerHandle | None = None
        self.tasks = 0

    def interrupt(self, *, reason: StopReason, grace_s: float) -> None:
        """Ask the code to end, and kill the process and what it started after the grace."""
        if self.is_doomed or self.attempt is None:
            return
        self._send(CancelRun(self.attempt.claim_id, reason))
        self._doom(grace_s)

    def show_stacks_and_end(self) -> None:
        """Kill it without a grace: code that does nothing would do nothing with it."""
        if self.attempt is not None:
            self._send(CancelRun(self.attempt.claim_id, "stalled"))
        self.child.dump_stacks()
        self._doom(STACKS_S)

    def retire(self) -> None:
        """Let it end by itself, between two attempts; its exit handlers get a moment."""
        self._send(LeaveIdle())
        self._doom(2 * EXIT_PATIENCE_S)

    async def exit(self) -> ExitReport:
        """How the process ended whose channel has; one that goes on without a channel is of no use."""
        try:
            async with asyncio.timeout(EXIT_PATIENCE_S):
                return await self.child.wait_exit()
        except TimeoutError:
            self.child.kill()
            return await self.child.wait_exit()

    def _doom(self, seconds: float) -> None:
        if self.kill_timer is not None:
            self.kill_timer.cancel()
        self.is_doomed = True
        self.kill_timer = asyncio.get_running_loop().call_later(seconds, self.child.kill)

    def _send(self, message: CancelRun | LeaveIdle) -> None:
        try:
            self.channel.send_nowait(message)
        except ChannelError:
            self.child.kill()
