"""Test that an idle worker soon finds a task whose sender died before it announced the task."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from typing import Final

from everbeat import WorkerConfig
from tests.worker.harness import WorkerHarness

PROGRAM: Final = """
import os, signal, sys
from uuid import uuid4
from everbeat.store import tasks
from everbeat.store.announcer import Announcer
from everbeat.store.database import Database
from everbeat.store.target import Target

Announcer.take = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # the commit was acknowledged
new = tasks.NewTask(id=uuid4(), name="double", queue="default", priority=0, args=b'{"x": 4}')
Database(Target(sys.argv[1], schema=sys.argv[2])).run(tasks.insert_task(new, channel="unused"))
"""


async def test_a_task_whose_sender_died_before_the_announcement_starts_at_the_next_poll(
    harness: WorkerHarness,
) -> None:  # R5
    assert WorkerConfig().poll_interval_s <= 2
    async with harness.worker(poll_interval=WorkerConfig().poll_interval) as running:
        await running.finished(harness.send("double", x=1))  # the worker is idle, and listens
        command = [sys.executable, "-c", PROGRAM, harness.target.url, harness.target.schema]
        died = await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
        assert died.returncode == -signal.SIGKILL
        (sent,) = harness.query("select id from {schema}.tasks where args::text like '%%4%%'")
        async with asyncio.timeout(20):
            row = await running.finished(sent["id"])
    waited_s = (row["started_at"] or row["completed_at"]) - row["sent_at"]
    assert row["result"] == 8
    assert waited_s.total_seconds() < 4  # 2 s, and time for a busy machine
