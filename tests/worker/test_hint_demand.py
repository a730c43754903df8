"""Test that a busy worker turns notifications off, and that it turns them on and polls again before it idles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql

from everbeat.store import tasks
from everbeat.store.workers import listen
from everbeat.worker.claim import claimer
from tests.worker.harness import WorkerHarness

SLOW_POLL: dict[str, Any] = {
    "async_concurrency": 2,
    "thread_concurrency": 0,
    "process_concurrency": 0,
    "poll_interval": "5m",
}


def listens(harness: WorkerHarness, worker_id: str) -> bool:
    (row,) = harness.query("select listens from {schema}.workers where id = %s", worker_id)
    return bool(row["listens"])


async def until(true: Callable[[], bool], *, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)  # reads the row as a sender does


def hints(harness: WorkerHarness, act: Callable[[], object]) -> int:
    """Return how many notifications `act` sends."""
    with psycopg.connect(harness.target.url, autocommit=True) as ear:
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(harness.target.channel)))
        act()
        ear.execute("select 1")
        return len(list(ear.notifies(timeout=0.2)))


def new_task() -> tasks.NewTask:
    return tasks.NewTask(id=uuid4(), name="double", queue="default", priority=0, args=b'{"x": 1}')


@pytest.mark.parametrize("many", [False, True])
def test_a_send_notifies_no_worker_while_all_are_busy(harness: WorkerHarness, many: bool) -> None:
    channel = harness.target.channel
    first, second = harness.welcome().worker_id, harness.welcome().worker_id

    def send(joined: bool = False) -> None:
        if many:
            harness.run(tasks.insert_tasks([new_task()], channel=channel, joined=joined))
        else:
            harness.run(tasks.insert_task(new_task(), channel=channel, joined=joined))

    assert hints(harness, send) == 1  # a worker listens by default
    harness.run(listen(first, listens=False))
    assert hints(harness, send) == 1
    harness.run(listen(second, listens=False))
    assert hints(harness, send) == 0
    assert (
        hints(harness, lambda: send(joined=True)) == 1
    )  # the workers might be idle when the transaction commits
    harness.run(listen(second, listens=True))
    assert hints(harness, send) == 1
    harness.query("update {schema}.workers set ended_at = now() where id = %s returning id", second)
    assert hints(harness, send) == 0


async def test_a_worker_clears_its_listens_flag_while_busy_and_sets_it_before_it_idles(
    harness: WorkerHarness,
) -> None:
    async with harness.worker(**SLOW_POLL) as running:
        naps = harness.send_many("nap", [{"seconds": 0.15}] * 30)
        await until(lambda: not listens(harness, running.id))
        # No notification is sent for this task: the worker finds it when a slot is free.
        unheard: list[UUID] = []
        assert hints(harness, lambda: unheard.append(harness.send("double", x=1))) == 0
        await running.finished(*naps, *unheard)
        await until(lambda: listens(harness, running.id))
        async with asyncio.timeout(20):
            row = await running.finished(harness.send("double", x=2))
        assert row["result"] == 4


async def test_an_idle_worker_polls_once_more_after_it_sets_its_listens_flag(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sender that read the old value commits a task just before the worker sets the flag."""
    said = claimer.HintDemand._store
    missed: list[UUID] = []

    async def say(self: claimer.HintDemand, listens: bool) -> None:
        if listens:
            missed.append(harness.send("double", x=3))  # no notification is sent: the flag is not set yet
        await said(self, listens)

    monkeypatch.setattr(claimer.HintDemand, "_store", say)
    async with harness.worker(**SLOW_POLL) as running:
        naps = harness.send_many("nap", [{"seconds": 0.15}] * 20)
        await running.finished(*naps)
        await until(lambda: bool(missed))
        async with asyncio.timeout(20):
            row = await running.finished(missed[0])
        assert row["result"] == 6
