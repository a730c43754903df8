"""An app whose tasks fork, or start, processes that outlive the worker."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
import time

from sample_tasks import app, async_gate, effect, gate

from everbeat import Context, RetryPolicy

AGAIN = RetryPolicy(max_retries=3, intervals=[1], jitter=0, auto_retry_for=["WORKER_CRASHED"])
_SLEEP_S = 300


def _sleep() -> None:
    time.sleep(_SLEEP_S)  # it lives until the story kills it


def leave_behind(how: str) -> None:
    """Start a process that keeps sleeping, and record its pid."""
    match how:
        case "fork":
            pid = os.fork()
            if pid == 0:
                _sleep()
                os._exit(0)
        case "multiprocessing":
            process = multiprocessing.get_context("fork").Process(target=_sleep)
            process.start()
            assert process.pid is not None
            pid = process.pid
        case _:
            pid = subprocess.Popen(
                [sys.executable, "-c", f"import time; time.sleep({_SLEEP_S})"], close_fds=False
            ).pid
    effect("left", left=pid, how=how)


@app.task(retry=AGAIN)
async def fork_on_the_loop(how: str) -> None:
    leave_behind(how)
    await async_gate("go")


@app.task(retry=AGAIN)
def fork_in_a_thread(how: str) -> None:
    leave_behind(how)
    gate("go")


@app.task(retry=AGAIN, run_in="process")
def fork_in_a_process(how: str) -> None:
    leave_behind(how)
    gate("go")


@app.task(retry=AGAIN, run_in="process")
async def fork_on_the_loop_of_a_process(how: str) -> None:
    leave_behind(how)
    await async_gate("go")


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def child_of_sync_code(how: str) -> str:
    """Fork a child that does not end by itself; both the parent and the child return."""
    pid = os.fork()
    if pid == 0:
        match how:
            case "exits":
                sys.exit(3)
            case "raises":
                raise ValueError("in the child")
            case "asks":
                Context.current().checkpoint("in the child")
    return f"{how}: {_reap(pid) if pid else 'child'}"


@app.task
def child_in_a_thread(how: str) -> str:
    return child_of_sync_code(how)


@app.task(run_in="process")
def child_in_a_process(how: str) -> str:
    return child_of_sync_code(how)


@app.task
async def child_on_the_loop(how: str) -> str:
    if how != "awaits":
        return child_of_sync_code(how)
    pid = os.fork()
    if pid == 0:
        await asyncio.sleep(0)
        effect("the child went on")
    return f"{how}: {_reap(pid) if pid else 'child'}"


@app.task
def terminate_a_child() -> int | None:
    process = multiprocessing.get_context("fork").Process(target=_sleep)
    process.start()
    process.terminate()
    process.join()
    return process.exitcode
