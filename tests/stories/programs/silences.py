"""The user's program of the stories about stalls: code of every executor that lives and reports no progress."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path

from everbeat import App, Context, RecoveryConfig
from everbeat.config import WorkerConfig

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
    worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
    stall_timeout=os.environ.get("STORY_STALL_TIMEOUT"),
)
GATES = Path(os.environ["STORY_GATES"])


def note(word: str) -> None:
    (GATES / f"{Context.current().name}-{word}").write_text(str(os.getpid()))


@app.task(stall_timeout="2s")
async def silent_on_the_loop(ctx: Context) -> str:
    ctx.progress("open", 0.25, "three of twelve")
    try:
        await asyncio.sleep(60)
    finally:
        note("ended")
    return "late"


@app.task(stall_timeout="2s")
async def silent_and_blocking(ctx: Context) -> str:
    ctx.progress("open", 0.25, "three of twelve")
    await asyncio.sleep(0.3)  # so that its progress is written; nothing is written once the loop is blocked
    time.sleep(8)
    note("ended")
    return "late"


@app.task(stall_timeout="2s")
def silent_in_a_thread(ctx: Context) -> str:
    ctx.progress("open", 0.25, "three of twelve")
    while not ctx.cancelled:
        time.sleep(0.02)
    note("ended")
    return "late"


@app.task(stall_timeout="2s", run_in="process")
def silent_in_a_process(ctx: Context) -> str:
    ctx.progress("open", 0.25, "three of twelve")
    note("began")
    time.sleep(60)
    return "late"


@app.task(run_in="process")
def silent_without_a_limit(ctx: Context) -> str:
    time.sleep(8)
    return "in time"


DEADLOCKED = threading.Lock()


@app.task
def deadlocked(ctx: Context) -> None:
    """Wait for a lock that the same code holds, until the attempt is abandoned."""
    with DEADLOCKED:
        while not (DEADLOCKED.acquire(timeout=0.1) or ctx.cancelled):
            pass


@app.task(stall_timeout="never")
def long_and_silent() -> str:
    time.sleep(4)  # twice the limit of the app
    return "in time"
