"""Tasks whose log is captured; they extend the sample tasks."""

from __future__ import annotations

import asyncio
import logging
import time

from sample_tasks import app, effect

from everbeat import Context

log = logging.getLogger("shop.orders")


def tell(ctx: Context, n: int) -> None:
    log.info("attempt %d, item %d", ctx.attempt, n)
    effect("logged", n=n)


@app.task(on_crash="retry", capture_logs=True)
async def pack_async(ctx: Context) -> str:
    for n in range(100_000 if ctx.attempt == 1 else 3):
        tell(ctx, n)
        await asyncio.sleep(0.02)
    return "done"


@app.task(on_crash="retry", capture_logs=True)
def pack_in_thread(ctx: Context) -> str:
    for n in range(100_000 if ctx.attempt == 1 else 3):
        tell(ctx, n)
        time.sleep(0.02)
    return "done"


@app.task(on_crash="retry", run_in="process", capture_logs=True)
def pack_in_process(ctx: Context) -> str:
    for n in range(100_000 if ctx.attempt == 1 else 3):
        tell(ctx, n)
        time.sleep(0.02)
    return "done"
