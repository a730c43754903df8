"""Task functions for the tests of the worker, in all three modes; `journal` and the gates are of this process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from everbeat.domain.codec import CallCodec
from everbeat.domain.context import Context
from everbeat.domain.definition import TaskDefinition
from everbeat.domain.outcome import TaskError
from everbeat.domain.policy import TaskOptions
from everbeat.domain.retry import RetryPolicy

DEFINITIONS: dict[str, TaskDefinition] = {}
APP_CODES: dict[type[BaseException], str] = {KeyError: "KEY_MISSING", ZeroDivisionError: "BY_THE_APP"}


def task(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        name = options.get("name", function.__name__)
        DEFINITIONS[name] = TaskDefinition(
            name=name,
            function=function,
            is_async=asyncio.iscoroutinefunction(function),
            codec=CallCodec.from_function(function, task_name=name),
            options=TaskOptions(**options),
            where=f"{__file__}:1",
        )
        return function

    return register


class Gate:
    """Holds code until a test opens it; tells when code has arrived and when it was let go or stopped."""

    def __init__(self) -> None:
        self.journal: list[Any] = []
        self.opened = threading.Event()

    def reset(self) -> None:
        self.journal.clear()
        self.opened.clear()


gate = Gate()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@task()
async def double(x: int) -> int:
    return 2 * x


@task()
async def echo(text: str) -> str:
    return text


@task()
async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)  # what the task is for
    return "rested"


@task()
async def note(word: str) -> None:
    gate.journal.append(word)


@task(
    retry=RetryPolicy(max_retries=2, intervals=["1s", "3s"], jitter=0, auto_retry_for=["SMTP_DOWN", KeyError])
)
async def retried(kind: str) -> NoReturn:
    _raise(kind)


@task(
    retry=RetryPolicy(
        max_retries=3,
        backoff_strategy="exponential",
        intervals=["2s"],
        jitter=0,
        auto_retry_for=["TASK_TIMEOUT"],
    ),
    timeout="100ms",
)
async def retried_slow() -> None:
    await asyncio.sleep(20)  # what the task is for


@task(
    retry=RetryPolicy(max_retries=1, intervals=["1s"], jitter=0, auto_retry_for=["SMTP_DOWN"]),
    run_in="process",
)
def retried_process(kind: str) -> NoReturn:
    _raise(kind)


@task()
async def linger(word: str) -> str:
    gate.journal.append(("begun", word))
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        gate.journal.append(("cancelled", word))
        raise
    return word


@task()
async def stubborn(seconds: float) -> str:
    """Swallows every cancellation for a while."""
    gate.journal.append("begun")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            await asyncio.sleep(0.05)  # what the task is for
        except asyncio.CancelledError:
            gate.journal.append("swallowed")
    gate.journal.append("ended")
    return "ended after all"


@task()
def wait_for_gate(ctx: Context, word: str) -> str:
    gate.journal.append(("begun", word))
    while not gate.opened.wait(0.02):
        if ctx.cancelled:
            gate.journal.append(("told", word, ctx.backend.stop_reason()))
            gate.opened.wait(20)
    gate.journal.append(("ended", word))
    return word


@task()
def check_often(ctx: Context) -> None:
    gate.journal.append("begun")
    while True:
        ctx.check_cancelled()
        time.sleep(0.01)  # what the task is for


@task()
async def raise_kind(kind: str) -> NoReturn:
    _raise(kind)


@task()
def raise_in_thread(kind: str) -> NoReturn:
    _raise(kind)


@task(run_in="process")
def raise_in_process(kind: str) -> NoReturn:
    _raise(kind)


@task(exception_codes={ValueError: "BAD_VALUE"})
async def raise_coded(kind: str) -> NoReturn:
    _raise(kind)


def _raise(kind: str) -> NoReturn:
    match kind:
        case "task error":
            raise TaskError("SMTP_DOWN", "refused", {"port": 25})
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "generator exit":
            raise GeneratorExit
        case "stop iteration":
            raise StopIteration
        case "cancelled":
            raise asyncio.CancelledError
        case "unprintable":
            raise Unprintable
        case "nul":
            raise ValueError("a\x00b")
        case "huge":
            raise ValueError("x" * 20_000_000)
        case "key":
            raise KeyError("k")
        case "zero":
            raise ZeroDivisionError
        case _:
            raise ValueError(kind)


@task()
async def stray_exit() -> str:
    async def leave() -> NoReturn:
        sys.exit(4)

    stray = asyncio.get_running_loop().create_task(leave())
    await asyncio.sleep(0.01)  # lets the stray task run
    return f"still here: {stray.done()}"


@task()
async def wrong_result() -> int:
    return "no number"  # type: ignore[return-value]


@task()
async def deep_result(depth: int) -> Any:
    nested: Any = []
    for _ in range(depth):
        nested = [nested]
    return nested


@task()
async def report(steps: int) -> None:
    for step in range(steps):
        Context.current().progress("step", step / steps, f"step {step}")
        await asyncio.sleep(0)  # what the task is for


@task()
async def block_loop(seconds: float) -> None:
    time.sleep(seconds)  # what the task is for


@task()
def thread_nap(seconds: float) -> int:
    time.sleep(seconds)  # what the task is for
    return threading.get_ident()


@task(run_in="process")
def process_pid(ctx: Context) -> list[int]:
    return [os.getpid(), ctx.attempt]


@task(run_in="process")
async def process_async(x: int) -> list[Any]:
    await asyncio.sleep(0.01)  # what the task is for
    return [os.getpid(), x, str(Context.current().task_id)]


@task(run_in="process")
def process_linger(folder: str) -> None:
    """Leaves a file with its pid, and another one when it is interrupted."""
    Path(folder, "pid").write_text(str(os.getpid()))
    try:
        time.sleep(60)  # what the task is for
    finally:
        Path(folder, "interrupted").write_text("yes")


@task(run_in="process")
async def process_linger_async(folder: str) -> None:
    Path(folder, "pid").write_text(str(os.getpid()))
    try:
        await asyncio.sleep(60)  # what the task is for
    except asyncio.CancelledError:
        Path(folder, "interrupted").write_text("yes")
        raise


@task(run_in="process")
def process_deaf(folder: str) -> None:
    """Holds the GIL in C, so that nothing but SIGKILL ends it."""
    Path(folder, "pid").write_text(str(os.getpid()))
    ctypes.PyDLL(None).sleep(60)


@task(run_in="process")
def process_die(how: str) -> None:
    match how:
        case "exit":
            os._exit(139)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case _:
            os.kill(os.getpid(), signal.SIGKILL)


@task(run_in="process")
def process_report() -> None:
    for step in range(2_000):
        Context.current().progress("step", step / 2_000, f"step {step}")
