"""Tasks that emit the items of streams; they extend the sample tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from itertools import count

from sample_tasks import app, async_gate, effect, gate

from everbeat import Context

SECOND_ATTEMPT = 30


def numbers(ctx: Context) -> Iterator[int]:
    """Yield numbers without an end in the first attempt, and a few in the second."""
    effect("start")
    return count() if ctx.attempt == 1 else iter(range(SECOND_ATTEMPT))


@app.task(on_crash="retry")
async def emit_async(ctx: Context) -> str:
    for n in numbers(ctx):
        await ctx.aemit("numbers", {"attempt": ctx.attempt, "n": n})
        await asyncio.sleep(0.002)
    return "done"


@app.task(on_crash="retry")
def emit_in_thread(ctx: Context) -> str:
    for n in numbers(ctx):
        ctx.emit("numbers", {"attempt": ctx.attempt, "n": n})
        time.sleep(0.002)
    return "done"


@app.task(run_in="process", on_crash="retry")
def emit_in_process(ctx: Context) -> str:
    for n in numbers(ctx):
        ctx.emit("numbers", {"attempt": ctx.attempt, "n": n})
        time.sleep(0.002)
    return "done"


@app.task(on_crash="retry")
async def emit_forever_then_once(ctx: Context) -> str:
    """Emit without an end in the first attempt, and a single item in the second."""
    effect("start")
    for n in count():
        await ctx.aemit("numbers", n)
        if ctx.attempt > 1:
            return "done"
        await asyncio.sleep(0.002)
    raise AssertionError


@app.task
def emit_many(items: int, name: str = "numbers") -> str:
    """Emit as fast as possible, and end at once."""
    context = Context.current()
    began = time.monotonic()
    for n in range(items):
        context.emit(name, n)
    effect("emitted", seconds=time.monotonic() - began)
    return "done"


@app.task
async def emit_at_gates(*names: str) -> None:
    """Emit an item, and wait for the gate of this name."""
    for name in names:
        await Context.current().aemit("gates", name)
        await async_gate(name)


@app.task
def emit_and_fail(items: int) -> None:
    for n in range(items):
        Context.current().emit("numbers", n)
    gate("fail")
    raise ValueError("the end")
