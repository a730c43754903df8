"""Tasks of several steps, which sleep and wait; they extend the sample tasks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from sample_tasks import app, effect

from everbeat import Cancel, Context, RetryPolicy

PRICES = (1, 20, 300, 4_000, 50_000)


def pay(ctx: Context, price: int, number: int, place: str) -> int:
    effect(f"pay {number}")
    if place == "inside" and ctx.attempt == number:
        os.kill(os.getpid(), signal.SIGKILL)
    return price


@app.task(run_in="process", on_crash="retry", max_crashes=20)
def pay_all(ctx: Context, place: str) -> int:
    """Die once at each step: between the effect and its record, or right after the record."""
    effect("start")
    total = 0
    for number, price in enumerate(PRICES, 1):
        total += ctx.step(pay, ctx, price, number, place)
        if place == "behind" and ctx.attempt == number:
            os.kill(os.getpid(), signal.SIGKILL)
    return total


@app.task(run_in="process", on_crash="retry")
def insist(ctx: Context) -> str:
    """Retry a step twice; the process dies in the second try."""
    again = RetryPolicy(max_retries=2, intervals=["1s"], jitter=0, auto_retry_for=[ConnectionError])
    return ctx.with_options(retry=again).step(reach, ctx)


def reach(ctx: Context) -> str:
    effect("try")
    if ctx.attempt == 1 and Path("refused").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    Path("refused").touch()
    raise ConnectionError("refused")


@app.task(run_in="process", on_crash="retry")
def sleep_for(ctx: Context, duration: str) -> str:
    effect("start")
    ctx.named("fall asleep").step(effect, "asleep")
    ctx.sleep(duration)
    effect("awake")
    return f"attempt {ctx.attempt}"


@app.task(on_crash="retry")
async def wait_for_word(ctx: Context) -> str:
    effect("start")
    word = await ctx.await_event("word", type=str)
    effect("heard")
    return word


@app.task(on_crash="retry")
def beget(ctx: Context, count: int) -> list[str]:
    children = [str(ctx.send(wait_for_word.call()).id) for _ in range(count)]
    ctx.wait_event("born")
    return children


@app.task(run_in="process", on_crash="retry")
def withdraw_with_child(ctx: Context) -> None:
    """Send a child, and raise Cancel."""
    ctx.send(pay_all.call("nowhere"))
    effect("cancels")
    raise Cancel("not wanted any more")
