"""A child process of `spawn`; its first argument selects what it does."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

from everbeat.runtime.channel import AsyncChannel, BlockingChannel
from everbeat.runtime.processes import adopt_channel, exit_orphaned, offer_stack_dumps
from tests.runtime.programs.messages import Message, Say
from tests.runtime.programs.start import start_child


async def echo(channel: AsyncChannel) -> None:
    while True:
        await channel.send(await channel.receive())


async def run_echo() -> None:
    channel = await AsyncChannel.open(adopt_channel(), messages=Message, on_eof=exit_orphaned)
    await echo(channel)


def announce(text: str = "ready") -> BlockingChannel:
    channel = BlockingChannel(adopt_channel(), messages=Message)
    channel.send(Say(text))
    return channel


def sleep_for_ever() -> None:
    # The test ends the process.
    while True:
        time.sleep(60)


def hear_the_end_in_a_thread() -> None:
    channel = announce()
    channel.read_in_thread(on_message=lambda message: None, on_eof=exit_orphaned)
    sleep_for_ever()


def become_a_parent() -> None:
    """Start a grandchild and report its pid, as a worker process does with its task processes."""
    sock = adopt_channel()
    child = start_child("sleep")
    grandchild = BlockingChannel(child.channel_socket, messages=Message)
    grandchild.receive(timeout_s=20)
    BlockingChannel(sock, messages=Message).send(Say(str(child.pid)))
    sleep_for_ever()


def start_a_stranger() -> None:
    """Start a separate program, as careless user code does, and report its pid."""
    channel = BlockingChannel(adopt_channel(), messages=Message)
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    channel.send(Say(str(stranger.pid)))
    channel.receive()
    os._exit(3)


def report_inheritance() -> None:
    sock = adopt_channel()
    inherited = os.get_inheritable(sock.fileno())
    variables = sorted(name for name in os.environ if name.startswith("EVERBEAT_"))
    channel = BlockingChannel(sock, messages=Message)
    channel.send(Say(f"{inherited} {variables}"))


def fork_and_die() -> None:
    """Leave a forked child running; its copy of the channel must not hide the end of this process."""
    channel = announce()
    pid = os.fork()
    if pid == 0:
        sleep_for_ever()
    channel.send(Say(str(pid)))
    os.kill(os.getpid(), signal.SIGKILL)


def hold_the_gil() -> None:
    offer_stack_dumps()
    channel = announce()
    threading.Thread(target=channel.receive, daemon=True).start()
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(60)


def last_words() -> None:
    channel = announce()
    for number in range(3):
        channel.send(Say(str(number)))
    os._exit(0)


def main() -> None:
    match sys.argv[1:]:
        case ["echo"]:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(run_echo())
        case ["exit", code]:
            sys.exit(int(code))
        case ["segfault"]:
            announce()
            ctypes.string_at(0)
        case ["sleep"]:
            announce()
            sleep_for_ever()
        case ["sleep-until-eof"]:
            hear_the_end_in_a_thread()
        case ["parent"]:
            become_a_parent()
        case ["stranger"]:
            start_a_stranger()
        case ["inheritance"]:
            report_inheritance()
        case ["fork-and-die"]:
            fork_and_die()
        case ["hold-the-gil"]:
            hold_the_gil()
        case ["last-words"]:
            last_words()
        case other:
            sys.exit(f"unknown: {other}")


if __name__ == "__main__":
    main()
