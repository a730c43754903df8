"""A worker that is busy has no use for hints, and says so; before it rests it says that it has, and looks again."""

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
from everbeat.worker import attention
from tests.worker.stand import Stand

SLOW_POLL: dict[str, Any] = {
    "async_concurrency": 2,
    "thread_concurrency": 0,
    "process_concurrency": 0,
    "poll_interval": "5m",
}


def listens(stand: Stand, worker_id: str) -> bool:
    (row,) = stand.query("select listens from {schema}.workers where id = %s", worker_id)
    return bool(row["listens"])


async def until(true: Callable[[], bool], *, within_s: float = 20.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)  # the row is looked at from outside, as a sender does


def hints(stand: Stand, act: Callable[[], object]) -> int:
    """How many notifications `act` sends."""
    with psycopg.connect(stand.target.url, autocommit=True) as ear:
        ear.execute(sql.SQL("listen {}").format(sql.Identifier(stand.target.channel)))
        act()
        ear.execute("select 1")
        return len(list(ear.notifies(timeout=0.2)))


def new_task() -> tasks.NewTask:
    return tasks.NewTask(id=uuid4(), name="double", queue="default", priority=0, args=b'{"x": 1}')


@pytest.mark.parametrize("many", [False, True])
def test_a_send_tells_nobody_while_every_worker_is_busy(stand: Stand, many: bool) -> None:
    channel = stand.target.channel
    first, second = stand.welcome().worker_id, stand.welcome().worker_id

    def send(joined: bool = False) -> None:
        if many:
            stand.run(tasks.insert_tasks([new_task()], channel=channel, joined=joined))
        else:
            stand.run(tasks.insert_task(new_task(), channel=channel, joined=joined))

    assert hints(stand, send) == 1  # who has said nothing listens
    stand.run(listen(first, listens=False))
    assert hints(stand, send) == 1
    stand.run(listen(second, listens=False))
    assert hints(stand, send) == 0
    assert hints(stand, lambda: send(joined=True)) == 1  # by its commit they may rest
    stand.run(listen(second, listens=True))
    assert hints(stand, send) == 1
    stand.query("update {schema}.workers set ended_at = now() where id = %s returning id", second)
    assert hints(stand, send) == 0


async def test_a_busy_worker_says_so_and_listens_again_before_it_rests(stand: Stand) -> None:
    async with stand.worker(**SLOW_POLL) as running:
        naps = stand.send_many("nap", [{"seconds": 0.15}] * 30)
        await until(lambda: not listens(stand, running.id))
        # Nobody is told of this one: it is found when a slot is free.
        unheard: list[UUID] = []
        assert hints(stand, lambda: unheard.append(stand.send("double", x=1))) == 0
        await running.finished(*naps, *unheard)
        await until(lambda: listens(stand, running.id))
        async with asyncio.timeout(20):
            row = await running.finished(stand.send("double", x=2))
        assert row["result"] == 4


async def test_who_rests_looks_once_more_after_it_has_said_that_it_listens(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that was committed right before the word, by a sender who had read the one before."""
    said = attention.Attention._say
    missed: list[UUID] = []

    async def say(self: attention.Attention, listens: bool) -> None:
        if listens:
            missed.append(stand.send("double", x=3))  # nobody is told: the word is not said yet
        await said(self, listens)

    monkeypatch.setattr(attention.Attention, "_say", say)
    async with stand.worker(**SLOW_POLL) as running:
        naps = stand.send_many("nap", [{"seconds": 0.15}] * 20)
        await running.finished(*naps)
        await until(lambda: bool(missed))
        async with asyncio.timeout(20):
            row = await running.finished(missed[0])
        assert row["result"] == 6
