"""The user's program of the stories: an app whose tasks record effects in an append-only file outside the database."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from everbeat import WORKER_CRASHED, App, Context, NatsConfig, RecoveryConfig, RetryPolicy, TaskError
from everbeat.config import WorkerConfig
from everbeat.errors import TASK_STALLED

app = App(
    os.environ["STORY_URL"],
    schema=os.environ["STORY_SCHEMA"],
    recovery=RecoveryConfig(**json.loads(os.environ.get("STORY_RECOVERY", "{}"))),
    worker=WorkerConfig(**json.loads(os.environ.get("STORY_WORKER", "{}"))),
    wake=NatsConfig(**json.loads(os.environ["STORY_WAKE"])) if "STORY_WAKE" in os.environ else None,
)

AGAIN = RetryPolicy(max_retries=3, intervals=[1], jitter=0, auto_retry_for=[WORKER_CRASHED])


def effect(step: str, **more: Any) -> None:
    """Append one line; a single write to a file opened for appending is atomic."""
    context = Context.current()
    line = {
        "task": str(context.task_id), "name": context.name, "attempt": context.attempt, "fence": context.fence,
        "step": step, "pid": os.getpid(), "at": time.time(), **more,
    }  # fmt: skip
    file = os.open(os.environ["STORY_EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def gate(name: str) -> None:
    """Wait until the story opens the gate by creating a file."""
    path = Path(os.environ["STORY_GATES"]) / name
    while not path.exists():
        time.sleep(0.01)  # a file also reaches the successor of a killed worker


async def async_gate(name: str) -> None:
    path = Path(os.environ["STORY_GATES"]) / name
    while not path.exists():
        await asyncio.sleep(0.01)


if "task_process" in sys.orig_argv:
    while (Path(os.environ["STORY_GATES"]) / "no processes").exists():
        time.sleep(0.01)  # the import of a program can take long


@app.task
async def quick(n: int = 0) -> int:
    effect("start")
    return n


@app.task(run_in="process")
def quick_in_process(n: int = 0) -> int:
    effect("start")
    return n


@app.task
async def weigh(parcel: str) -> int:
    effect("start")
    return len(parcel)


@app.task(on_crash="retry", max_losses=100)
async def swift(n: int) -> int:
    return n


@app.task
async def nap(seconds: float) -> None:
    effect("start")
    await asyncio.sleep(seconds)
    effect("end")


@app.task
def nap_in_thread(seconds: float) -> None:
    effect("start")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.02)
    effect("end")


@app.task(run_in="process")
def nap_in_process(seconds: float) -> None:
    effect("start")
    time.sleep(seconds)
    effect("end")


async def held(gate_name: str) -> None:
    effect("start")
    try:
        await async_gate(gate_name)
    except asyncio.CancelledError:
        effect("told")
        raise
    effect("end")


@app.task
async def wait_for(gate_name: str) -> str:
    await held(gate_name)
    return "done"


@app.task(retry=AGAIN)
async def wait_for_again(gate_name: str) -> str:
    await held(gate_name)
    return "done"


@app.task(on_crash="retry")
async def wait_for_on_crash(gate_name: str) -> str:
    await held(gate_name)
    return "done"


@app.task(
    stall_timeout="2s",
    retry=RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=[TASK_STALLED]),
)
async def deadlocks_once(ctx: Context) -> str:
    effect("start")
    ctx.progress("locking", 0.5, "for ever")
    if ctx.attempt == 1:
        await asyncio.Event().wait()
    return "done"


@app.task(on_crash="retry")
def wait_in_thread_on_crash(gate_name: str) -> str:
    effect("start")
    path = Path(os.environ["STORY_GATES"]) / gate_name
    while not path.exists():
        if Context.current().cancelled:
            effect("told")
            Context.current().check_cancelled()
        time.sleep(0.01)  # sync code can only poll
    return "done"


@app.task(run_in="process", on_crash="retry")
def wait_in_process_on_crash(gate_name: str) -> str:
    effect("start")
    gate(gate_name)
    effect("end")
    return "done"


@app.task(retry=RetryPolicy(max_retries=1, intervals=[1], jitter=0, auto_retry_for=[WORKER_CRASHED]))
async def crash_twice(gate_name: str) -> None:
    await held(gate_name)


@app.task(run_in="process", on_crash="retry", max_crashes=3)
def poison(how: str) -> None:
    effect("start")
    if how == "exit":
        os._exit(139)
    os.kill(os.getpid(), signal.SIGSEGV)


@app.task
async def block_the_loop(seconds: float) -> None:
    effect("start")
    time.sleep(seconds)  # the mistake under test
    effect("end")


@app.task
def hold_the_gil(seconds: float) -> None:
    """Run one C call that never releases the GIL: a regular expression with catastrophic backtracking."""
    effect("start")
    end = time.monotonic() + seconds
    size = 22
    while time.monotonic() < end:
        began = time.monotonic()
        re.match(r"(a+)+$", "a" * size + "b")
        took = time.monotonic() - began
        if took < (end - time.monotonic()) / 2:
            size += 1
    effect("end")


@app.task(timeout="1s")
async def too_slow() -> None:
    effect("start")
    await asyncio.sleep(60)


@app.task(run_in="process", timeout="1s")
def too_slow_in_process() -> None:
    effect("start")
    time.sleep(60)


@app.task(timeout="1s")
def too_slow_in_thread(gate_name: str) -> None:
    effect("start")
    while not Context.current().cancelled:
        time.sleep(0.01)  # sync code can only poll
    effect("told")
    gate(gate_name)
    effect("end")


@app.task(retry=RetryPolicy(max_retries=2, intervals=[1, 2], jitter=0, auto_retry_for=["FLAKY", ValueError]))
def flaky(fails: int, code: str) -> int:
    effect("start")
    attempt = Context.current().attempt
    if attempt <= fails:
        if code == "ValueError":
            raise ValueError("not this time")
        raise TaskError(code, "not this time", {"attempt": attempt})
    return attempt


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("even this fails")


@app.task
def raise_something(what: str) -> None:
    match what:
        case "plain":
            raise RuntimeError("went wrong")
        case "task error":
            raise TaskError("NO_STOCK", "sold out", {"item": 7})
        case "unprintable":
            raise Unprintable
        case "nul":
            raise RuntimeError("a\0b")
        case "huge":
            raise RuntimeError("x" * 200_000_000)
        case "exit":
            raise SystemExit(3)
        case "keyboard":
            raise KeyboardInterrupt
        case _:
            raise AssertionError(what)


@app.task
def unserialisable() -> Any:
    effect("start")
    return object()


@app.task
async def large(size: int) -> str:
    effect("start")
    return os.urandom(size // 2).hex()


@app.task
async def large_when_open(gate_name: str, size: int) -> str:
    effect("start")
    await async_gate(gate_name)
    return os.urandom(size // 2).hex()


def die(how: str) -> None:
    if how == "exit":
        os._exit(139)
    os.kill(os.getpid(), signal.SIGSEGV)


@app.task(on_crash="retry", max_crashes=2)
async def poison_on_the_loop(gate_name: str, how: str) -> None:
    effect("start")
    await async_gate(gate_name)
    die(how)


@app.task(on_crash="retry", max_crashes=2)
def poison_in_thread(gate_name: str, how: str) -> None:
    effect("start")
    gate(gate_name)
    die(how)
