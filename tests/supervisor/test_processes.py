"""Test managed processes: a refused process is started again, but a supervisor whose first one fails ends at once."""

from __future__ import annotations

import asyncio
import errno
import sys
from collections.abc import Iterator
from random import Random

import pytest

from everbeat.errors import EverbeatError, WorkerError, WorkerRefused
from everbeat.protocol import Refused
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.events import Event, EventBus
from everbeat.runtime.processes import ChildProcess, spawn
from everbeat.runtime.task_scope import TaskScope
from everbeat.supervisor.processes import (
    ManagedProcess,
    RestartPolicy,
    WorkerChild,
    WorkerNotStarted,
    WorkersKeepFailing,
)

PROGRAM = [sys.executable, "-c", "import time; time.sleep(60)"]  # until it is killed
REFUSED = OSError(errno.EMFILE, "Too many open files")


class Owner:
    """The owner of one managed process; `answers` has for each start whether the system refuses it."""

    def __init__(self, answers: Iterator[bool], *, was_ready: bool, ready: bool = True) -> None:
        self._ready = ready
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        self.failures: list[EverbeatError] = []
        self.alive: list[WorkerChild] = []
        self.filled = asyncio.Event()
        self.stopping = asyncio.Event()
        self.environment = ProcessEnvironment(events=bus, random=Random(1))
        self.scope = TaskScope(name="test")
        self.lives: set[asyncio.Task[None]] = set()
        self.restart_policy = RestartPolicy(events=bus)
        self.restart_policy.was_ever_ready = was_ready
        self._answers = answers
        self.managed = ManagedProcess(self)

    def fail(self, failure: EverbeatError) -> None:
        self.failures.append(failure)

    def spawn(self) -> ChildProcess:
        if next(self._answers):
            raise REFUSED
        return spawn(PROGRAM)

    async def live(self, child: WorkerChild) -> None:
        child.is_ready = self._ready
        self.alive.append(child)
        self.filled.set()
        child.report = await child.process.wait_exit()
        child.close()


async def test_a_process_that_the_system_refuses_for_a_while_is_started_again() -> None:
    owner = Owner(iter([False, True, True, False]), was_ready=True)
    keeping = asyncio.ensure_future(owner.managed.keep())
    async with asyncio.timeout(30):
        await owner.filled.wait()
        owner.filled.clear()
        owner.alive[0].process.kill()
        await owner.filled.wait()
    refused = [event for event in owner.events if isinstance(event, WorkerNotStarted)]
    assert len(refused) == 2
    assert "Too many open files" in refused[0].reason
    assert owner.failures == []
    owner.stopping.set()
    owner.alive[1].process.kill()
    await keeping


async def test_a_supervisor_whose_first_process_cannot_start_fails_at_once() -> None:
    owner = Owner(iter([True]), was_ready=False)
    await owner.managed.keep()
    (failure,) = owner.failures
    assert isinstance(failure, WorkerError)
    with pytest.raises(WorkerError, match=r"cannot be started: .*Too many open files"):
        raise failure


async def test_the_start_problem_lasts_from_the_first_refused_process_until_one_is_ready() -> None:  # J8
    owner = Owner(iter([False, True, False]), was_ready=True)
    keeping = asyncio.ensure_future(owner.managed.keep())
    async with asyncio.timeout(30):
        await owner.filled.wait()
        assert owner.managed.start_problem is None
        owner.filled.clear()
        owner.alive[0].process.kill()
        while (problem := owner.managed.start_problem) is None:
            await asyncio.sleep(0.01)  # the managed process sends no event when it has noticed
        assert "Too many open files" in problem.text
        await owner.filled.wait()
        assert owner.managed.start_problem is None
        owner.alive[1].process.kill()
        owner.stopping.set()
        await keeping


async def test_a_process_that_dies_before_it_is_ready_is_reported_as_the_start_problem() -> None:  # J8
    owner = Owner(iter([False, False, True]), was_ready=True, ready=False)
    keeping = asyncio.ensure_future(owner.managed.keep())
    async with asyncio.timeout(30):
        await owner.filled.wait()
        owner.alive[0].process.kill()
        while (first := owner.managed.start_problem) is None:
            await asyncio.sleep(0.01)  # as above
        assert first.text == "it ended before it was ready: killed by SIGKILL"
        while len(owner.alive) < 2:
            await asyncio.sleep(0.01)  # the next process is being started
        owner.alive[1].process.kill()
        while (second := owner.managed.start_problem) == first:
            await asyncio.sleep(0.01)  # as above
        assert second is not None
        assert "Too many open files" in second.text
        assert second.since == first.since, "the problem counts from the first failed start"
        owner.stopping.set()
        await keeping


def test_a_refused_process_is_restarted_quickly_until_five_have_failed() -> None:  # J8
    events: list[Event] = []
    bus = EventBus()
    bus.subscribe(events.append)
    policy = RestartPolicy(events=bus)
    policy.was_ever_ready = True
    refusal = Refused("IMPORT_FAILED", "no module 'shop'")
    found = [policy.needs_long_pause(cause="exit code 1", refusal=refusal, at=at) for at in (0, 1, 2, 4, 8)]
    assert found == [False, False, False, False, True]
    assert [type(event) for event in events] == [WorkersKeepFailing] * 5
    with pytest.raises(WorkerRefused, match="no module 'shop'"):
        RestartPolicy(events=bus).needs_long_pause(cause="exit code 1", refusal=refusal, at=0)


def test_two_slow_early_deaths_end_a_supervisor_that_never_had_a_worker() -> None:  # J8
    policy = RestartPolicy(events=EventBus())
    assert not policy.needs_long_pause(cause="exit code 3", refusal=None, at=100)
    assert not policy.needs_long_pause(cause="exit code 3", refusal=None, at=105)
    with pytest.raises(WorkerError, match="the last one: exit code 3"):
        policy.needs_long_pause(cause="exit code 3", refusal=None, at=120)
