"""The supervisor: starts worker processes, watches them, replaces them, and lets them leave in good order.

What lives here: the processes. What may not: rows and beats, which are the business of `supervision`, and user code: this
process imports none, so that no task can keep it from beating.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Final

from everbeat.config import WorkerConfig
from everbeat.errors import EverbeatError
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus, WorkerExited
from everbeat.runtime.exit_report import ExitReport
from everbeat.runtime.frames import ChannelClosed, ChannelError
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.out_of_memory import OutOfMemoryCounter
from everbeat.runtime.process import spawn
from everbeat.runtime.service import ServiceRunner
from everbeat.runtime.signals import signals_call
from everbeat.worker.children import GRACE_OVER, Child
from everbeat.worker.hook_line import HookLine
from everbeat.worker.posts import Post
from everbeat.worker.protocol import (
    AskBeat,
    Drain,
    FromWorkerProcess,
    Held,
    Hello,
    HookAnswers,
    Leaving,
    Ready,
    Refused,
    Retiring,
    Stop,
    Tick,
)
from everbeat.worker.recycling import ProcessRecycled
from everbeat.worker.restarts import Prospects
from everbeat.worker.seat import Seat
from everbeat.worker.supervision import Supervision
from everbeat.worker.watches import watches_of

_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_LAST_WORDS_S: Final = 1.0  # for what a process said before it ended to be read
_DEAF_S: Final = 5.0
_BEYOND_GRACE_S: Final = 30.0  # for what the database has not taken yet
_LAST_LOOK_S: Final = 1.0
_LAST_SILENCE_S: Final = 3.0  # three reports of a worker process that can still end its code and write
_LAST_BURIALS_S: Final = 10.0
_log = logging.getLogger("everbeat.worker")


class Supervisor:
    """Runs worker processes made by `argv`. `supervise` makes the supervision, once the first of them has said what it needs.

    `processes` overrides what the app's configuration says.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        supervise: Callable[[Hello], Supervision],
        events: EventBus,
        clock: Clock,
        random: Random,
        env: Mapping[str, str] | None = None,
        processes: int | None = None,
        hooks: HookLine | None = None,
    ) -> None:
        self._argv = list(argv)
        self._supervise = supervise
        self._events = events
        self._clock = clock
        self._random = random
        self._env = env
        self._processes = processes
        self._hooks = hooks or HookLine(events=events, clock=clock)
        self._worker = WorkerConfig()
        self._out_of_memory = OutOfMemoryCounter()
        self._children: list[Child] = []
        self._supervision: Supervision | None = None
        self._opening = asyncio.Lock()
        self._nursery = Nursery(name="supervisor")
        self._kept: list[Post] = []
        self._posts: list[asyncio.Task[None]] = []
        self._lives: set[asyncio.Task[None]] = set()
        self._last_rites: set[asyncio.Task[None]] = set()
        self._prospects = Prospects(events=events)
        self._failure: EverbeatError | None = None
        self._stopping = asyncio.Event()
        self._stops = 0

    async def run(self) -> None:
        """Returns after an orderly end. Raises WorkerError when no worker can start, or a DatabaseError.

        SIGTERM and SIGINT mean `stop` where this is the main thread. Cancelling it kills the processes.
        """
        with signals_call(self.stop, numbers=_SIGNALS):
            try:
                self._fill_post()
                while waiting := [post for post in (*self._posts, *self._lives) if not post.done()]:
                    await asyncio.wait(waiting)
                for post in self._posts:
                    post.result()
            finally:
                await self._end()
        if self._failure is not None:
            raise self._failure

    @property
    def supervision(self) -> Supervision | None:
        """What this supervisor is to the database; None before the first worker process has said where that is."""
        return self._supervision

    @property
    def pids(self) -> list[int]:
        """The worker processes that run now."""
        return [child.process.pid for child in self._children]

    def stop(self) -> None:
        """Asks to end: first in good order, the second time at once, the third time without a word."""
        self._stops += 1
        _log.info("stop_asked times=%d", self._stops)
        self._stopping.set()
        if self._supervision is not None and self._stops <= 2:
            self._supervision.drain()
            grace_s = self._worker.grace_s if self._stops == 1 else 0.0
            self._nursery.start(self._end_at_last(grace_s), name="end of patience")
        for child in list(self._children):
            self._ask_to_leave(child)

    def _ask_to_leave(self, child: Child) -> None:
        if self._stops >= 3 or not child.is_welcome:
            child.kill(because=GRACE_OVER)  # one that was not welcomed yet holds nothing
        elif self._stops == 2:
            child.tell(Stop())
        else:
            child.tell(Drain(round(self._worker.grace_s * 1_000)))

    async def _end_at_last(self, grace_s: float) -> None:
        """Kill what is left: soon after the grace the processes that say nothing, later those that still write."""
        await self._clock.sleep(grace_s + _LAST_LOOK_S)
        looked_at = self._clock.monotonic()
        await self._clock.sleep(_LAST_SILENCE_S)
        self._kill_overdue(one for one in self._children if one.heard_at < looked_at and not one.has_left)
        await self._clock.sleep(_BEYOND_GRACE_S)
        self._kill_overdue(self._children)

    def _kill_overdue(self, children: Iterable[Child]) -> None:
        for child in list(children):
            _log.error("grace_exceeded pid=%d", child.process.pid)
            child.kill(because=GRACE_OVER)

    def _fill_post(self) -> None:
        post = Post(
            start=lambda: spawn(self._argv_of_next, env=self._env, out_of_memory=self._out_of_memory),
            live=self._live, lives=self._lives, prospects=self._prospects, on_failure=self._fail, stopping=self._stopping,
            nursery=self._nursery, clock=self._clock, random=self._random,
        )  # fmt: skip
        self._kept.append(post)
        self._posts.append(self._nursery.start(post.keep(), name=f"post {len(self._posts) + 1}"))

    @property
    def _argv_of_next(self) -> list[str]:
        return [*self._argv, "again"] if self._prospects.was_ever_ready else self._argv

    async def _live(self, child: Child) -> None:
        """One worker process from its first word to its exit."""
        process = child.process
        self._children.append(child)
        conversation = self._nursery.start(self._converse(child), name=f"line to {process.pid}")
        child.report = child.explained(await process.wait_exit())
        died_at = self._clock.monotonic()
        await self._clock.wait(child.fell_silent, timeout_s=_LAST_WORDS_S)
        conversation.cancel()
        self._children.remove(child)
        self._hooks.leave(child)
        child.close()
        if child.refusal is None:  # the reason of a refusal is told by whoever acts on it
            self._events.emit(
                WorkerExited(
                    worker_id="" if child.seat is None else child.seat.worker_id,
                    pid=process.pid,
                    cause=child.report.cause,
                    in_order=child.has_left and child.report.signal_number is None,
                )
            )
        if self._supervision is not None and child.seat is not None:
            self._supervision.dismiss(child.seat)
            self._bury(self._supervision, child.seat, child, child.report, died_at=died_at)

    def _bury(
        self, supervision: Supervision, seat: Seat, child: Child, report: ExitReport, *, died_at: float
    ) -> None:
        """Begins the burial; the replacement starts beside it."""
        burials = supervision.burials
        if not (child.has_left or report.stopped) and not supervision.config.detect_child_exit:
            self._nursery.start(burials.by_age(seat, report), name=f"burial of {seat.worker_id}")
            return
        in_order = child.has_left and report.signal_number is None
        rites = burials.in_order(seat) if in_order else burials.by_exit(seat, report, died_at=died_at)
        burial = self._nursery.start(rites, name=f"burial of {seat.worker_id}")
        self._last_rites.add(burial)
        burial.add_done_callback(self._last_rites.discard)

    async def _converse(self, child: Child) -> None:
        try:
            while True:
                message: FromWorkerProcess = await child.channel.receive()
                child.heard_at = self._clock.monotonic()
                await self._hear(child, message)
        except ChannelClosed:
            child.fell_silent.set()  # its burial need not wait for further words
            await self._clock.sleep(_DEAF_S)  # it is about to end
        except ChannelError as problem:
            child.fell_silent.set()
            _log.error("worker_talks_nonsense pid=%d problem=%s", child.process.pid, problem)
        finally:
            child.process.kill()  # without a line it is of no use; mostly it has ended before

    async def _hear(self, child: Child, message: FromWorkerProcess) -> None:
        match message:
            case Hello():
                await self._welcome(child, message)
            case Ready():
                child.is_ready = self._prospects.was_ever_ready = True
                self._hooks.join(child)
            case HookAnswers():
                self._hooks.hear(message)
            case Held() | Tick():
                if child.seat is not None:
                    child.seat.hear(message)
            case AskBeat():
                if self._supervision is not None:
                    self._supervision.beat_now()
            case Refused():
                child.refusal = message
            case Leaving(code_runs):
                child.has_left, child.leaves_code = not code_runs, code_runs
            case Retiring(reason, tasks, rss):
                self._events.emit(
                    ProcessRecycled(pid=child.process.pid, reason=reason, tasks=tasks, rss_bytes=rss)
                )
                child.retired.set()

    async def _welcome(self, child: Child, hello: Hello) -> None:
        async with self._opening:
            supervision = self._supervision or await self._open(hello)
        if supervision is None or self._stopping.is_set():
            child.process.kill()
            return
        child.seat = supervision.new_seat(
            pid=child.process.pid,
            queues=hello.queues,
            metadata={"tasks": hello.task_names, "lanes": hello.lanes, "parameters": hello.parameters},
            tell=child.tell,
            on_loop=hello.on_loop,
        )
        welcome = await supervision.register(child.seat)
        child.is_welcome = True
        child.tell(welcome)
        if self._stops:
            self._ask_to_leave(child)

    async def _open(self, hello: Hello) -> Supervision | None:
        """Comes to life in the database, as the first worker process said, and fills the other posts."""
        try:
            worker = WorkerConfig.from_dict(hello.worker)
            supervision = self._supervise(hello)
            try:
                await supervision.open()
            except BaseException:
                await supervision.close()
                raise
        except EverbeatError as problem:
            self._fail(problem)
            return None
        self._worker, self._supervision = worker, supervision
        for _ in range(1, self._processes or self._worker.processes):
            self._fill_post()
        self._watch(supervision)
        return supervision

    def _watch(self, supervision: Supervision) -> None:
        watches = watches_of(
            supervision,
            children=lambda: self._children,
            posts=lambda: self._kept,
            events=self._events,
            clock=self._clock,
            nursery=self._nursery,
        )
        for watch in watches:
            runner = ServiceRunner(watch, clock=self._clock, random=self._random, emit=self._events.emit)
            self._nursery.start(runner.run(), name=watch.name)

    def _fail(self, failure: EverbeatError) -> None:
        self._failure = self._failure or failure
        self._stopping.set()
        for child in self._children:
            child.process.kill()

    async def _end(self) -> None:
        """The processes, then their burials, then the supervision, whose beats stop last."""
        for child in self._children:
            child.process.kill()
        if self._last_rites:
            await asyncio.wait(self._last_rites, timeout=_LAST_BURIALS_S)
        await self._nursery.close()
        if self._supervision is not None:
            await self._supervision.close()
        await self._hooks.close()
