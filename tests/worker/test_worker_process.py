"""Test a real worker process; the test acts as its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import psutil

from everbeat.protocol import Beaten, Drain, FromWorker, Held, Hello, Leaving, Ready, Tick, Welcome
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.processes import EXIT_ORPHANED, ChildProcess, spawn
from tests.worker.harness import WorkerHarness

T = TypeVar("T")
PROGRAM = Path(__file__).parent / "programs" / "lone_worker.py"
MEGABYTE = 1024 * 1024


class Parent:
    """The supervisor's side of one worker process."""

    def __init__(self, harness: WorkerHarness, child: ChildProcess, channel: AsyncChannel) -> None:
        self.harness = harness
        self.child = child
        self.channel = channel
        self.told: list[FromWorker] = []

    async def receive(self, kind: type[T]) -> T:
        """Return the next message of this kind; others are kept in `told`."""
        async with asyncio.timeout(30):
            while True:
                message = await self.channel.receive()
                self.told.append(message)
                if isinstance(message, kind):
                    return message

    async def finished(self, *task_ids: UUID) -> None:
        """Wait until these tasks have ended; poll the database, because no message reports it."""
        async with asyncio.timeout(30):
            query = "select count(*) as n from {schema}.tasks where id = any(%s) and state in ('COMPLETED', 'FAILED')"
            while self.harness.query(query, list(task_ids))[0]["n"] < len(task_ids):
                await asyncio.sleep(0.02)  # between two looks


@asynccontextmanager
async def worker_process(harness: WorkerHarness) -> AsyncIterator[Parent]:
    child = spawn([sys.executable, str(PROGRAM), harness.target.url, harness.target.schema])
    channel = await AsyncChannel.open(child.channel_socket, messages=FromWorker)
    parent = Parent(harness, child, channel)
    try:
        hello = await parent.receive(Hello)
        assert hello.schema == harness.target.schema
        channel.send_nowait(harness.welcome())
        await parent.receive(Ready)
        channel.send_nowait(Beaten(1, SystemClock().monotonic()))
        yield parent
    finally:
        child.kill()
        await child.wait_exit()
        await channel.aclose()
        child.close()


async def test_a_worker_process_ignores_signals_and_stops_when_its_supervisor_asks(
    harness: WorkerHarness,
) -> None:  # B12
    async with worker_process(harness) as parent:
        sent: list[Any] = [
            harness.send("double", x=4),
            harness.send("process_pid"),
            harness.send("thread_nap", seconds=0.1),
        ]
        await parent.finished(*sent)
        napping = harness.send("nap", seconds=1.0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(parent.child.pid, number)
        await parent.finished(napping)
        assert harness.task(napping)["state"] == "COMPLETED"
        held = await parent.receive(Held)
        assert {lease[0] for lease in held.added} <= {*sent, napping}
        parent.channel.send_nowait(Drain(5_000))
        await parent.receive(Leaving)
        report = await parent.child.wait_exit()
        assert report.exit_code == 0
    assert harness.states() == {"COMPLETED": 4}


async def test_code_that_calls_exit_in_a_background_task_does_not_end_the_process(
    harness: WorkerHarness,
) -> None:  # B3
    async with worker_process(harness) as parent:
        stray = harness.send("stray_exit")
        await parent.finished(stray)
        assert harness.task(stray)["result"] == "still here: True"
        after = harness.send("double", x=1)
        await parent.finished(after)
        assert parent.child.poll() is None


async def test_a_worker_process_ends_when_its_supervisor_is_gone(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    async with worker_process(harness) as parent:
        harness.send("process_linger", folder=str(tmp_path))
        pid = tmp_path / "pid"
        async with asyncio.timeout(30):
            while not (pid.exists() and pid.read_text()):
                await asyncio.sleep(0.02)  # between two looks
        parent.channel.close()
        began = time.monotonic()
        report = await parent.child.wait_exit()
        assert report.exit_code == EXIT_ORPHANED
        task_process = int(pid.read_text())
        async with asyncio.timeout(6):
            while psutil.pid_exists(task_process):
                await asyncio.sleep(0.02)  # between two looks
        print(f"worker and task process gone {time.monotonic() - began:.2f} s after the supervisor")


async def test_a_worker_process_runs_500_sleeping_tasks_within_3_s_and_150_mb(
    harness: WorkerHarness,
) -> None:  # B8
    async with worker_process(harness) as parent:
        began = time.monotonic()
        sent = harness.send_many("nap", [{"seconds": 1.0}] * 500)
        await parent.finished(*sent)
        took = time.monotonic() - began
        rss = psutil.Process(parent.child.pid).memory_info().rss / MEGABYTE
        print(f"500 sleeps of 1 s took {took:.2f} s, resident {rss:.0f} MB")
        assert took < 3.0 * 3
        assert rss < 150
        ticks = [one for one in parent.told if isinstance(one, Tick)]
        assert len(ticks) <= 10


async def test_a_worker_process_is_ready_after_its_welcome_message(harness: WorkerHarness) -> None:
    async with worker_process(harness) as parent:
        assert isinstance(parent.told[-1], Ready)
        assert not [one for one in parent.told if isinstance(one, Welcome)]
