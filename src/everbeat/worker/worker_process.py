"""The program of a worker process: says what it is, is registered, then works until it is told to leave.

What lives here: the worker process's half of its start, and its end. What may not: importing user code, which happens
between `prepare_process` and `run_worker_process`, and making the worker from an app.
"""

from __future__ import annotations

import gc
import signal
import socket
from collections.abc import Callable
from typing import Final

from everbeat.domain.hooks import HookRunner, NoHooks
from everbeat.runtime.blocking_channel import BlockingChannel
from everbeat.runtime.channel import AsyncChannel
from everbeat.runtime.frames import ChannelClosed
from everbeat.runtime.inherited import correct_inherited
from everbeat.runtime.main_loop import run_through
from everbeat.runtime.nursery import Nursery
from everbeat.runtime.parent import adopt_channel, exit_orphaned, offer_stack_dumps
from everbeat.runtime.signals import take_signal
from everbeat.worker.hook_line import HookDesk
from everbeat.worker.link import ChannelLink, Link
from everbeat.worker.protocol import (
    AskHooks,
    FromTaskProcess,
    Hello,
    Refused,
    TellHooks,
    ToWorkerProcess,
    Welcome,
)
from everbeat.worker.worker import Worker

_DEFAULT_THRESHOLDS: Final = (700, 2_000)
"""New objects after which Python looks for garbage, up to 3.12 and from 3.13."""
_THRESHOLD: Final = 20_000


def prepare_process() -> socket.socket:
    """The first act in the main thread of a worker or task process, before user code is imported."""
    correct_inherited()
    sock = adopt_channel()
    offer_stack_dumps()
    # The supervisor decides; a terminal or a service manager signals every process of the tree. Not SIG_IGN, which the
    # programs that user code starts would inherit.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        take_signal(number, _ignore)
    return sock


def refuse_to_start(sock: socket.socket, *, code: str, message: str, fix: str | None = None) -> None:
    """Tell the parent why this process cannot start; the caller exits then."""
    channel = BlockingChannel(sock, messages=FromTaskProcess)
    try:
        channel.send(Refused(code, message, fix))
    except ChannelClosed:
        exit_orphaned()


def run_worker_process(
    sock: socket.socket,
    *,
    hello: Hello,
    make_worker: Callable[[Welcome, Link], Worker],
    hooks: HookRunner | None = None,
) -> int:
    """Serve as a worker process; answers the exit code for `leave`. `make_worker` is called in the running loop."""
    _collect_garbage_rarely()
    return run_through(_serve(sock, hello, make_worker, hooks or NoHooks()))


def _collect_garbage_rarely() -> None:
    """What was imported is never looked through again, and a batch of tasks is no reason to look: that took a third of the time of
    short tasks (docs/performance.md). A program that has set thresholds of its own keeps them."""
    gc.freeze()
    first, *others = gc.get_threshold()
    if first in _DEFAULT_THRESHOLDS:
        gc.set_threshold(_THRESHOLD, *others)


async def _serve(
    sock: socket.socket, hello: Hello, make_worker: Callable[[Welcome, Link], Worker], hooks: HookRunner
) -> int:
    channel = await AsyncChannel.open(sock, messages=ToWorkerProcess, on_eof=exit_orphaned)
    await channel.send(hello)
    welcome = await channel.receive()
    if not isinstance(welcome, Welcome):
        return 0  # told to leave before anything was begun
    worker = make_worker(welcome, ChannelLink(channel))
    async with Nursery(name="worker process") as nursery:
        desk = HookDesk(hooks, channel=channel, nursery=nursery)
        nursery.start(_obey(worker, desk, channel), name="supervisor's orders", critical=True)
        code = await worker.run()
    await channel.aclose()
    return code


async def _obey(worker: Worker, desk: HookDesk, channel: AsyncChannel) -> None:
    while True:
        message: ToWorkerProcess = await channel.receive()
        match message:
            case AskHooks() | TellHooks():
                desk.obey(message)
            case _:
                worker.obey(message)


def _ignore(number: int, frame: object) -> None:
    del number, frame
