"""An app with resources and middleware, which record what they do in the file of effects."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from pathlib import Path

from everbeat import App, Context, RecoveryConfig
from everbeat.config import WorkerConfig
from everbeat.domain.task.policy import OnCrash

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    worker=WorkerConfig(**json.loads(os.environ["STORY_WORKER"])),
    recovery=RecoveryConfig(**json.loads(os.environ["STORY_RECOVERY"])),
)
GATES = Path(os.environ["STORY_GATES"])
AGAIN: OnCrash = "retry"
loops: list[asyncio.AbstractEventLoop] = []
tenant: ContextVar[str] = ContextVar("tenant", default="none")


def record(step: str, **more: object) -> None:
    line = {"step": step, "pid": os.getpid(), "task": "", **more}
    context = Context.current_or_none()
    if context is not None:
        line |= {"task": str(context.task_id), "attempt": context.attempt}
    file = os.open(os.environ["STORY_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


@app.resource
def outer() -> Iterator[str]:
    record("opened outer")
    yield f"outer of {os.getpid()}"
    record("closed outer")


@app.resource
async def inner() -> AsyncIterator[str]:
    if (GATES / "broken").exists():
        raise ConnectionError("no answer from cache.example.org")
    async with asyncio.TaskGroup():  # it must be left in the task that entered it
        record("opened inner", outer=outer.value)
        loops.append(asyncio.get_running_loop())
        yield f"inner of {os.getpid()}"
    record("closed inner", outer=outer.value)
    if (GATES / "stuck").exists():
        await asyncio.Event().wait()


@app.around_run
def surround(ctx: Context) -> Iterator[None]:
    tenant.set(f"tenant of {ctx.name}")
    record("before", thread=threading.get_ident())
    try:
        yield
    except Exception as error:
        record("seen", error=type(error).__name__)
        raise
    finally:
        record("finally", thread=threading.get_ident())


@app.around_run
async def surround_async(ctx: Context) -> AsyncIterator[None]:
    await asyncio.sleep(0)
    record("before async")
    yield
    record("after async")


def ran() -> str:
    logging.getLogger("shop.orders").warning("packing the order")
    record("code", thread=threading.get_ident(), tenant=tenant.get(), values=[outer.value, inner.value])
    return tenant.get()


@app.task
async def on_loop() -> str:
    record("loop", is_that_of_the_resource=asyncio.get_running_loop() is loops[0])
    return ran()


@app.task
def in_thread() -> str:
    return ran()


@app.task(run_in="process")
def in_process() -> str:
    return ran()


@app.task(run_in="process")
async def async_in_process() -> str:
    record("loop", is_that_of_the_resource=asyncio.get_running_loop() is loops[0])
    await asyncio.sleep(0)
    return ran()


@app.task
async def fails() -> None:
    raise ValueError("no such order")


@app.task(timeout="1s")
async def too_long() -> None:
    await asyncio.sleep(60)


@app.task(timeout="1s", run_in="process")
def too_long_in_process() -> None:
    time.sleep(60)  # the worker stops it


@app.task(on_crash=AGAIN)
async def loses_its_lease() -> None:
    record("code")
    if Context.current().attempt == 1:
        await asyncio.sleep(60)


@app.task
async def sleeps(ctx: Context) -> int:
    await ctx.asleep("6s")
    return 7
