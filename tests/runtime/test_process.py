from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everbeat.runtime import processes
from everbeat.runtime.channel import AsyncChannel, BlockingChannel, ChannelClosed
from everbeat.runtime.processes import ChildProcess, ExitReport, OutOfMemoryCounter, adopt_channel
from everbeat.testing.clock import settle
from tests.runtime.programs.messages import Message, Say
from tests.runtime.programs.start import ROOT, environment, start_child

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="watches pids by pidfd")


async def ready(child: ChildProcess) -> str:
    """Wait for the first message of the child and return its text."""
    channel = await AsyncChannel.open(child.channel_socket.dup(), messages=Message)
    async with asyncio.timeout(20):
        message = await channel.receive()
    await channel.aclose()
    assert isinstance(message, Say)
    return message.text


async def report_of(child: ChildProcess) -> processes.ExitReport:
    async with asyncio.timeout(20):
        report = await child.wait_exit()
    child.close()
    return report


def open_descriptors() -> set[str]:
    # Objects that earlier tests left must not be closed or counted between the two measurements.
    gc.collect()
    return {path.name for path in Path("/proc/self/fd").iterdir()}


@contextmanager
def watched(pid: int) -> Iterator[select.poll]:
    """Yield a poll that reports the end of `pid`; at the end kill the process if it still runs."""
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        yield poll
    finally:
        if not poll.poll(0):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


@contextmanager
def running_parent(*, thread: str, child: str) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.programs.parent", thread, child],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        pid, text = parent.stdout.readline().split()
        yield parent, int(pid), text
    finally:
        parent.kill()
        parent.communicate()


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "without pidfd"])
async def test_exit_reports_distinguish_exit_codes_crashes_and_kills(
    pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    ended, failed, crashed, killed = (
        start_child("exit", "0"),
        start_child("exit", "3"),
        start_child("segfault"),
        start_child("sleep"),
    )
    await ready(killed)
    assert killed.poll() is None
    assert killed.kill()

    assert (await report_of(ended)).is_success
    assert (await report_of(failed)).cause == "exit code 3"
    crash = await report_of(crashed)
    assert (crash.signal_number, crash.signal_name, crash.exit_code) == (signal.SIGSEGV, "SIGSEGV", None)
    assert crash.cause == "killed by SIGSEGV"
    kill = await report_of(killed)
    assert kill.cause == "killed by SIGKILL"
    assert not kill.out_of_memory
    assert kill.max_rss_bytes is not None
    assert 2**20 < kill.max_rss_bytes < 2**30


async def test_every_waiter_notices_an_exit_within_milliseconds() -> None:
    child = start_child("sleep")
    await ready(child)
    waiters = [asyncio.create_task(child.wait_exit()) for _ in range(3)]
    cancelled = asyncio.create_task(child.wait_exit())
    await settle()
    cancelled.cancel()

    killed_at = time.monotonic()
    child.kill()
    async with asyncio.timeout(5):
        reports = await asyncio.gather(*waiters)
    waited = time.monotonic() - killed_at
    child.close()
    print(f"noticed after {waited * 1000:.1f} ms")
    assert waited < 1.0
    assert {report.cause for report in reports} == {"killed by SIGKILL"}
    assert await child.wait_exit() == reports[0]


async def test_terminate_sends_sigterm_and_an_ended_child_gets_no_signal() -> None:
    child = start_child("sleep")
    await ready(child)
    assert child.terminate()
    assert (await report_of(child)).cause == "killed by SIGTERM"
    assert not child.kill()
    assert not child.terminate()


async def test_an_exit_status_reaped_by_other_code_is_not_reported_as_success() -> None:
    child = start_child("exit", "0")
    os.waitpid(child.pid, 0)
    report = await report_of(child)
    assert (report.exit_code, report.signal_number, report.is_success) == (None, None, False)
    assert "taken by other code" in report.cause


async def test_a_kill_with_a_rise_of_the_oom_counter_is_reported_as_out_of_memory(tmp_path: Path) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 9\noom 3\noom_kill 4\noom_group_kill 0\n")
    counter = OutOfMemoryCounter(events)
    first, second = (start_child("sleep", out_of_memory=counter) for _ in range(2))
    await ready(first)
    await ready(second)

    events.write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 5\noom_group_kill 0\n")
    first.kill()
    report = await report_of(first)
    second.kill()
    other = await report_of(second)
    assert report.out_of_memory
    assert "out of memory" in report.cause
    # One rise explains one death.
    assert not other.out_of_memory


@pytest.mark.parametrize(
    ("thread", "child"),
    [("main", "sleep"), ("other", "sleep-until-eof")],
    ids=["death signal", "end of file, without death signal"],
)
def test_a_child_process_ends_within_two_seconds_of_its_parents_death(thread: str, child: str) -> None:  # E5
    with running_parent(thread=thread, child=child) as (parent, pid, _), watched(pid) as end:
        assert not end.poll(0)
        killed_at = time.monotonic()
        parent.kill()
        assert end.poll(2000), "the child outlived its parent"
        print(f"gone after {(time.monotonic() - killed_at) * 1000:.1f} ms")


def test_all_descendants_of_a_process_die_with_it() -> None:  # E5
    with running_parent(thread="main", child="parent") as (root, worker_pid, text):
        assert worker_pid != int(text)
        with watched(worker_pid) as worker_end, watched(int(text)) as task_end:
            root.kill()
            assert worker_end.poll(2000), "the child outlived its parent"
            assert task_end.poll(2000), "the grandchild outlived its parent"


async def test_a_child_process_survives_the_end_of_the_thread_that_spawned_it() -> None:
    children: list[ChildProcess] = []
    spawned, may_end = threading.Event(), threading.Event()

    def spawn_and_wait() -> None:
        children.append(start_child("sleep"))
        spawned.set()
        may_end.wait(30)

    thread = threading.Thread(target=spawn_and_wait)
    thread.start()
    assert await asyncio.to_thread(spawned.wait, 20)
    await ready(children[0])
    may_end.set()
    thread.join()
    await asyncio.sleep(0.2)  # time for a wrong death signal, sent when the thread ended, to arrive
    assert children[0].poll() is None
    children[0].kill()
    assert (await report_of(children[0])).signal_name == "SIGKILL"


async def test_a_child_with_its_own_process_group_ends_together_with_its_children() -> None:
    child = start_child("stranger", own_group=True)
    channel = await AsyncChannel.open(child.channel_socket, messages=Message)
    message = await channel.receive()
    with watched(int(message.text)) as stranger_end:
        assert not stranger_end.poll(0)
        await channel.send(Say("go"))
        assert (await report_of(child)).cause == "exit code 3"
        assert stranger_end.poll(2000), "the started program outlived the child that started it"
    await channel.aclose()


async def test_grandchildren_inherit_neither_the_channel_nor_its_variables() -> None:
    child = start_child("inheritance")
    assert await ready(child) == "False []"
    assert (await report_of(child)).is_success


async def test_a_forked_copy_of_the_channel_does_not_hide_the_death_of_a_child() -> None:
    child = start_child("fork-and-die")
    channel = await AsyncChannel.open(child.channel_socket, messages=Message)
    assert (await channel.receive()).text == "ready"
    with watched(int((await channel.receive()).text)) as forked_end:
        async with asyncio.timeout(2):
            with pytest.raises(ChannelClosed):
                await channel.receive()
        assert not forked_end.poll(0)
    assert (await report_of(child)).signal_name == "SIGKILL"
    await channel.aclose()


async def test_the_stack_of_a_child_that_holds_the_gil_can_be_read(capfd: pytest.CaptureFixture[str]) -> None:
    child = start_child("hold-the-gil")
    await ready(child)
    text = ""
    async with asyncio.timeout(10):
        while "hold_the_gil" not in text:
            child.dump_stacks()
            await asyncio.sleep(0.05)  # the dump is text in a file, which sends no event
            text += capfd.readouterr().err
    assert "child.py" in text
    child.kill()
    assert (await report_of(child)).signal_name == "SIGKILL"


async def test_a_hundred_spawned_processes_leave_no_descriptor_and_no_zombie() -> None:
    before = open_descriptors()
    for _ in range(20):
        children = [processes.spawn([sys.executable, "-S", "-c", "pass"]) for _ in range(5)]
        for child in children:
            assert (await report_of(child)).is_success
            with pytest.raises(ProcessLookupError):
                os.kill(child.pid, 0)
    assert open_descriptors() <= before


async def test_spawning_a_missing_program_leaves_no_descriptor(tmp_path: Path) -> None:
    before = open_descriptors()
    for _ in range(5):
        with pytest.raises(FileNotFoundError):
            processes.spawn([str(tmp_path / "missing")])
    # Other threads of this process can open a descriptor meanwhile; five leaks would be five or more.
    assert len(open_descriptors() - before) < 5


def test_adopting_a_channel_in_a_process_that_was_not_spawned_is_refused() -> None:
    with pytest.raises(RuntimeError, match="everbeat worker module:app"):
        adopt_channel()


def test_a_blocking_channel_receives_the_last_messages_of_a_child() -> None:
    child = start_child("last-words")
    channel = BlockingChannel(child.channel_socket, messages=Message)
    heard = [channel.receive(timeout_s=20).text for _ in range(4)]
    with pytest.raises(ChannelClosed):
        channel.receive(timeout_s=20)
    assert heard == ["ready", "0", "1", "2"]
    while child.poll() is None:
        time.sleep(0.01)  # the child is about to end; a blocking caller has no event for that
    channel.close()
    child.close()


def test_a_kill_reason_of_the_parent_explains_only_a_sigkill() -> None:
    killed = ExitReport.from_wait_status(1, signal.SIGKILL)
    because = "its loop stood still for 2.0 s"
    assert killed.with_cause(because).cause == f"{because}, killed by its supervisor"
    assert killed.with_cause(None).cause == "killed by SIGKILL"
    assert ExitReport.from_wait_status(1, 3 << 8).with_cause(because).cause == "exit code 3"
    assert ExitReport.from_wait_status(1, signal.SIGSEGV).with_cause(because).cause == "killed by SIGSEGV"
