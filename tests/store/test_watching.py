"""A client's watch of a silent statement: it continues if a check cannot be made, and it accepts slow replies."""

from __future__ import annotations

import asyncio
import os
import resource
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from everbeat.errors import DatabaseUnreachable
from everbeat.store import tasks, workers
from everbeat.store.database import Database
from everbeat.store.statement import Statement
from tests.store.conftest import StoreHarness
from tests.worker.proxy import Proxy

PATIENCE_S = 1.0
BOUND_S = 3 * (PATIENCE_S + 1)
LARGE = 1_500_000
PIECE = 65_536

Run = Callable[[Database, Statement[Any]], Awaitable[Any]]


async def in_thread(database: Database, statement: Statement[Any]) -> Any:
    """Run it in a thread that exists already."""
    return await asyncio.to_thread(database.run, statement)


async def on_loop(database: Database, statement: Statement[Any]) -> Any:
    return await database.arun(statement)


@contextmanager
def no_more_threads() -> Iterator[None]:
    """Let the start of every thread fail: each requests a stack that no machine has."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


@contextmanager
def no_more_files() -> Iterator[None]:
    """Let the opening of every file descriptor fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(each.name) for each in Path("/dev/fd").iterdir()) + 1, hard)
    )
    spare: list[int] = []
    try:
        while True:
            spare.append(os.dup(0))
    except OSError:
        pass
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in spare:
            os.close(each)


@pytest.mark.parametrize(
    ("shortage", "run"),
    [(no_more_threads, on_loop), (no_more_files, on_loop), (no_more_files, in_thread)],
    ids=["threads, loop", "files, loop", "files, thread"],
)
async def test_a_call_ends_in_time_if_no_check_can_be_made(
    db: StoreHarness, shortage: Callable[[], Any], run: Run
) -> None:  # J15
    async with Proxy.before(db.target) as proxy:
        database = Database(proxy.target, patience_s=PATIENCE_S)
        await run(database, workers.beat_worker("w1"))
        proxy.hold_reply(b"workers")
        with shortage():
            began_at = time.monotonic()
            with pytest.raises(DatabaseUnreachable):
                await asyncio.wait_for(run(database, workers.beat_worker("w1")), BOUND_S)
            print(f"ended after {time.monotonic() - began_at:.2f} s")
        await database.aclose()


@pytest.mark.parametrize("run", [in_thread, on_loop], ids=["thread", "loop"])
async def test_a_reply_that_arrives_slowly_is_not_lost(db: StoreHarness, run: Run) -> None:  # J15
    claimed = db.running()
    db.complete(claimed, result=b'"%s"' % (b"x" * LARGE))
    async with Proxy.before(db.target) as proxy:
        database = Database(proxy.target, patience_s=1.5 * PATIENCE_S)
        await run(database, workers.beat_worker("w1"))
        proxy.slow_down(
            0.15
        )  # silent for a tick of 0.1 s before each piece, but never long enough for a check
        began_at = time.monotonic()
        ended = await run(database, tasks.outcomes([claimed.id]))
        took_s = time.monotonic() - began_at
        assert len(ended[claimed.id].result) == LARGE + 2
        once_s = LARGE / PIECE * 0.15
        print(f"{took_s:.2f} s")
        assert once_s * 0.9 < took_s < once_s * 1.9, "the reply came once"
        await database.aclose()
