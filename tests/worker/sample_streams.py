"""Task functions that emit the items of streams."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psycopg

from everbeat.domain.task.context import Context
from everbeat.domain.task.retry import RetryPolicy
from tests.worker.sample_tasks import gate, task

AGAIN = RetryPolicy(max_retries=3, intervals=["1s"], jitter=0, auto_retry_for=["UNHANDLED_EXCEPTION"])


@task()
async def emit_when_told(ctx: Context, items: int) -> int:
    """Emit an item, wait, and emit the others as fast as possible. The journal contains how many of them were emitted."""
    await ctx.aemit("numbers", 0)
    gate.journal.append("waits")
    await asyncio.to_thread(gate.opened.wait, 20)
    for n in range(1, items):
        await ctx.aemit("numbers", n)
        gate.journal.append(str(n))
    return items


@task(retry=AGAIN)
def emit_in_three_attempts(ctx: Context) -> int:
    for _ in range(3):
        ctx.emit("attempts", ctx.attempt)
    ctx.emit(f"only {ctx.attempt}", None)
    if ctx.attempt < 3:
        raise ValueError("again")
    return ctx.emit("attempts", "last")


@task()
def emit_and_sleep(ctx: Context) -> int:
    ctx.emit("naps", ctx.attempt)
    ctx.sleep("6s")
    return ctx.emit("naps", ctx.attempt)


@task()
def emit_and_commit(ctx: Context, url: str, level: str) -> str:
    with psycopg.connect(url) as connection:
        connection.isolation_level = psycopg.IsolationLevel[level]
        ctx.emit("commits", "before")
        with ctx.commit(connection) as completion:
            ctx.emit("commits", "inside")
            time.sleep(0.3)  # long enough for a portion to be stored beside the open transaction
            ctx.emit("commits", "at the end")
            completion.result = "committed"
    return "after"


@task()
def emit_bad(ctx: Context) -> str:
    ctx.emit("values", "good")
    ctx.emit("values", "bad")
    return "done"


@task()
async def emit_wrongly(ctx: Context) -> list[str]:
    problems = []
    for name, value in (("a/b", 1), ("values", {1: 2}), ("values", "x" * 1_048_577)):
        try:
            await ctx.aemit(name, value)
        except Exception as problem:  # noqa: BLE001 - the test reads it
            problems.append(str(problem))
    try:
        ctx.emit("values", 1)
    except Exception as problem:  # noqa: BLE001 - as above
        problems.append(str(problem))
    return problems


@task()
def emit_until_full(ctx: Context) -> Any:
    for n in range(10):
        try:
            ctx.emit("numbers", n)
        except Exception as problem:  # noqa: BLE001 - the test reads it
            return [n, type(problem).__name__, str(problem)]
    return None
