"""The user program whose statements are recorded: one task for each course that a task can take."""

from __future__ import annotations

import asyncio
import json
import os
import signal

from everbeat import App, Context, Node, RecoveryConfig, RetryPolicy, TaskError, WorkerConfig, Workflow
from everbeat.errors import TASK_STALLED

AGAIN = RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=["REFUSED", TASK_STALLED])

app = App(
    os.environ["RECORDED_URL"],
    schema=os.environ["RECORDED_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ["RECORDED_RECOVERY"])),
    worker=WorkerConfig(**json.loads(os.environ["RECORDED_WORKER"])),
)


@app.task
async def greet(name: str) -> str:
    return f"hello {name}"


@app.task
async def brief() -> None:
    """Run short enough to be claimed ahead, and too long to be started with the claim."""
    await asyncio.sleep(0.06)


@app.task(retry=AGAIN)
async def refuse_once(ctx: Context) -> None:
    if ctx.attempt == 1:
        raise TaskError("REFUSED", "not this time")


@app.task
async def step(ctx: Context) -> str:
    return await ctx.astep(greet_later, "step")


async def greet_later(name: str) -> str:
    return name


@app.task(on_crash="retry")
async def die_once(ctx: Context) -> None:
    if ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(on_crash="retry")
async def wait_once(ctx: Context) -> None:
    """Wait for the death of this process; the second attempt completes."""
    if ctx.attempt == 1:
        await asyncio.sleep(600)


@app.task(retry=AGAIN, stall_timeout="2s")
async def stall_once(ctx: Context) -> None:
    if ctx.attempt == 1:
        await asyncio.sleep(600)


@app.define_workflow("two_greetings")
def two_greetings(wf: Workflow) -> Node[str]:
    return wf.add(greet, wf.add(greet, "first").result)
