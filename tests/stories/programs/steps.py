"""Tasks that work in steps, and tasks that write rows; they extend the sample tasks."""

from __future__ import annotations

import asyncio
import os

import psycopg
from sample_tasks import app, async_gate, effect, gate

from everbeat import Context

LAST = 10
DEADLY = 7


@app.task(run_in="process", on_crash="retry")
def steps_in_process(ctx: Context, gate_name: str) -> str:
    effect("start")
    for step in ctx.resume("step", range(1, LAST + 1)):
        effect(f"step {step}")
        if step == DEADLY and ctx.attempt == 1:
            gate(gate_name)
    return "done"


@app.task(on_crash="retry")
def steps_in_thread(ctx: Context, gate_name: str) -> str:
    effect("start")
    for step in ctx.resume("step", range(1, LAST + 1)):
        effect(f"step {step}")
        if step == DEADLY and ctx.attempt == 1:
            gate(gate_name)
    return "done"


@app.task(on_crash="retry")
async def steps_on_the_loop(ctx: Context, gate_name: str) -> str:
    effect("start")
    async for step in ctx.aresume("step", range(1, LAST + 1)):
        effect(f"step {step}")
        if step == DEADLY and ctx.attempt == 1:
            await async_gate(gate_name)
    return "done"


def insert() -> str:
    return f'insert into "{os.environ["STORY_SCHEMA"]}".orders (attempt) values (%s)'


@app.task(run_in="process", on_crash="retry")
def order_in_process(ctx: Context, gate_name: str) -> str:
    effect("start")
    with psycopg.connect(os.environ["STORY_URL"]) as connection, ctx.commit(connection) as completion:
        connection.execute(insert(), [ctx.attempt])
        effect("written")
        gate(gate_name)
        completion.result = f"order of attempt {ctx.attempt}"
    effect("committed")
    return "not this"


@app.task(on_crash="retry")
def order_in_thread(ctx: Context, gate_name: str) -> str:
    effect("start")
    with psycopg.connect(os.environ["STORY_URL"]) as connection, ctx.commit(connection) as completion:
        connection.execute(insert(), [ctx.attempt])
        effect("written")
        gate(gate_name)
        completion.result = f"order of attempt {ctx.attempt}"
    effect("committed")
    return "not this"


@app.task(on_crash="retry")
async def order_on_the_loop(ctx: Context, gate_name: str) -> str:
    effect("start")
    try:
        async with (
            await psycopg.AsyncConnection.connect(os.environ["STORY_URL"]) as connection,
            ctx.commit(connection) as completion,
        ):
            await connection.execute(insert(), [ctx.attempt])
            effect("written")
            await async_gate(gate_name)
            completion.result = f"order of attempt {ctx.attempt}"
    except (asyncio.CancelledError, psycopg.Error):
        effect("told")
        raise
    effect("committed")
    return "not this"
