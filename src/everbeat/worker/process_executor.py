"""Task functions with `run_in="process"`: processes of one task at a time, which can be ended at any moment.

What lives here: the pool of task processes of one worker, and the worker's half of the talk with them. The other half is
`task_process`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

from everbeat.domain.definition import RunIn
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.frames import ChannelError
from everbeat.runtime.identity import rss_bytes
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.process import spawn
from everbeat.worker import protocol
from everbeat.worker.attempt import Attempt, Declined, Died, Ended, Failed, OnEnded, Succeeded, Suspended
from everbeat.worker.protocol import (
    FromTaskProcess,
    NotUnderstood,
    ProcessReady,
    Progress,
    Raised,
    Refused,
    Request,
    Returned,
    Run,
)
from everbeat.worker.recycling import Limits, ProcessRecycled
from everbeat.worker.task_child import EXIT_PATIENCE_S, TaskChild

START_PATIENCE_S: Final = 60.0
CLOSE_PATIENCE_S: Final = 0.5

_log = logging.getLogger("everbeat.worker")


class ProcessExecutor:
    """Processes are started when attempts wait, up to `slots`, and kept warm.

    An attempt that is stopped costs its process, so that nothing of its code is left. `on_broken(reason)` is told when
    a process ended before it was ready: no attempt was in it. `linger_s`: how long an idle one is kept, None for ever.
    """

    mode: RunIn = "process"

    def __init__(
        self,
        *,
        slots: int,
        argv: Sequence[str],
        stop_grace_s: float,
        worker_id: Callable[[], str],
        on_ended: OnEnded,
        on_free: Callable[[], None],
        on_broken: Callable[[str], None],
        on_progress: Callable[[Attempt], None],
        limits: Limits,
        on_recycled: Callable[[ProcessRecycled], None],
        linger_s: float | None = None,
        on_loop_ending: Callable[[], None] | None = None,
    ) -> None:
        self.slots = slots
        self._linger_s = linger_s
        self._limits = limits
        self._on_recycled = on_recycled
        self._argv = tuple(argv)
        self._stop_grace_s = stop_grace_s
        self._worker_id = worker_id
        self._on_ended = on_ended
        self._on_free = on_free
        self._on_broken = on_broken
        self._on_progress = on_progress
        self._nursery = Nursery(name="task processes", on_loop_ending=on_loop_ending)
        self._starting = 0
        self._idle: list[TaskChild] = []
        self._busy: dict[Attempt, TaskChild] = {}
        self._alive: set[TaskChild] = set()
        self._closing = False

    @property
    def free(self) -> int:
        """Processes that are ready and idle: an attempt is not started for a process that may never come up."""
        return len(self._idle)

    @property
    def occupied(self) -> int:
        """Processes with running code."""
        return len(self._busy)

    def prepare(self, wanted: int) -> None:
        """Start as many processes as waiting attempts could use."""
        alive = self._starting + len(self._idle) + len(self._busy)
        missing = min(wanted - self._starting - len(self._idle), self.slots - alive)
        for _ in range(0 if self._closing else missing):
            self._starting += 1
            self._nursery.start(self._live(), name="task process")

    def begin(self, attempt: Attempt) -> None:
        """Hand it to an idle process, the one that was used last."""
        process = self._idle.pop()
        process.attempt = attempt
        self._busy[attempt] = process
        task = attempt.task
        order = Run(
            task_id=task.id,
            claim_id=task.claim_id,
            name=task.name,
            queue=task.queue,
            args=task.args,
            attempt=attempt.number,
            fence=task.fence,
            worker_id=self._worker_id(),
            deadline=attempt.deadline,
            checkpoint=task.checkpoint,
        )
        try:
            process.channel.send_nowait(order)
        except ChannelError:
            process.child.kill()  # its end is noticed, and reported, by the coroutine that reads from it

    def stop(self, attempt: Attempt) -> None:
        """Interrupt the code, then kill the process."""
        if (process := self._busy.get(attempt)) is None:
            return
        if attempt.stopped == "stalled":
            process.show_stacks_and_end()
        else:
            process.interrupt(reason=attempt.stopped or "lease_lost", grace_s=self._stop_grace_s)

    def whereabouts(self, attempt: Attempt) -> str:
        """Its stacks are written by the process itself, when it is stopped."""
        process = self._busy.get(attempt)
        return "" if process is None else f"on the standard error of process {process.child.pid}"

    async def close(self) -> None:
        """End all processes: by end-of-file, then by force."""
        self._closing = True
        for process in tuple(self._alive):
            process.is_doomed = True
            process.channel.close()
        for process in self._idle_or_starting():
            process.child.kill()  # nothing of value runs in them
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                for process in tuple(self._alive):
                    await process.child.wait_exit()
        except TimeoutError:
            for process in tuple(self._alive):
                process.child.kill()
        for process in tuple(self._alive):
            await process.child.wait_exit()
        await self._nursery.close()

    def _idle_or_starting(self) -> list[TaskChild]:
        busy = set(self._busy.values())
        return [process for process in self._alive if process not in busy]

    async def _live(self) -> None:
        """The whole life of one process."""
        is_ready = False
        try:
            process = await self._spawn()
            if process is None:
                return
            is_ready = await self._is_ready(process)
        finally:
            self._starting -= 1
            if not is_ready:
                self._on_free()
        try:
            if is_ready and not self._closing:
                self._rest(process)
                self._on_free()
                await self._listen(process)
            self._forget(process, await process.exit())
        finally:
            process.child.kill()
            process.channel.close()
            process.child.close()
            self._alive.discard(process)

    async def _spawn(self) -> TaskChild | None:
        try:
            child = spawn(self._argv, own_group=True)
        except OSError as problem:
            self._on_broken(f"it could not be started: {problem}")
            return None
        process = TaskChild(child, await AsyncChannel.open(child.channel_socket, messages=FromTaskProcess))
        self._alive.add(process)
        return process

    async def _is_ready(self, process: TaskChild) -> bool:
        """Wait for its first word; tells when there is none, or the wrong one."""
        try:
            async with asyncio.timeout(START_PATIENCE_S):
                first = await process.channel.receive()
        except TimeoutError:
            reason = f"it was not ready after {START_PATIENCE_S:g} s"
        except ChannelError:
            reason = (await process.exit()).cause
        else:
            if isinstance(first, ProcessReady):
                return True
            reason = first.message if isinstance(first, Refused) else f"it began with {type(first).__name__}"
        if not self._closing:
            self._on_broken(reason)
        return False

    async def _listen(self, process: TaskChild) -> None:
        exited = self._nursery.start(self._close_after_exit(process), name="task process exit")
        try:
            while True:
                match await process.channel.receive():
                    case Progress(claim_id, progress) if (
                        process.attempt and process.attempt.claim_id == claim_id
                    ):
                        process.attempt.progress = progress.encode()
                        self._on_progress(process.attempt)
                    case request if isinstance(request, Request):
                        self._nursery.start(self._answer(process, request), name="answer")
                    case Returned(claim_id, result):
                        self._ended(process, claim_id, Succeeded(result.encode()))
                    case protocol.Suspended(claim_id):
                        self._ended(process, claim_id, Suspended())
                    case Raised(claim_id, error, reasons):
                        self._ended(process, claim_id, Failed(error.encode(), reasons))
                    case NotUnderstood(claim_id, error, reasons, unknown, missing):
                        failed = Failed(error.encode(), reasons)
                        self._ended(process, claim_id, Declined(failed, unknown, missing))
                    case _:
                        pass
        except ChannelError as problem:
            if not process.channel.is_closed:
                _log.error("task_process_talks_nonsense pid=%s error=%s", process.child.pid, problem)
                process.child.kill()
        finally:
            exited.cancel()

    async def _answer(self, process: TaskChild, request: Request) -> None:
        attempt = process.attempt
        if attempt is not None and attempt.clerk is not None and attempt.claim_id == request.claim_id:
            answer = await attempt.clerk.answer(attempt, request)
            with contextlib.suppress(ChannelError):
                process.channel.send_nowait(answer)

    async def _close_after_exit(self, process: TaskChild) -> None:
        """Notice an exit that end-of-file does not tell, because something the process started holds its end open."""
        await process.child.wait_exit()
        await asyncio.sleep(EXIT_PATIENCE_S)
        process.channel.close()

    def _ended(self, process: TaskChild, claim_id: object, ended: Ended) -> None:
        attempt = process.attempt
        if attempt is None or attempt.claim_id != claim_id:
            return
        if process.is_doomed:
            # The slot is free when the process is gone.
            process.attempt = None
            self._on_ended(attempt, ended)
            return
        process.attempt = None
        del self._busy[attempt]
        if not self._is_recycled(process):
            self._rest(process)
        self._on_ended(attempt, ended)
        self._on_free()

    def _rest(self, process: TaskChild) -> None:
        self._idle.append(process)
        if self._linger_s is not None:
            loop = asyncio.get_running_loop()
            loop.call_later(self._linger_s, self._end_if_unused, process, process.tasks)

    def _end_if_unused(self, process: TaskChild, tasks: int) -> None:
        if process in self._idle and process.tasks == tasks and not self._closing:
            self._idle.remove(process)
            process.retire()

    def _is_recycled(self, process: TaskChild) -> bool:
        """Whether it has reached a limit with this attempt; then it makes room for a fresh one, which is started at once."""
        process.tasks += 1
        pid, size = process.child.pid, rss_bytes(process.child.pid) or 0
        reason = self._limits.reached(tasks=process.tasks, rss_bytes=size)
        if reason is None:
            return False
        process.retire()
        self._on_recycled(ProcessRecycled(pid=pid, reason=reason, tasks=process.tasks, rss_bytes=size))
        self.prepare(1)
        return True

    def _forget(self, process: TaskChild, report: ExitReport) -> None:
        if process.kill_timer is not None:
            process.kill_timer.cancel()
        if process in self._idle:
            self._idle.remove(process)
        for served in [served for served, busy in self._busy.items() if busy is process]:
            del self._busy[served]
        if (attempt := process.attempt) is not None:
            process.attempt = None
            self._on_ended(attempt, Died(report))
        self._on_free()
