"""Starting the worker processes of a supervisor, replacing them with a backoff, and reporting processes that cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Sequence
from random import Random
from typing import Final, Protocol, Self

from msgspec.structs import replace

from everbeat.domain.doctor.work import StartProblem, start_problem_text
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable, EverbeatError, WorkerError, WorkerRefused
from everbeat.hints.topics import Everything, encode
from everbeat.protocol import Drain, FromWorkerProcess, Hints, Refused, Stop, ToWorkerProcess
from everbeat.runtime.channel import AsyncChannel, ChannelError
from everbeat.runtime.clock import Backoff, Clock
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.processes import EXIT_CODE_RUNS, EXIT_UNSETTLED, ChildProcess, ExitReport
from everbeat.runtime.task_scope import TaskScope
from everbeat.store import workers
from everbeat.supervisor.registration import Supervision
from everbeat.supervisor.workers import SupervisedWorker

GRACE_OVER: Final = "its grace period was over"
MOST_UNSENT_BYTES: Final = 64 * 1024
"""Once more bytes than this wait for a process that does not read, one `Everything` replaces all further hints."""


class WorkerChild:
    """One worker process, from its start to its exit."""

    def __init__(self, process: ChildProcess, channel: AsyncChannel, *, clock: Clock) -> None:
        self.process = process
        self.channel = channel
        self.started_at = clock.monotonic()
        self.heard_at = self.started_at
        self.worker: SupervisedWorker | None = None
        self.report: ExitReport | None = None
        self.refusal: Refused | None = None
        self.is_welcome = False
        self.is_ready = False
        self.has_left = False
        self.leaves_code = False
        self.is_told_to_leave = False
        self.is_unresponsive = False
        self.killed_because: str | None = None
        self._everything_ends_at = 0
        self.retired = asyncio.Event()
        self.fell_silent = asyncio.Event()

    @property
    def worker_id(self) -> str:
        """Return the worker's current id, or an empty string before the worker is registered."""
        return "" if self.worker is None else self.worker.worker_id

    @classmethod
    async def adopt(cls, process: ChildProcess, *, clock: Clock) -> Self:
        """Open the channel to a process that has just been started."""
        channel = await AsyncChannel.open(process.channel_socket, messages=FromWorkerProcess)
        return cls(process, channel, clock=clock)

    def send(self, message: ToWorkerProcess) -> None:
        """Queue a message to the process. Errors are ignored, because an exit or a hang is detected in other ways."""
        self.is_told_to_leave |= isinstance(message, Drain | Stop)
        with contextlib.suppress(ChannelError):
            self.channel.send_nowait(message)

    def send_hints(self, payloads: Sequence[str]) -> None:
        """Queue hints to the process. While it does not read, a bounded number of bytes wait, and no hint is lost.

        A hint is dropped only while an `Everything` waits in this process. The worker reads that one later, when the rows of the
        dropped hint are visible.
        """
        channel = self.channel
        if channel.unsent_bytes <= MOST_UNSENT_BYTES:
            self.send(Hints(list(payloads)))
        elif channel.queued_bytes - channel.unsent_bytes >= self._everything_ends_at:
            with contextlib.suppress(ChannelError):
                channel.send_nowait(Hints(list(encode(Everything()))))
                self._everything_ends_at = channel.queued_bytes

    def kill(self, *, because: str) -> None:
        """Kill the process at once. `because` is the cause that its exit report will give."""
        self.killed_because = because
        self.process.kill()

    def with_cause(self, report: ExitReport) -> ExitReport:
        """Return `report` with the reason why the process was killed, and whether it exited because it was asked to."""
        # Check the exit code too, because the process's last message might not have been read.
        unsettled = self.is_told_to_leave and report.exit_code in (EXIT_UNSETTLED, EXIT_CODE_RUNS)
        overdue = self.killed_because == GRACE_OVER and report.signal_number is not None
        stopped = self.leaves_code or unsettled or overdue
        return replace(report.with_cause(self.killed_because), stopped=stopped)

    def close(self) -> None:
        """Close the process's file descriptors."""
        self.channel.close()
        self.process.close()


_FIRST_S: Final = 0.5
_LONGEST_S: Final = 30.0
_SOUND_S: Final = 60.0
"""How long a process must run before the count of consecutive short-lived processes is reset, in seconds."""
_MOST_EARLY_DEATHS: Final = 5
_EARLY_WINDOW_S: Final = 60.0
_LONG_ENOUGH_S: Final = 10.0
"""If no process was ever ready, two early deaths at least this many seconds apart are enough. Five slow starts could take minutes."""


class RestartBackoff:
    """Computes the pause before each replacement process.

    The first replacement starts at once. Further pauses double from 0.5 s to 30 s, plus up to 25 % jitter.
    """

    def __init__(self, *, random: Random) -> None:
        self._backoff = Backoff(first_s=_FIRST_S, longest_s=_LONGEST_S, spread=(1.0, 1.25), random=random)
        self._in_a_row = 0

    def pause_after(self, lived_s: float) -> float:
        """Return how many seconds to wait before replacing a process that ran for `lived_s` seconds."""
        self._in_a_row = 1 if lived_s >= _SOUND_S else self._in_a_row + 1
        return 0.0 if self._in_a_row == 1 else min(_LONGEST_S, self._backoff.delay(self._in_a_row - 1))


class WorkersKeepFailing(Event, frozen=True, kw_only=True):
    """A worker process refused to start, or several processes exited before they were ready. The supervisor keeps trying."""

    component = "supervisor"
    level = logging.ERROR
    reason: str


class WorkerNotStarted(Event, frozen=True, kw_only=True):
    """The operating system refused to start a process or to open its file descriptors.

    The other processes keep running, and the supervisor tries again.
    """

    component = "supervisor"
    level = logging.ERROR
    reason: str
    again_in_s: float


class EarlyDeaths:
    """Counts processes that exited before they were ready."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=_MOST_EARLY_DEATHS)

    def count(self, at: float) -> bool:
        """Count an early death at time `at`. Return whether there have been too many within a short time."""
        self._at.append(at)
        return len(self._at) == _MOST_EARLY_DEATHS and at - self._at[0] <= _EARLY_WINDOW_S

    def last_for_s(self, at: float) -> float:
        """Return how many seconds before `at` the oldest remembered death happened."""
        return at - self._at[0] if self._at else 0.0


class RestartPolicy:
    """Decides whether to start another process after a process exited before it was ready."""

    def __init__(self, *, events: EventBus) -> None:
        self.was_ever_ready = False
        self._events = events
        self._early_deaths = EarlyDeaths()

    def cannot_start(self, problem: OSError, *, again_in_s: float) -> None:
        """Report that the operating system refused to start a process. Raises WorkerError if no process was ever ready."""
        if not self.was_ever_ready:
            raise WorkerError(f"A worker process cannot be started: {problem}.") from problem
        self._events.emit(WorkerNotStarted(reason=str(problem), again_in_s=again_in_s))

    def needs_long_pause(self, *, cause: str, refusal: Refused | None, at: float) -> bool:
        """Count one more early death and return whether a long pause is due.

        A refusal alone does not cause a long pause, because an import might be broken for a second during a deployment. Raises
        WorkerRefused or WorkerError if no process was ever ready and further tries are pointless.
        """
        too_often = self._early_deaths.count(at)
        reason = cause if refusal is None else refusal.message
        if not self.was_ever_ready:
            if too_often or refusal is not None or self._early_deaths.last_for_s(at) >= _LONG_ENOUGH_S:
                raise _start_failure(reason, refusal)
            return False
        if too_often or refusal is not None:
            self._events.emit(WorkersKeepFailing(reason=reason))
        return too_often


def _start_failure(reason: str, refusal: Refused | None) -> EverbeatError:
    if refusal is not None:
        return WorkerRefused(refusal.message, reason=refusal.code, fix=refusal.fix)
    return WorkerError(
        f"Worker processes end before they are ready, again and again; the last one: {reason}.",
        fix="check above for what they wrote to standard error before they exited.",
    )


_LONG_PAUSE_S: Final = 30.0
_MOST_FINISHING: Final = 1


class ProcessOwner(Protocol):
    """The supervisor that owns the managed processes."""

    environment: ProcessEnvironment
    scope: TaskScope
    restart_policy: RestartPolicy
    stopping: asyncio.Event
    lives: set[asyncio.Task[None]]
    """The asyncio tasks that serve the processes, including processes that have retired."""

    def spawn(self) -> ChildProcess:
        """Start a worker process. Raises OSError if the operating system refuses."""
        ...

    async def live(self, child: WorkerChild) -> None:
        """Serve a worker process until it has exited."""
        ...

    def fail(self, failure: EverbeatError) -> None:
        """Shut down the supervisor with this error, because no process can be started."""
        ...


class ManagedProcess:
    """Keeps one of a supervisor's worker processes running: starts it, and replaces it when it exits."""

    def __init__(self, owner: ProcessOwner) -> None:
        self._owner = owner
        self._clock = owner.environment.clock
        self._finishing: set[asyncio.Task[None]] = set()
        self._child: WorkerChild | None = None
        self._start_problem: StartProblem | None = None

    @property
    def start_problem(self) -> StartProblem | None:
        """Return why no worker process is ready, or None without a problem.

        A problem is kept from the first failed start until a process is ready.
        """
        return None if self._child is not None and self._child.is_ready else self._start_problem

    async def keep(self) -> None:
        """Keep a worker process running until the supervisor stops."""
        try:
            await self._keep()
        except EverbeatError as failure:
            self._owner.fail(failure)

    async def _keep(self) -> None:
        owner, clock = self._owner, self._clock
        backoff = RestartBackoff(random=owner.environment.random)
        while not owner.stopping.is_set():
            started_at = clock.monotonic()
            try:
                child = await self._spawn()
            except OSError as problem:
                pause = backoff.pause_after(0.0)
                owner.restart_policy.cannot_start(problem, again_in_s=pause)
                self._failed_to_start(f"the system refuses a process: {problem}")
                await clock.wait(owner.stopping, timeout_s=pause)
                continue
            life = owner.scope.start(owner.live(child), name=f"life of {child.process.pid}")
            owner.lives.add(life)
            life.add_done_callback(owner.lives.discard)
            self._child = child
            has_retired = await self._has_retired(child, life)
            self._child = None
            if child.is_ready:
                self._start_problem = None
            if (
                has_retired
            ):  # not a death, so it needs no pause: its tasks finish while its replacement is already running
                backoff = RestartBackoff(random=owner.environment.random)
                await self._until_few_finish(life)
                continue
            pause = backoff.pause_after(clock.monotonic() - started_at)
            if not child.is_ready and not owner.stopping.is_set():
                cause = "" if child.report is None else child.report.cause
                if owner.restart_policy.needs_long_pause(
                    cause=cause, refusal=child.refusal, at=clock.monotonic()
                ):
                    pause = _LONG_PAUSE_S
                self._failed_to_start(_why(child))
            await clock.wait(owner.stopping, timeout_s=pause)

    async def _spawn(self) -> WorkerChild:
        process = self._owner.spawn()
        try:
            return await WorkerChild.adopt(process, clock=self._clock)
        except BaseException:
            process.kill()
            process.close()
            raise

    async def _has_retired(self, child: WorkerChild, life: asyncio.Task[None]) -> bool:
        """Wait until the process has exited or retired. Return whether it retired, which it can do before it exits."""
        retired = self._owner.scope.start(child.retired.wait(), name=f"retirement of {child.process.pid}")
        try:
            await asyncio.wait({life, retired}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            retired.cancel()
        if life.done():
            life.result()
        return not life.done()

    async def _until_few_finish(self, life: asyncio.Task[None]) -> None:
        """Wait until at most one retired process is still finishing its tasks.

        Otherwise, long-running code would add process after process, and the number of running tasks would be unlimited.
        """
        self._finishing.add(life)
        life.add_done_callback(self._finishing.discard)
        while len(self._finishing) > _MOST_FINISHING:  # even during a shutdown: these processes exit too
            await asyncio.wait(set(self._finishing), return_when=asyncio.FIRST_COMPLETED)

    def _failed_to_start(self, why: str) -> None:
        since = self._clock.monotonic() if self._start_problem is None else self._start_problem.since
        self._start_problem = StartProblem(start_problem_text(why), since)


def _why(child: WorkerChild) -> str:
    """Return the reason why a process exited before it was ready."""
    if child.refusal is not None:
        return child.refusal.message
    return f"it ended before it was ready: {'unknown cause' if child.report is None else child.report.cause}"


_EVERY_S: Final = 1.0


class StartReport:
    """A service of the supervisor that stores the reason why worker processes cannot start.

    It writes to the database only after a change, so that heartbeats do not have to carry this reason. A new supervisor id counts as
    a change, because a supervisor that continues under a new id has a new row.
    """

    name = "start_report"

    def __init__(self, supervision: Supervision, processes: Sequence[ManagedProcess]) -> None:
        self.interval_s = _EVERY_S
        self._supervision = supervision
        self._processes = processes
        self._stored: tuple[str, int, StartProblem | None] | None = None

    async def tick(self) -> float | None:
        """Store the current state if it has changed. If the database cannot be reached, the next tick tries again."""
        problems = [process.start_problem for process in self._processes]
        longest = min(
            (each for each in problems if each is not None), key=lambda each: each.since, default=None
        )
        now = (self._supervision.supervisor_id, len(problems), longest)
        if now == self._stored:
            return None
        clock = self._supervision.environment.clock
        statement = workers.record_starts(
            now[0],
            processes=len(problems),
            problem=None if longest is None else longest.text,
            age_ms=0 if longest is None else round((clock.monotonic() - longest.since) * 1_000),
        )
        try:
            await self._supervision.session.run(statement, patience_s=0)
        except (DatabaseUnreachable, DatabaseReadOnly):
            return None
        self._stored = now
        return None
