"""Misbehaving task functions, which extend the sample tasks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from sample_tasks import AGAIN, app, effect, gate

from everbeat import Context, TaskStopped


@app.task
async def rude_on_the_loop(how: str) -> str:
    effect("start")
    match how:
        case "os._exit(0)":
            os._exit(0)
        case "sys.exit":
            sys.exit(3)
        case "stop the loop":
            asyncio.get_running_loop().stop()
        case "cancel everything":
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(60)
        case "own signal handler":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        case "stray tasks":
            for _ in range(100):
                asyncio.get_running_loop().create_task(_stray())
        case _:
            raise AssertionError(how)
    return how


async def _stray() -> None:
    await asyncio.sleep(0)
    raise SystemExit(4)


class BadEnd:
    def __del__(self) -> None:
        raise RuntimeError("even in the grave")


@app.task
def rude_in_a_thread(how: str) -> str:
    effect("start")
    match how:
        case "os._exit(0)":
            os._exit(0)
        case "os._exit(1)":
            os._exit(1)
        case "close all descriptors":
            os.closerange(3, 4096)
        case "fork that lives on":
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
        case "fork, then die":
            if os.fork() == 0:
                time.sleep(20)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case "child that lives on, then die":
            subprocess.Popen(["sleep", "20"], close_fds=False)
            os.kill(os.getpid(), signal.SIGKILL)
        case "close stdout":
            sys.stdout.close()
            sys.stderr.close()
            os.close(1)
            os.close(2)
        case "raise in __del__":
            BadEnd()
        case "recursion":
            return rude_in_a_thread.function(how)  # type: ignore[attr-defined,no-any-return]
        case "stray threads":
            for _ in range(50):
                threading.Thread(target=time.sleep, args=(3600,)).start()
        case "abort":
            os.abort()
        case _:
            raise AssertionError(how)
    return how


@app.task(run_in="process")
def rude_in_a_process(how: str) -> str:
    effect("start")
    match how:
        case "os._exit(0)":
            os._exit(0)
        case "close all descriptors":
            os.closerange(3, 4096)
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "fork that lives on":
            if os.fork() == 0:
                os.setsid()
                time.sleep(20)
                os._exit(0)
        case "exit in a thread":
            threading.Thread(target=os._exit, args=(5,)).start()
            time.sleep(60)
        case "own handlers":
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
        case _:
            raise AssertionError(how)
    return how


@app.task
def endless_thread() -> None:
    effect("start")
    while True:
        time.sleep(3600)


@app.task
async def deaf_coroutine() -> None:
    effect("start")
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


@app.task(run_in="process", timeout="1h")
def deaf_process() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    effect("start")
    while True:
        try:
            time.sleep(3600)
        except TaskStopped:
            effect("told")


@app.task(run_in="process", retry=AGAIN)
def fenced_process(gate_name: str) -> str:
    """Record regularly that the code is alive."""
    effect("start")
    while not (gate_open(gate_name) or Context.current().attempt > 1):
        effect("alive")
        time.sleep(0.02)
    return "done"


@app.task(retry=AGAIN)
async def fenced_coroutine(gate_name: str) -> str:
    effect("start")
    try:
        while not (gate_open(gate_name) or Context.current().attempt > 1):
            effect("alive")
            await asyncio.sleep(0.02)
    finally:
        effect("alive")
    return "done"


def gate_open(name: str) -> bool:
    return (Path(os.environ["STORY_GATES"]) / name).exists()


@app.task
def large_result(megabytes: int) -> str:
    effect("start")
    return "x" * (megabytes * 1_000_000)


@app.task(run_in="process")
def large_result_of_a_process(megabytes: int) -> str:
    effect("start")
    return "x" * (megabytes * 1_000_000)


@app.task
def sends_in_a_thread(n: int) -> int:
    effect("start")
    return quickly.send(n).result(timeout=20)


@app.task
async def sends_on_the_loop(n: int) -> int:
    effect("start")
    handle = await quickly.asend(n)
    return await handle.aresult(timeout=20)


@app.task(run_in="process")
def sends_in_a_process(n: int) -> int:
    effect("start")
    return quickly.send(n).result(timeout=20)


@app.task
async def quickly(n: int) -> int:
    effect("start")
    return n


@app.task
def waits_in_a_thread(gate_name: str) -> str:
    effect("start")
    gate(gate_name)
    return "done"


@app.task
def sleepy(seconds: float) -> str:
    effect("start")
    time.sleep(seconds)
    return "done"


@app.task(run_in="process")
def sleepy_process(seconds: float) -> str:
    effect("start")
    time.sleep(seconds)
    return "done"


@app.task(on_crash="retry", max_losses=100, max_crashes=100)
async def crash_proof(seconds: float) -> str:
    effect("start")
    await asyncio.sleep(seconds)
    return "done"


@app.task(timeout=0.3)
def kill_the_process_later(gate_name: str) -> None:
    """A timed-out thread cannot be stopped: it is abandoned and continues."""
    effect("start")
    gate(gate_name)
    os.kill(os.getpid(), signal.SIGSEGV)
