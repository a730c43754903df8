"""The executor that runs tasks in separate processes. Each process runs one task at a time and can be killed at any time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection
from typing import Final, Literal

from everbeat import protocol
from everbeat.domain.tracing.model import TraceIds
from everbeat.errors import StopReason
from everbeat.protocol import (
    CancelRun,
    Emitted,
    FromTaskProcess,
    LeaveIdle,
    Logged,
    NotUnderstood,
    ProcessReady,
    ProgressReport,
    Raised,
    Refused,
    Request,
    Returned,
    RunAttempt,
)
from everbeat.runtime.channel import AsyncChannel, ChannelError
from everbeat.runtime.events import ProcessRecycled
from everbeat.runtime.identity import rss_bytes
from everbeat.runtime.processes import ChildProcess, ExitReport, spawn
from everbeat.runtime.task_scope import TaskScope
from everbeat.worker.attempt import (
    Attempt,
    AttemptEnd,
    CodeCancelled,
    CodeFailed,
    CodePostponed,
    CodeSuspended,
    Declined,
    Died,
    Succeeded,
)
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import AttemptEnded, ExecutorBroken, SlotFreed
from everbeat.worker.shutdown import RecyclingLimits
from everbeat.worker.traced_attempts import trace_killed, traced_attempt

EXIT_PATIENCE_S: Final = 1.0
STACKS_S: Final = 0.25
"""How long a process can take to write its stacks before it is killed, in seconds."""


class TaskChild:
    """A task process, as seen by its worker. `attempt` is the attempt that it is running; `tasks` counts the attempts it has run."""

    __slots__ = ("attempt", "channel", "child", "is_doomed", "kill_timer", "tasks")

    def __init__(self, child: ChildProcess, channel: AsyncChannel) -> None:
        self.child = child
        self.channel = channel
        self.attempt: Attempt | None = None
        self.is_doomed = False
        self.kill_timer: asyncio.TimerHandle | None = None
        self.tasks = 0

    def interrupt(self, *, reason: StopReason, grace_s: float) -> None:
        """Ask the code to stop. After `grace_s` seconds, kill the process and all processes that it started."""
        if self.is_doomed or self.attempt is None:
            return
        self._send(CancelRun(self.attempt.claim_id, reason))
        self._doom(grace_s)

    def show_stacks_and_end(self) -> None:
        """Let the process write its stacks, then kill it. Stalled code gets no grace period, because it would not react."""
        if self.attempt is not None:
            self._send(CancelRun(self.attempt.claim_id, "stalled"))
        self.child.dump_stacks()
        self._doom(STACKS_S)

    def retire(self) -> None:
        """Let an idle process exit by itself. Its exit handlers get `2 * EXIT_PATIENCE_S` seconds."""
        self._send(LeaveIdle())
        self._doom(2 * EXIT_PATIENCE_S)

    async def exit(self) -> ExitReport:
        """Wait for the process to exit after its channel has closed, and return how it exited. Kill a process that keeps running."""
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


START_PATIENCE_S: Final = 60.0
CLOSE_PATIENCE_S: Final = 0.5
RESOURCES_PATIENCE_S: Final = 1.5
"""How long the idle task processes of a worker that shuts down can take to close their resources, in seconds."""
SOLO_LINGER_S: Final = 60.0
"""How long the solo executor keeps an idle process ready for the next suspect, in seconds."""

_log = logging.getLogger("everbeat.worker")


def _take(attempt: Attempt | None, report: ProgressReport | Emitted | Logged) -> None:
    """Pass on what the code has reported, unless it is code of an earlier attempt."""
    if attempt is None or attempt.claim_id != report.claim_id:
        return
    if isinstance(report, Emitted):
        attempt.queue_item(report.item)
    elif isinstance(report, Logged):
        if attempt.log is not None:
            attempt.log.merge(report.lines)
    else:
        attempt.progress = report.progress.encode()
        attempt.requests.note_progress(attempt)


class ProcessExecutor:
    """Runs attempts in task processes, which it starts on demand, up to `slots`, and reuses.

    When an attempt is stopped, its process exits as well, so that none of its code keeps running.

    The solo executor runs each suspect in a fresh process, so that side effects of one suspect cannot break the next. It keeps idle
    processes only for a short time.
    """

    def __init__(
        self, environment: WorkerEnvironment, *, slots: int, name: Literal["process", "solo"]
    ) -> None:
        plan = environment.plan
        self.slots = slots
        self._environment = environment
        self._name = name
        self._limits = RecyclingLimits(tasks=1) if name == "solo" else RecyclingLimits.of(plan.config)
        self._send = environment.send
        self._scope = TaskScope(name="task processes", on_loop_ending=plan.on_loop_ending)
        self._starting = 0
        self._idle: list[TaskChild] = []
        self._busy: dict[Attempt, TaskChild] = {}
        self._alive: set[TaskChild] = set()
        self._closing = False

    @property
    def free(self) -> int:
        """Return how many processes are ready and idle. A process that is still starting does not count: it might never be ready."""
        return len(self._idle)

    @property
    def occupied(self) -> int:
        """Return the number of processes with running code."""
        return len(self._busy)

    @property
    def running(self) -> Collection[Attempt]:
        """Return the attempts in the occupied slots."""
        return self._busy

    def prepare(self, wanted: int) -> None:
        """Start as many processes as the `wanted` waiting attempts can use."""
        alive = self._starting + len(self._idle) + len(self._busy)
        missing = min(wanted - self._starting - len(self._idle), self.slots - alive)
        for _ in range(0 if self._closing else missing):
            self._starting += 1
            self._scope.start(self._live(), name="task process")

    def begin(self, attempt: Attempt) -> None:
        """Send the attempt to the most recently used idle process."""
        process = self._idle.pop()
        process.attempt = attempt
        self._busy[attempt] = process
        task, worker_id = attempt.task, self._environment.identity.worker_id
        order = RunAttempt(
            task_id=task.id,
            claim_id=task.claim_id,
            name=task.name,
            queue=task.queue,
            args=task.args,
            attempt=attempt.number,
            fence=task.fence,
            worker_id=worker_id,
            deadline=attempt.deadline,
            checkpoint=task.checkpoint,
            tick=task.tick,
            retries_left=attempt.retries_left,
            labels=task.labels,
            traced=None if attempt.tracing is None else traced_attempt(attempt, worker_id=worker_id),
            log_level=None if attempt.log is None else attempt.log.level,
        )
        try:
            process.channel.send_nowait(order)
        except ChannelError:
            process.child.kill()  # the coroutine that reads from the process notices and reports its exit

    def stop(self, attempt: Attempt) -> None:
        """Interrupt the code, then kill the process."""
        if (process := self._busy.get(attempt)) is None:
            return
        if attempt.stopped == "stalled":
            process.show_stacks_and_end()
        else:
            process.interrupt(
                reason=attempt.stopped or "lease_lost", grace_s=self._environment.plan.stop_grace_s
            )

    def whereabouts(self, attempt: Attempt) -> str:
        """Return where to find the stacks, which the process itself writes when it is stopped."""
        process = self._busy.get(attempt)
        return "" if process is None else f"on the standard error of process {process.child.pid}"

    async def close(self) -> None:
        """Shut down all processes: close their channels, and kill those that do not exit in time."""
        self._closing = True
        plan = self._environment.plan
        if plan.resources or plan.middleware.tracing is not None:
            await self._retire_idle()
        for process in tuple(self._alive):
            process.is_doomed = True
            process.channel.close()
        for process in self._idle_or_starting():
            process.child.kill()  # no attempt is running in them
        try:
            async with asyncio.timeout(CLOSE_PATIENCE_S):
                for process in tuple(self._alive):
                    await process.child.wait_exit()
        except TimeoutError:
            for process in tuple(self._alive):
                process.child.kill()
        for process in tuple(self._alive):
            await process.child.wait_exit()
        await self._scope.close()

    async def _retire_idle(self) -> None:
        """Let idle processes close their resources and export their spans. Those that take longer than `RESOURCES_PATIENCE_S` are killed."""
        idle = tuple(self._idle)
        for process in idle:
            process.retire()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESOURCES_PATIENCE_S):
                for process in idle:
                    await process.child.wait_exit()

    def _idle_or_starting(self) -> list[TaskChild]:
        busy = set(self._busy.values())
        return [process for process in self._alive if process not in busy]

    async def _live(self) -> None:
        """Run one process from its start to its exit."""
        is_ready = False
        try:
            process = await self._spawn()
            if process is None:
                return
            is_ready = await self._is_ready(process)
        finally:
            self._starting -= 1
            if not is_ready:
                self._send(SlotFreed(self._name))
        try:
            if is_ready and not self._closing:
                self._rest(process)
                self._send(SlotFreed(self._name))
                await self._listen(process)
            self._forget(process, await process.exit())
        finally:
            process.child.kill()
            process.channel.close()
            process.child.close()
            self._alive.discard(process)

    async def _spawn(self) -> TaskChild | None:
        try:
            child = spawn(tuple(self._environment.plan.task_process_argv), own_group=True)
        except OSError as problem:
            self._send(ExecutorBroken(self._name, f"it could not be started: {problem}"))
            return None
        process = TaskChild(child, await AsyncChannel.open(child.channel_socket, messages=FromTaskProcess))
        self._alive.add(process)
        return process

    async def _is_ready(self, process: TaskChild) -> bool:
        """Wait for the first message and return whether the process is ready. Report a missing or unexpected message."""
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
            self._send(ExecutorBroken(self._name, reason))
        return False

    async def _listen(self, process: TaskChild) -> None:
        exited = self._scope.start(self._close_after_exit(process), name="task process exit")
        try:
            while True:
                match await process.channel.receive():
                    case (ProgressReport() | Emitted() | Logged()) as report:
                        _take(process.attempt, report)
                    case request if isinstance(request, Request):
                        self._scope.start(self._answer(process, request), name="answer")
                    case Returned(claim_id, result, ids):
                        self._ended(process, claim_id, Succeeded(result.encode()), ids)
                    case protocol.AttemptSuspended(claim_id, ids):
                        self._ended(process, claim_id, CodeSuspended(), ids)
                    case protocol.AttemptPostponed(claim_id, error, after_ms, run_at, counts, ids):
                        ended = CodePostponed(error.encode(), after_ms, run_at, counts)
                        self._ended(process, claim_id, ended, ids)
                    case protocol.AttemptCancelled(claim_id, error):
                        self._ended(process, claim_id, CodeCancelled(error.encode()))
                    case Raised(claim_id, error, reasons, ids):
                        self._ended(process, claim_id, CodeFailed(error.encode(), reasons), ids)
                    case NotUnderstood(claim_id, error, reasons, unknown, missing):
                        failed = CodeFailed(error.encode(), reasons)
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
        if attempt is not None and attempt.claim_id == request.claim_id:
            answer = await attempt.requests.answer(attempt, request)
            with contextlib.suppress(ChannelError):
                process.channel.send_nowait(answer)

    async def _close_after_exit(self, process: TaskChild) -> None:
        """Close the channel soon after the process has exited.

        There is no end-of-file if a program that the process started is holding the channel open.
        """
        await process.child.wait_exit()
        await asyncio.sleep(EXIT_PATIENCE_S)
        process.channel.close()

    def _ended(
        self, process: TaskChild, claim_id: object, ended: AttemptEnd, ids: TraceIds | None = None
    ) -> None:
        attempt = process.attempt
        if attempt is None or attempt.claim_id != claim_id:
            return
        attempt.trace_ids = ids
        if process.is_doomed:
            # The slot becomes free when the process exits.
            process.attempt = None
            self._send(AttemptEnded(attempt, ended))
            return
        process.attempt = None
        del self._busy[attempt]
        if not self._is_recycled(process):
            self._rest(process)
        self._send(AttemptEnded(attempt, ended))
        self._send(SlotFreed(self._name))

    def _rest(self, process: TaskChild) -> None:
        self._idle.append(process)
        if self._name == "solo":
            loop = asyncio.get_running_loop()
            loop.call_later(SOLO_LINGER_S, self._end_if_unused, process, process.tasks)

    def _end_if_unused(self, process: TaskChild, tasks: int) -> None:
        if process in self._idle and process.tasks == tasks and not self._closing:
            self._idle.remove(process)
            process.retire()

    def _is_recycled(self, process: TaskChild) -> bool:
        """Count one more attempt and return whether the process has reached a limit. If so, replace it with a fresh process."""
        process.tasks += 1
        pid, size = process.child.pid, rss_bytes(process.child.pid) or 0
        reason = self._limits.reached(tasks=process.tasks, rss_bytes=size)
        if reason is None:
            return False
        process.retire()
        if self._name == "process":
            self._environment.events.emit(
                ProcessRecycled(pid=pid, reason=reason, tasks=process.tasks, rss_bytes=size)
            )
        self.prepare(1)
        return True

    def _forget(self, process: TaskChild, report: ExitReport) -> None:
        if process.kill_timer is not None:
            process.kill_timer.cancel()
        if process in self._idle:
            self._idle.remove(process)
        for served in [served for served, busy in self._busy.items() if busy is process]:
            del self._busy[served]
        attempt, process.attempt = process.attempt, None
        if attempt is not None:
            self._send(AttemptEnded(attempt, Died(report)))
        self._send(SlotFreed(self._name))
        if attempt is not None:
            worker_id, now = self._environment.identity.worker_id, self._environment.clock.monotonic()
            trace_killed(attempt, worker_id=worker_id, cause=report.cause, ran_s=now - attempt.launched_at)
