"""A post is filled again whatever the system refuses for a while; what never came up is told at once."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Iterator
from random import Random

import pytest

from everbeat.errors import EverbeatError, WorkerError
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.process import ChildProcess, spawn
from everbeat.worker.children import Child
from everbeat.worker.posts import Post
from everbeat.worker.restarts import Prospects, WorkerNotStarted

PROGRAM = [sys.executable, "-c", "import time; time.sleep(60)"]  # until it is killed
REFUSED = OSError(errno.EMFILE, "Too many open files")


class Town:
    """One post and what became of it; `answers` says for each try whether the system refuses."""

    def __init__(self, answers: Iterator[bool], *, was_ready: bool) -> None:
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.failures: list[EverbeatError] = []
        self.alive: list[Child] = []
        self.filled = asyncio.Event()
        self.stopping = asyncio.Event()
        self._answers = answers
        prospects = Prospects(events=bus)
        prospects.was_ever_ready = was_ready
        self.post = Post(
            start=self._start,
            live=self._live,
            lives=set(),
            prospects=prospects,
            on_failure=self.failures.append,
            stopping=self.stopping,
            nursery=Nursery(name="town"),
            clock=SystemClock(),
            random=Random(1),
        )

    def _start(self) -> ChildProcess:
        if next(self._answers):
            raise REFUSED
        return spawn(PROGRAM)

    async def _live(self, child: Child) -> None:
        child.is_ready = True
        self.alive.append(child)
        self.filled.set()
        child.report = await child.process.wait_exit()
        child.close()


async def test_a_process_that_the_system_refuses_for_a_while_costs_nobody_else_anything() -> None:
    town = Town(iter([False, True, True, False]), was_ready=True)
    keeping = asyncio.ensure_future(town.post.keep())
    async with asyncio.timeout(30):
        await town.filled.wait()
        town.filled.clear()
        town.alive[0].process.kill()
        await town.filled.wait()
    refused = [event for event in town.events if isinstance(event, WorkerNotStarted)]
    assert len(refused) == 2
    assert "Too many open files" in refused[0].reason
    assert town.failures == []
    town.stopping.set()
    town.alive[1].process.kill()
    await keeping


async def test_where_none_was_ever_ready_it_is_told_at_once() -> None:
    town = Town(iter([True]), was_ready=False)
    await town.post.keep()
    (failure,) = town.failures
    assert isinstance(failure, WorkerError)
    with pytest.raises(WorkerError, match=r"cannot be started: .*Too many open files"):
        raise failure
