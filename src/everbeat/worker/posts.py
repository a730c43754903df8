"""A post: one place in a supervisor's tree that is kept filled with a worker process.

What lives here: when the next process follows, after a death, after a retirement, or never. What may not: what is done with
a process while it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

from everbeat.domain.starts import StartProblem, start_problem_text
from everbeat.errors import EverbeatError
from everbeat.runtime.clock import Clock
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.process import ChildProcess
from everbeat.worker.children import Child
from everbeat.worker.restarts import Pace, Prospects

_HOPELESS_PAUSE_S: Final = 30.0
_MOST_FINISHING: Final = 1


class Post:
    """`start()` makes a process, `live(child)` is its whole life. `lives` holds those that go on, also after they retired.

    `on_failure` is told when there is no sense in going on.
    """

    def __init__(
        self,
        *,
        start: Callable[[], ChildProcess],
        live: Callable[[Child], Coroutine[Any, Any, None]],
        lives: set[asyncio.Task[None]],
        prospects: Prospects,
        on_failure: Callable[[EverbeatError], None],
        stopping: asyncio.Event,
        nursery: Nursery,
        clock: Clock,
        random: Random,
    ) -> None:
        self._start = start
        self._live = live
        self._lives = lives
        self._prospects = prospects
        self._on_failure = on_failure
        self._stopping = stopping
        self._nursery = nursery
        self._clock = clock
        self._random = random
        self._finishing: set[asyncio.Task[None]] = set()
        self._child: Child | None = None
        self._start_problem: StartProblem | None = None

    @property
    def start_problem(self) -> StartProblem | None:
        """Why this post has no worker process, from its first failure to start one until one is ready."""
        return None if self._child is not None and self._child.is_ready else self._start_problem

    async def keep(self) -> None:
        """Keeps it filled until all is to end."""
        try:
            await self._keep()
        except EverbeatError as failure:
            self._on_failure(failure)

    async def _keep(self) -> None:
        pace = Pace(random=self._random)
        while not self._stopping.is_set():
            started_at = self._clock.monotonic()
            try:
                child = await self._fill()
            except OSError as problem:
                pause = pace.pause_after(0.0)
                self._prospects.cannot_start(problem, again_in_s=pause)
                self._failed_to_start(f"the system refuses a process: {problem}")
                await self._clock.wait(self._stopping, timeout_s=pause)
                continue
            life = self._nursery.start(self._live(child), name=f"life of {child.process.pid}")
            self._lives.add(life)
            life.add_done_callback(self._lives.discard)
            self._child = child
            has_retired = await self._has_retired(child, life)
            self._child = None
            if child.is_ready:
                self._start_problem = None
            if has_retired:
                pace = Pace(
                    random=self._random
                )  # no death, hence no pause: what it has begun goes on beside its successor
                await self._until_few_finish(life)
                continue
            pause = pace.pause_after(self._clock.monotonic() - started_at)
            if not child.is_ready and not self._stopping.is_set():
                if self._are_bleak(child):
                    pause = _HOPELESS_PAUSE_S
                self._failed_to_start(_why(child))
            await self._clock.wait(self._stopping, timeout_s=pause)

    async def _fill(self) -> Child:
        process = self._start()
        try:
            return await Child.adopt(process, clock=self._clock)
        except BaseException:
            process.kill()
            process.close()
            raise

    async def _has_retired(self, child: Child, life: asyncio.Task[None]) -> bool:
        """Waits until the process leaves its post, which it may do before it ends."""
        retired = self._nursery.start(child.retired.wait(), name=f"retirement of {child.process.pid}")
        try:
            await asyncio.wait({life, retired}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            retired.cancel()
        if life.done():
            life.result()
        return not life.done()

    async def _until_few_finish(self, life: asyncio.Task[None]) -> None:
        """Waits until no more than one that has retired still finishes, beside which a fresh process may run.

        Otherwise long code would add process to process, without any bound on what runs at once.
        """
        self._finishing.add(life)
        life.add_done_callback(self._finishing.discard)
        while len(self._finishing) > _MOST_FINISHING:  # also when all is to end: they are told so themselves
            await asyncio.wait(set(self._finishing), return_when=asyncio.FIRST_COMPLETED)

    def _failed_to_start(self, why: str) -> None:
        since = self._clock.monotonic() if self._start_problem is None else self._start_problem.since
        self._start_problem = StartProblem(start_problem_text(why), since)

    def _are_bleak(self, child: Child) -> bool:
        cause = "" if child.report is None else child.report.cause
        return self._prospects.are_bleak(cause=cause, refusal=child.refusal, at=self._clock.monotonic())


def _why(child: Child) -> str:
    """Why a process that has ended was never ready."""
    if child.refusal is not None:
        return child.refusal.message
    return f"it ended before it was ready: {'unknown cause' if child.report is None else child.report.cause}"
