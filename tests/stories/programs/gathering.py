"""Tasks that wait for many children, and tasks that belong to batches; they extend the sample tasks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from sample_tasks import app, effect

from everbeat import Completed, Context, TaskError


@app.task(on_crash="retry")
async def square(number: int) -> int:
    effect(f"square {number}")
    return number * number


@app.task(run_in="process", on_crash="retry", max_crashes=20)
def dying_square(ctx: Context, number: int) -> int:
    """Kill the process in the first attempt."""
    if ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number * number


@app.task
async def fail(number: int) -> int:
    raise TaskError("ODD", f"{number} is odd")


@app.task(on_crash="retry")
async def sum_of_squares(ctx: Context, count: int) -> int:
    effect("sum starts")
    found = await ctx.agather(*(square.call(number) for number in range(count)))
    effect("sum ends")
    return sum(found)


@app.task(run_in="process", on_crash="retry", max_crashes=20)
def twice(ctx: Context, count: int) -> list[int]:
    """Gather twice, and kill the process before and after the second gather, and once in a child of each."""
    first = ctx.gather(*(square.call(number) for number in range(count)))
    if not Path("died-between").exists():
        Path("died-between").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    second = ctx.gather(*(dying_square.call(number) for number in range(2)))
    if not Path("died-behind").exists():
        Path("died-behind").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return [sum(first), *second]


@app.task(on_crash="retry")
async def mixed(ctx: Context, *, naps: str = "0s") -> list[str]:
    """Gather children that complete and fail, then sleep, so that a later attempt reads the outcomes again."""
    found = await ctx.agather_outcomes(square.call(2), fail.call(3), square.call(4))
    await ctx.asleep(naps)
    return [str(each.value) if isinstance(each, Completed) else each.error.code for each in found]


@app.task
async def strict(ctx: Context) -> int:
    return sum(await ctx.agather(square.call(2), fail.call(3), fail.call(5)))


@app.task(run_in="process", on_crash="retry", max_crashes=20)
def grow(ctx: Context, name: str, depth: int) -> str:
    """Add two tasks to the batch of this task, and kill the process once, between the two sends or behind them."""
    effect(f"grow {name}")
    if depth == 0:
        return name
    ctx.batch.send(grow.call(f"{name}a", depth - 1))
    if ctx.attempt == 1 and depth % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ctx.batch.send(grow.call(f"{name}b", depth - 1))
    if ctx.attempt == 1 and not depth % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return name


@app.task(on_crash="retry")
async def load(number: int) -> int:
    effect(f"load {number}")
    return number


@app.task(on_crash="retry")
async def report(what: str) -> str:
    effect(what)
    return what
