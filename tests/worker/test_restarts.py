"""A post is filled again whatever the system refuses for a while; what never came up is told at once."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Iterator
from random import Random

import pytest

from everbeat.errors import EverbeatError, WorkerError, WorkerRefused
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.process import ChildProcess, spawn
from everbeat.worker.children import Child
from everbeat.worker.posts import Post
from everbeat.worker.protocol import Refused
from everbeat.worker.restarts import Prospects, WorkerNotStarted, WorkersKeepFailing

PROGRAM = [sys.executable, "-c", "import time; time.sleep(60)"]  # until it is killed
REFUSED = OSError(errno.EMFILE, "Too many open files")


class Town:
    """One post and what became of it; `answers` says for each try whether the system refuses."""

    def __init__(self, answers: Iterator[bool], *, was_ready: bool, ready: bool = True) -> None:
        self._ready = ready
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
        child.is_ready = self._ready
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


async def test_a_post_names_its_problem_from_the_first_refused_process_until_one_is_ready() -> None:  # J8
    town = Town(iter([False, True, False]), was_ready=True)
    keeping = asyncio.ensure_future(town.post.keep())
    async with asyncio.timeout(30):
        await town.filled.wait()
        assert town.post.start_problem is None
        town.filled.clear()
        town.alive[0].process.kill()
        while (problem := town.post.start_problem) is None:
            await asyncio.sleep(0.01)  # the post tells nobody when it has noticed
        assert "Too many open files" in problem.text
        await town.filled.wait()
        assert town.post.start_problem is None
        town.alive[1].process.kill()
        town.stopping.set()
        await keeping


async def test_a_process_that_dies_before_it_is_ready_is_the_problem_of_its_post() -> None:  # J8
    town = Town(iter([False, False, True]), was_ready=True, ready=False)
    keeping = asyncio.ensure_future(town.post.keep())
    async with asyncio.timeout(30):
        await town.filled.wait()
        town.alive[0].process.kill()
        while (first := town.post.start_problem) is None:
            await asyncio.sleep(0.01)  # as above
        assert first.text == "it ended before it was ready: killed by SIGKILL"
        while len(town.alive) < 2:
            await asyncio.sleep(0.01)  # the next process is being started
        town.alive[1].process.kill()
        while (second := town.post.start_problem) == first:
            await asyncio.sleep(0.01)  # as above
        assert second is not None
        assert "Too many open files" in second.text
        assert second.since == first.since, "the problem lasts since the first failed start"
        town.stopping.set()
        await keeping


def test_a_refused_process_is_tried_again_soon_until_five_have_failed() -> None:  # J8
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    prospects = Prospects(events=bus)
    prospects.was_ever_ready = True
    refusal = Refused("IMPORT_FAILED", "no module 'shop'")
    found = [prospects.are_bleak(cause="exit code 1", refusal=refusal, at=at) for at in (0, 1, 2, 4, 8)]
    assert found == [False, False, False, False, True]
    assert [type(event) for event in events] == [WorkersKeepFailing] * 5
    with pytest.raises(WorkerRefused, match="no module 'shop'"):
        Prospects(events=bus).are_bleak(cause="exit code 1", refusal=refusal, at=0)


def test_two_slow_early_deaths_end_a_supervisor_that_never_had_a_worker() -> None:  # J8
    prospects = Prospects(events=EventBus())
    assert not prospects.are_bleak(cause="exit code 3", refusal=None, at=100)
    assert not prospects.are_bleak(cause="exit code 3", refusal=None, at=105)
    with pytest.raises(WorkerError, match="the last one: exit code 3"):
        prospects.are_bleak(cause="exit code 3", refusal=None, at=120)
