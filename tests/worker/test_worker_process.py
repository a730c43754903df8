"""A real worker process under a supervisor that is the test."""

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

from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.clock import SystemClock
from everbeat.runtime.parent import EXIT_ORPHANED
from everbeat.runtime.process import ChildProcess, spawn
from everbeat.worker.protocol import Beaten, Drain, FromWorker, Held, Hello, Leaving, Ready, Tick, Welcome
from tests.worker.stand import Stand

T = TypeVar("T")
PROGRAM = Path(__file__).parent / "programs" / "lone_worker.py"
MEGABYTE = 1024 * 1024


class Parent:
    """The supervisor's end of one worker process."""

    def __init__(self, stand: Stand, child: ChildProcess, channel: AsyncChannel) -> None:
        self.stand = stand
        self.child = child
        self.channel = channel
        self.told: list[FromWorker] = []

    async def hear(self, kind: type[T]) -> T:
        """The next message of this kind; others are kept in `told`."""
        async with asyncio.timeout(30):
            while True:
                message = await self.channel.receive()
                self.told.append(message)
                if isinstance(message, kind):
                    return message

    async def finished(self, *task_ids: UUID) -> None:
        """Wait until these tasks have ended. Only the database tells, so it is asked now and then."""
        async with asyncio.timeout(30):
            query = "select count(*) as n from {schema}.tasks where id = any(%s) and state in ('COMPLETED', 'FAILED')"
            while self.stand.query(query, list(task_ids))[0]["n"] < len(task_ids):
                await asyncio.sleep(0.02)  # between two looks


@asynccontextmanager
async def worker_process(stand: Stand) -> AsyncIterator[Parent]:
    child = spawn([sys.executable, str(PROGRAM), stand.target.url, stand.target.schema])
    channel = await AsyncChannel.open(child.channel_socket, messages=FromWorker)
    parent = Parent(stand, child, channel)
    try:
        hello = await parent.hear(Hello)
        assert hello.schema == stand.target.schema
        channel.send_nowait(stand.welcome())
        await parent.hear(Ready)
        channel.send_nowait(Beaten(1, SystemClock().monotonic()))
        yield parent
    finally:
        child.kill()
        await child.wait_exit()
        await channel.aclose()
        child.close()


async def test_it_works_whatever_is_signalled_and_leaves_when_told(stand: Stand) -> None:  # B12
    async with worker_process(stand) as parent:
        sent: list[Any] = [
            stand.send("double", x=4),
            stand.send("process_pid"),
            stand.send("thread_nap", seconds=0.1),
        ]
        await parent.finished(*sent)
        napping = stand.send("nap", seconds=1.0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(parent.child.pid, number)
        await parent.finished(napping)
        assert stand.task(napping)["state"] == "COMPLETED"
        held = await parent.hear(Held)
        assert {lease[0] for lease in held.added} <= {*sent, napping}
        parent.channel.send_nowait(Drain(5_000))
        await parent.hear(Leaving)
        report = await parent.child.wait_exit()
        assert report.exit_code == 0
    assert stand.states() == {"COMPLETED": 4}


async def test_code_that_exits_on_the_loop_does_not_end_the_process(stand: Stand) -> None:  # B3
    async with worker_process(stand) as parent:
        stray = stand.send("stray_exit")
        await parent.finished(stray)
        assert stand.task(stray)["result"] == "still here: True"
        after = stand.send("double", x=1)
        await parent.finished(after)
        assert parent.child.poll() is None


async def test_it_ends_when_its_supervisor_is_gone(stand: Stand, tmp_path: Path) -> None:
    async with worker_process(stand) as parent:
        stand.send("process_linger", folder=str(tmp_path))
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


async def test_500_sleeping_tasks_in_one_process_take_little_time_and_memory(stand: Stand) -> None:  # B8
    async with worker_process(stand) as parent:
        began = time.monotonic()
        sent = stand.send_many("nap", [{"seconds": 1.0}] * 500)
        await parent.finished(*sent)
        took = time.monotonic() - began
        rss = psutil.Process(parent.child.pid).memory_info().rss / MEGABYTE
        print(f"500 sleeps of 1 s took {took:.2f} s, resident {rss:.0f} MB")
        assert took < 3.0 * 3
        assert rss < 150
        ticks = [one for one in parent.told if isinstance(one, Tick)]
        assert len(ticks) <= 10


async def test_a_welcome_is_all_it_waits_for(stand: Stand) -> None:
    async with worker_process(stand) as parent:
        assert isinstance(parent.told[-1], Ready)
        assert not [one for one in parent.told if isinstance(one, Welcome)]
