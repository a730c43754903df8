"""Tasks that start workflows; they extend the sample tasks."""

from __future__ import annotations

import os
import signal

from sample_tasks import app, async_gate, effect, gate

from everbeat import Context, Node, TaskStopped, Workflow


@app.task(on_crash="retry")
async def wrap(number: int) -> str:
    return f"parcel {number}"


@app.task(on_crash="retry")
async def hold(ctx: Context) -> None:
    await ctx.await_event("never")


@app.define_workflow("parcel")
def parcel(wf: Workflow, number: int) -> Node[str]:
    return wf.add(wrap, number)


@app.define_workflow("held")
def held(wf: Workflow) -> None:
    wf.add(hold)


@app.task(run_in="process", on_crash="retry")
def ship(ctx: Context, number: int, dies: bool) -> str:
    """Start a workflow, and die right afterwards if `dies`."""
    effect("start")
    started = ctx.start(parcel.call(number))
    if dies and ctx.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return str(started.id)


@app.task(on_crash="retry")
def ship_late(ctx: Context) -> str:
    """Start a workflow with a different name in each attempt."""
    effect("start")
    gate("ship")
    try:
        return str(ctx.named(f"attempt {ctx.attempt}").start(parcel.call(ctx.attempt)).id)
    except TaskStopped:
        effect("told")
        raise


@app.task(on_crash="retry")
def wait_beside(ctx: Context) -> None:
    ctx.start(held.call())
    ctx.wait_event("never")


@app.task(on_crash="retry")
async def ship_async(ctx: Context, number: int) -> str:
    effect("start")
    started = await ctx.astart(parcel.call(number))
    effect("started")
    await async_gate("ship")
    return str(started.id)


@app.task(on_crash="retry")
def ship_thread(ctx: Context, number: int) -> str:
    return _ship(ctx, number)


@app.task(run_in="process", on_crash="retry")
def ship_process(ctx: Context, number: int) -> str:
    return _ship(ctx, number)


def _ship(ctx: Context, number: int) -> str:
    effect("start")
    started = ctx.start(parcel.call(number))
    effect("started")
    gate("ship")
    return str(started.id)
