"""A post: one place in a supervisor's tree that is kept filled with a worker process.

What lives here: when the next process follows, after a death, after a retirement, or never. What may not: what is done with
a process while it lives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Final

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
                await self._clock.wait(self._stopping, timeout_s=pause)
                continue
            life = self._nursery.start(self._live(child), name=f"life of {child.process.pid}")
            self._lives.add(life)
            life.add_done_callback(self._lives.discard)
            if await self._has_retired(child, life):
                pace = Pace(
                    random=self._random
                )  # no death, hence no pause: what it has begun goes on beside its successor
                await self._until_few_finish(life)
                continue
            pause = pace.pause_after(self._clock.monotonic() - started_at)
            if not child.is_ready and not self._stopping.is_set() and self._are_bleak(child):
                pause = _HOPELESS_PAUSE_S
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

    def _are_bleak(self, child: Child) -> bool:
        cause = "" if child.report is None else child.report.cause
        return self._prospects.are_bleak(cause=cause, refusal=child.refusal, at=self._clock.monotonic())
