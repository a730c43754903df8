"""Task functions that store partial results; `url` and `schema` lead to the user's own connection and rows."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psycopg

from everbeat.domain.task.context import Context
from everbeat.domain.task.retry import RetryPolicy
from tests.worker.effects import effect
from tests.worker.sample_tasks import gate, task

AGAIN = RetryPolicy(max_retries=3, intervals=["1s"], jitter=0, auto_retry_for=["UNHANDLED_EXCEPTION"])


def remember(ctx: Context, folder: str) -> list[Any]:
    """Store two checkpoints, fail once, then return the checkpoint found."""
    found = ctx.last_checkpoint
    if ctx.attempt == 1:
        ctx.checkpoint({"at": 1.5, "text": "\0"})
        ctx.checkpoint([1, {"two": None}])
        effect(folder, ctx.last_checkpoint)
        raise RuntimeError("once")
    return [ctx.attempt, found]


@task(retry=AGAIN)
def remember_in_thread(ctx: Context, folder: str) -> list[Any]:
    return remember(ctx, folder)


@task(retry=AGAIN, run_in="process")
def remember_in_process(ctx: Context, folder: str) -> list[Any]:
    return remember(ctx, folder)


async def aremember(ctx: Context, folder: str) -> list[Any]:
    found = ctx.last_checkpoint
    if ctx.attempt == 1:
        await ctx.acheckpoint({"at": 1.5, "text": "\0"})
        await ctx.acheckpoint([1, {"two": None}])
        effect(folder, ctx.last_checkpoint)
        raise RuntimeError("once")
    return [ctx.attempt, found]


@task(retry=AGAIN)
async def remember_async(ctx: Context, folder: str) -> list[Any]:
    return await aremember(ctx, folder)


@task(retry=AGAIN, run_in="process")
async def remember_async_in_process(ctx: Context, folder: str) -> list[Any]:
    return await aremember(ctx, folder)


def walk(ctx: Context, folder: str) -> int:
    """Run ten steps, of which the seventh fails at first."""
    for step in ctx.resume("step", range(1, 11)):
        if step == 7 and ctx.attempt == 1:
            raise RuntimeError("at seven")
        effect(folder, step)
    return ctx.attempt


@task(retry=AGAIN)
def walk_in_thread(ctx: Context, folder: str) -> int:
    return walk(ctx, folder)


@task(retry=AGAIN, run_in="process")
def walk_in_process(ctx: Context, folder: str) -> int:
    return walk(ctx, folder)


async def slowly(total: int) -> AsyncIterator[int]:
    for number in range(1, total + 1):
        await asyncio.sleep(0)  # yields to the loop, as a real source of items does
        yield number


@task(retry=AGAIN)
async def walk_async(ctx: Context, folder: str) -> int:
    async for step in ctx.aresume("step", slowly(10)):
        if step == 7 and ctx.attempt == 1:
            raise RuntimeError("at seven")
        effect(folder, step)
    return ctx.attempt


@task(retry=AGAIN, run_in="process")
async def walk_async_in_process(ctx: Context, folder: str) -> int:
    async for step in ctx.aresume("step", [*range(1, 11)]):
        if step == 7 and ctx.attempt == 1:
            raise RuntimeError("at seven")
        effect(folder, step)
    return ctx.attempt


@task(retry=AGAIN)
async def walk_two_at_once(ctx: Context, folder: str) -> int:
    """Run two concurrent loops, each of which fails in its seventh step."""

    async def one(name: str) -> None:
        async for step in ctx.aresume(name, range(1, 11)):
            if step == 7 and ctx.attempt == 1:
                await asyncio.sleep(0.05)  # the other one gets as far
                raise RuntimeError(name)
            effect(folder, f"{name} {step}")

    await asyncio.gather(one("left"), one("right"))
    return ctx.attempt


@task()
def store_what(ctx: Context, what: str) -> None:
    ctx.checkpoint("before")
    match what:
        case "large":
            ctx.checkpoint("x" * 2_000_000)
        case "object":
            ctx.checkpoint({"a": [object()]})
        case "keys":
            ctx.checkpoint({1: 2})
        case "items":
            list(ctx.resume("step", 5))  # type: ignore[call-overload]
        case "nan":
            ctx.checkpoint([float("nan")])
        case "surrogate":
            ctx.checkpoint("\ud800")
        case "name":
            list(ctx.resume("", [1]))
        case "twice":
            for _ in range(2):
                for _ in ctx.resume("same", [1, 2]):
                    pass


@task()
async def block_the_loop_by(ctx: Context, what: str) -> None:
    match what:
        case "checkpoint":
            ctx.checkpoint(1)
        case "resume":
            for _ in ctx.resume("step", [1]):
                pass


@task()
async def help_from_a_thread(ctx: Context) -> Any:
    """Store checkpoints from a thread of an async task and from a loop in a thread."""
    await asyncio.to_thread(ctx.checkpoint, "from a thread")
    await asyncio.to_thread(lambda: asyncio.run(ctx.acheckpoint("from another loop")))
    return ctx.last_checkpoint


@task()
def checkpoint_when_told(ctx: Context) -> str:
    gate.journal.append("waits")
    gate.opened.wait(20)
    try:
        ctx.checkpoint("late")
    except BaseException as problem:
        gate.journal.append(repr(problem))
        raise
    gate.journal.append("stored")
    return "done"


@task(run_in="process")
def checkpoint_in_process_when_told(ctx: Context, folder: str) -> str:
    effect(folder, "waits")
    try:  # a stop may come before the checkpoint does
        while not Path(folder, "go").exists():
            time.sleep(0.01)  # a file is the only signal from another process
        ctx.checkpoint("late")
    except BaseException as problem:
        effect(folder, repr(problem))
        raise
    effect(folder, "stored")
    return "done"


def add_row(connection: Any, schema: str, word: str) -> None:
    connection.execute(f'insert into "{schema}".user_rows values (%s)', [word])


@task(retry=AGAIN)
async def commit_async(ctx: Context, url: str, schema: str, how: str) -> str:
    """Commit with `commit_with`; `how` selects events in the block and after it."""
    async with await psycopg.AsyncConnection.connect(url) as connection, ctx.commit(connection) as completion:
        await connection.execute(f'insert into "{schema}".user_rows values (%s)', [f"{ctx.attempt}"])
        if how == "raise once" and ctx.attempt == 1:
            raise RuntimeError("in the block")
        gate.journal.append("in the block")
        while how == "wait" and not gate.opened.is_set():
            await asyncio.sleep(0.01)  # the gate is a thread's
        completion.result = how
    gate.journal.append("after the block")
    if how == "raise after":
        raise RuntimeError("after the block")
    if how == "stay":
        while not gate.opened.is_set():
            await asyncio.sleep(0.01)  # the gate is a thread's
    return "not this"


class Hesitant(psycopg.Connection[Any]):
    """A connection that waits before it sends COMMIT."""

    def commit(self) -> None:
        gate.journal.append("about to commit")
        gate.opened.wait(30)
        super().commit()


@task()
def commit_with_hesitation(ctx: Context, url: str, schema: str, how: str) -> None:
    with Hesitant.connect(url) as connection:
        connection.execute("select 1")  # opens the transaction, so that the block does not
        if how:
            connection.execute(f"set idle_in_transaction_session_timeout = {how}")  # type: ignore[call-overload]
        with ctx.commit(connection):
            add_row(connection, schema, "x")


@task(retry=AGAIN)
def commit_in_thread(ctx: Context, url: str, schema: str, how: str) -> str:
    with psycopg.connect(url) as connection:
        if how == "serializable":
            connection.isolation_level = psycopg.IsolationLevel.SERIALIZABLE
        with ctx.commit(connection) as completion:
            add_row(connection, schema, f"{ctx.attempt}")
            if how == "raise once" and ctx.attempt == 1:
                raise RuntimeError("in the block")
            if how == "serializable":
                for step in range(5):
                    ctx.progress("writing", step / 5)
                    time.sleep(0.3)  # long enough for progress to be written, as it must not be
            gate.journal.append("in the block")
            if how == "wait":
                gate.opened.wait(20)
            completion.result = how
    gate.journal.append("after the block")
    match how:
        case "raise after":
            raise RuntimeError("after the block")
        case "checkpoint after":
            try:
                ctx.checkpoint(1)
            except Exception as problem:  # noqa: BLE001 - what the test wants to see
                gate.journal.append(problem)
        case "commit twice":
            try:
                with psycopg.connect(url) as other, ctx.commit(other):
                    pass
            except Exception as problem:  # noqa: BLE001 - what the test wants to see
                gate.journal.append(problem)
    return "not this"


@task(retry=AGAIN, run_in="process")
def commit_in_process(ctx: Context, url: str, schema: str, how: str) -> str:
    with psycopg.connect(url) as connection, ctx.commit(connection) as completion:
        add_row(connection, schema, f"{ctx.attempt}")
        if how == "raise once" and ctx.attempt == 1:
            raise RuntimeError("in the block")
        if how == "die once" and ctx.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        completion.result = how
    if how == "raise after":
        raise RuntimeError("after the block")
    return "not this"


@task(run_in="process")
async def commit_async_in_process(ctx: Context, url: str, schema: str, how: str) -> str:
    async with await psycopg.AsyncConnection.connect(url) as connection, ctx.commit(connection) as completion:
        await connection.execute(f'insert into "{schema}".user_rows values (%s)', [f"{ctx.attempt}"])
        completion.result = how
    return "not this"


def commit_wrongly(ctx: Context, url: str, schema: str, result: Any) -> int:
    with psycopg.connect(url) as connection, ctx.commit(connection) as completion:
        add_row(connection, schema, "wrong")
        completion.result = object() if result == "object" else result
    return 1


@task()
def commit_wrong_result(ctx: Context, url: str, schema: str, result: Any) -> int:
    return commit_wrongly(ctx, url, schema, result)


@task(run_in="process")
def commit_wrong_result_in_process(ctx: Context, url: str, schema: str, result: Any) -> int:
    return commit_wrongly(ctx, url, schema, result)


@task(exception_codes={Exception: "MINE"})
async def commit_wrong_result_async(ctx: Context, url: str, schema: str, result: Any) -> int:
    async with await psycopg.AsyncConnection.connect(url) as connection, ctx.commit(connection) as completion:
        await connection.execute(f'insert into "{schema}".user_rows values (%s)', ["wrong"])
        completion.result = object() if result == "object" else result
    return 1


@task(timeout="1s")
def trail_in_thread(ctx: Context, url: str) -> None:
    with psycopg.connect(url) as connection, ctx.commit(connection):
        pass
    while not ctx.cancelled:
        time.sleep(0.01)  # polling is what sync code can do
    gate.journal.append(f"told in {threading.current_thread().name}")


@task()
async def commit_in_a_hurry(ctx: Context, url: str, schema: str) -> None:
    """Cancel itself during its COMMIT, which takes longer than its timeout."""
    async with (
        await psycopg.AsyncConnection.connect(url) as connection,
        asyncio.timeout(0.5),
        ctx.commit(connection),
    ):
        await connection.execute(f'insert into "{schema}".user_rows values (%s)', ["slow"])
    gate.journal.append("not reached")
