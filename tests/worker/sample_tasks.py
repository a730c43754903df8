"""Task functions for the tests of the worker, in all three modes; `journal` and the gates belong to this process."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from everbeat.domain.task.context import Context
from everbeat.domain.task.definition import CallCodec, TaskDefinition
from everbeat.domain.task.policy import TaskOptions
from everbeat.domain.task.retry import RetryPolicy
from everbeat.errors import TaskError

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
    """Blocks code until a test opens it; records when code arrived, was released and was stopped."""

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


class Exits(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class IsCancelled(Exception):
    def __str__(self) -> str:
        raise asyncio.CancelledError


class BreaksIsinstance(Exception):
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise GeneratorExit


@task()
async def double(x: int) -> int:
    return 2 * x


@task()
async def echo(text: str) -> str:
    return text


@task()
async def fill(length: int) -> str:
    return "y" * length


@task()
async def nap(seconds: float) -> str:
    await asyncio.sleep(seconds)  # what the task is for
    return "rested"


@task()
async def note(word: str) -> None:
    gate.journal.append(word)


class Pool:
    """A pool as in many programs: 15 connections and a wait limit, with a tenth of the times of SQLAlchemy's pool."""

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(15)


POOLS: dict[asyncio.AbstractEventLoop, Pool] = {}


@task()
async def query(seconds: float) -> None:
    """Hold a connection of the pool for this time."""
    pool = POOLS.setdefault(asyncio.get_running_loop(), Pool())
    async with asyncio.timeout(3.0):
        await pool.free.acquire()
    try:
        await asyncio.sleep(seconds)  # what the task is for
    finally:
        pool.free.release()


@task()
def thread_note(word: str) -> None:
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
    """Catch every cancellation for a while."""
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
            gate.journal.append(("told", word, ctx._backend.stop_reason()))
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
        case "exits when printed":
            raise Exits
        case "is cancelled when printed":
            raise BaseExceptionGroup("a group", [IsCancelled(), Exits(), ZeroDivisionError()])
        case "breaks isinstance":
            raise BreaksIsinstance
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
async def chatter(seconds: float) -> str:
    """Report progress all the time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        Context.current().progress("chatter")
        await asyncio.sleep(0.1)  # what the task is for
    return "said"


@task()
def chatter_in_thread(ctx: Context, seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ctx.progress("chatter")
        time.sleep(0.1)  # what the task is for
    return "said"


@task(run_in="process")
def chatter_in_process(ctx: Context, seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ctx.progress("chatter")
        time.sleep(0.1)  # what the task is for
    return "said"


@task()
async def keep_a_checkpoint(ctx: Context) -> str:
    await _wait_for_gate()
    await ctx.acheckpoint("half")
    return "stored"


@task()
async def fall_silent(ctx: Context, word: str) -> str:
    ctx.progress("upload", 0.5, word)
    await _wait_for_gate()
    return word


async def _wait_for_gate() -> None:
    while not gate.opened.is_set():
        await asyncio.sleep(0.02)  # what the task is for


@task()
async def whereabouts(seconds: float) -> int:
    """Return the pid of the worker process."""
    await asyncio.sleep(seconds)  # what the task is for
    return os.getpid()


HOARD: list[bytes] = []


@task()
def hoard(megabytes: int) -> int:
    """Leak memory."""
    HOARD.append(b"x" * (megabytes << 20))
    return os.getpid()


@task()
async def break_the_process() -> int:
    """Close every connection of this process to PostgreSQL and make it unable to open files."""
    for path in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as line:
            if ".s.PGSQL." in str(line.getpeername()):
                line.shutdown(socket.SHUT_RDWR)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    return os.getpid()


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
    """Hold the GIL in C, so that only SIGKILL ends it."""
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


@task()
async def pid_of_async(ctx: Context) -> list[int]:
    return [os.getpid(), ctx.attempt]


@task()
def pid_of_thread(ctx: Context) -> list[int]:
    return [os.getpid(), ctx.attempt]


@task(on_crash="retry", max_crashes=2)
async def die_async(how: str) -> None:
    _die(how)


@task(on_crash="retry", max_crashes=2)
def die_in_thread(how: str) -> None:
    _die(how)


def _die(how: str) -> None:
    if how == "exit":
        os._exit(139)
    os.kill(os.getpid(), signal.SIGSEGV)


@task()
async def linger_async(folder: str, name: str) -> None:
    """Leaves a file with its pid, and another one when it is interrupted."""
    Path(folder, name).write_text(str(os.getpid()))
    try:
        await asyncio.sleep(60)  # what the task is for
    except asyncio.CancelledError:
        Path(folder, f"{name} interrupted").write_text("yes")
        raise


@task()
def linger_in_thread(folder: str, name: str) -> None:
    Path(folder, name).write_text(str(os.getpid()))
    try:
        time.sleep(60)  # what the task is for
    finally:
        Path(folder, f"{name} interrupted").write_text("yes")


@task()
async def report_once(ctx: Context) -> None:
    ctx.progress("half way", 0.5, "from a process of its own")


@task()
async def tick_async(ctx: Context) -> str:
    return str(ctx.tick)


@task()
def tick_in_thread(ctx: Context) -> str:
    return str(ctx.tick)


@task(run_in="process")
def tick_in_process(ctx: Context) -> str:
    return str(ctx.tick)
