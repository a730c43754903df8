from __future__ import annotations

import asyncio
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from everbeat.runtime.events import LoopBlocked, LoopFreed
from everbeat.runtime.main_loop import LoopWatch
from tests.runtime.programs.start import environment

Reports = queue.Queue[LoopBlocked | LoopFreed]


async def block_in_python(seconds: float) -> None:
    time.sleep(seconds)  # blocks the event loop while other threads run


async def block_with_the_gil_held(seconds: float) -> None:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


async def run_with_the_gil_held(make: Callable[[], object], **options: object) -> Reports:
    """Run the block up to three times, because a busy machine can delay the wakeups by which the watch detects the GIL."""
    for _ in range(3):
        reports = await run_blocked(make(), **options)
        if not reports.empty():
            break
    return reports


async def run_blocked(coroutine: object, **options: object) -> Reports:
    reports: Reports = queue.Queue()
    watch = LoopWatch(asyncio.get_running_loop(), threshold_s=0.4, emit=reports.put, **options)  # type: ignore[arg-type]
    watch.start()
    await asyncio.sleep(0.6)  # lets the watch run its first checks before the block begins
    assert asyncio.iscoroutine(coroutine)
    await asyncio.create_task(coroutine, name="report-builder")
    await asyncio.sleep(0.6)  # lets the watch run two more checks, which report the end
    watch.stop()
    return reports


async def test_the_loop_watch_reports_blocking_code_once_with_its_stack() -> None:  # D4
    reports = await run_blocked(block_in_python(1.5))
    blocked, freed = reports.get_nowait(), reports.get_nowait()
    assert reports.empty()
    assert isinstance(blocked, LoopBlocked)
    assert isinstance(freed, LoopFreed)
    assert blocked.names == freed.names == ("report-builder",)
    assert "block_in_python" in blocked.stack
    assert "time.sleep(seconds)" in blocked.stack  # the line that blocks
    assert not blocked.interpreter_held
    assert 0.4 <= blocked.seconds < 1.4
    assert 1.2 <= freed.seconds < 2.5


async def test_the_loop_watch_reports_code_that_held_the_gil_when_it_releases_it() -> None:  # D4
    reports = await run_with_the_gil_held(lambda: block_with_the_gil_held(1.5))
    blocked, freed = reports.get_nowait(), reports.get_nowait()
    assert reports.empty()
    assert isinstance(blocked, LoopBlocked)
    assert isinstance(freed, LoopFreed)
    assert blocked.names == ("report-builder",)
    assert "block_with_the_gil_held" in blocked.stack
    assert blocked.interpreter_held
    assert blocked.seconds == pytest.approx(1.5, abs=0.6)


async def test_the_loop_watch_reports_a_thread_that_held_the_gil_and_not_its_waiter() -> None:  # D4
    async def innocent() -> None:
        await asyncio.to_thread(ctypes.PyDLL(None).usleep, 1_500_000)

    reports = await run_with_the_gil_held(
        innocent, in_threads=lambda: ("holder 7",), is_code=lambda task: task.get_name() == "guilty"
    )
    blocked = reports.get_nowait()
    assert isinstance(blocked, LoopBlocked)
    assert blocked.interpreter_held
    assert blocked.names == ("holder 7",)


async def test_the_code_in_threads_is_reported_if_the_loop_waits_in_code_of_everbeat() -> None:  # D4
    reports = await run_blocked(
        block_in_python(1.5), in_threads=lambda: ("hash_files",), is_code=lambda task: False
    )
    blocked = reports.get_nowait()
    assert isinstance(blocked, LoopBlocked)
    assert blocked.names == ("hash_files",)
    assert blocked.interpreter_held


async def test_the_loop_watch_reports_a_block_even_if_naming_the_task_fails() -> None:
    def describe(task: asyncio.Task[object]) -> str:
        return f"task of {task.get_name()}"

    def fail(task: asyncio.Task[object]) -> str:
        raise RuntimeError("no name")

    described = await run_blocked(block_in_python(1.0), describe=describe)
    assert described.get_nowait().names == ("task of report-builder",)
    failed = await run_blocked(block_in_python(1.0), describe=fail)
    assert failed.get_nowait().names == ("report-builder",)


async def test_a_busy_event_loop_that_keeps_turning_is_not_blocked() -> None:
    reports: Reports = queue.Queue()
    watch = LoopWatch(asyncio.get_running_loop(), threshold_s=0.4, emit=reports.put)
    watch.start()
    end = time.monotonic() + 1.2
    while time.monotonic() < end:
        time.sleep(0.01)  # short blocks, as in ordinary code
        await asyncio.sleep(0)  # one iteration of the loop between them
    assert 0 <= watch.lag_s() < 0.4
    watch.stop()
    assert reports.empty()


async def test_the_measured_lag_grows_while_the_event_loop_is_blocked() -> None:
    seen: list[float] = []
    watch = LoopWatch(asyncio.get_running_loop(), threshold_s=5.0, emit=lambda event: None)
    watch.start()
    await asyncio.sleep(0.1)  # lets the watch begin; its period is 1.25 s here

    def sample() -> None:
        seen.append(watch.lag_s())

    timer = threading.Timer(2.0, sample)
    timer.start()
    time.sleep(2.2)  # blocks the event loop
    watch.stop()
    assert seen[0] > 0.5


def test_the_loop_watch_ends_with_its_event_loop() -> None:
    loop = asyncio.new_event_loop()
    watch = LoopWatch(loop, threshold_s=0.4, emit=lambda event: None)
    watch.start()
    loop.run_until_complete(asyncio.sleep(0.4))  # long enough for one check of the watch
    time.sleep(0.8)  # a stopped loop is not a blocked one
    loop.close()
    watches = [thread for thread in threading.enumerate() if thread.name == "everbeat-loop-watch"]
    for thread in watches:
        thread.join(5)
    assert not any(thread.is_alive() for thread in watches)


@pytest.mark.parametrize("doing", ["idle", "busy"])
def test_the_loop_watch_reports_no_block_after_the_process_was_frozen(doing: str) -> None:
    program = """
import asyncio, sys, threading, time
from everbeat.runtime.main_loop import LoopWatch

async def main():
    loop = asyncio.get_running_loop()
    watch = LoopWatch(loop, threshold_s=0.4, emit=lambda event: print(event, flush=True))
    watch.start()
    asked_to_end = asyncio.Event()
    threading.Thread(target=lambda: (input(), loop.call_soon_threadsafe(asked_to_end.set)), daemon=True).start()
    await asyncio.sleep(0.5)  # let the watch begin
    print("ready", flush=True)
    if sys.argv[1] == "idle":
        await asked_to_end.wait()
    while not asked_to_end.is_set():
        time.sleep(0.05)  # a short block, as ordinary work has them
        await asyncio.sleep(0)  # one iteration of the loop between them
    await asyncio.sleep(0.6)  # two more looks of the watch, which would tell
    print("done", flush=True)

asyncio.run(main())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.kill(child.pid, signal.SIGSTOP)
    time.sleep(1.5)  # the freeze is longer than the threshold
    os.kill(child.pid, signal.SIGCONT)
    rest, _ = child.communicate("go\n", timeout=20)
    assert rest == "done\n"
