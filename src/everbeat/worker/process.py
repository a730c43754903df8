"""The program of a worker process, which runs a worker until its supervisor stops it, and calls recovery hooks for the supervisor."""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from everbeat.domain.recovery.hooks import HookRunner, NoHooks
from everbeat.errors import ResourceFailed
from everbeat.protocol import (
    AskHooks,
    FromTaskProcess,
    FromWorker,
    Hello,
    HookAnswers,
    Refused,
    TellHooks,
    ToWorkerProcess,
    Welcome,
    word_of,
)
from everbeat.runtime.channel import AsyncChannel, BlockingChannel, ChannelClosed, ChannelError
from everbeat.runtime.environment import ProcessEnvironment
from everbeat.runtime.inherited import correct_inherited
from everbeat.runtime.main_loop import run_through, take_signal
from everbeat.runtime.processes import adopt_channel, exit_orphaned, offer_stack_dumps
from everbeat.runtime.resources import CLOSE_WITHIN_S, ResourceSet
from everbeat.runtime.task_scope import TaskScope
from everbeat.worker.environment import SupervisorLink, WorkerPlan
from everbeat.worker.worker import Worker


class ChannelLink:
    """The link from a worker process to its supervisor."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel

    def tell(self, message: FromWorker) -> None:
        """Queue a message to the supervisor. If the supervisor is gone, drop the message, because this process is about to exit."""
        with contextlib.suppress(ChannelClosed):
            self._channel.send_nowait(message)


class PreparedWorker(Struct, frozen=True, kw_only=True):
    """The parts of a worker that exist before the worker itself: its plan, its environment and its open, migrated database.

    `make(plan, ...)` creates the worker. Call it on the worker's event loop. `close` closes the database.
    """

    plan: WorkerPlan
    environment: ProcessEnvironment
    make: Callable[..., Worker]
    close: Callable[[], None]


class HookRequests:
    """Calls recovery hooks for the supervisor, concurrently with the worker's own work."""

    def __init__(self, hooks: HookRunner, *, channel: AsyncChannel, scope: TaskScope) -> None:
        self._hooks = hooks
        self._channel = channel
        self._scope = scope

    def obey(self, message: AskHooks | TellHooks) -> None:
        """Start calling the hooks that the supervisor requested."""
        match message:
            case AskHooks():
                self._scope.start(self._answer(message), name="recovery hooks")
            case TellHooks():
                self._scope.start(self._tell(message), name="recovery hooks")

    async def _answer(self, question: AskHooks) -> None:
        answers = await self._hooks.decide(question.contexts)
        words = [word_of(task_id, answer) for task_id, answer in answers.items()]
        with contextlib.suppress(ChannelError):
            self._channel.send_nowait(HookAnswers(question.call, words))

    async def _tell(self, news: TellHooks) -> None:
        if news.interrupted:
            await self._hooks.interrupted(news.interrupted)
        if news.recovered is not None:
            await self._hooks.recovered(news.recovered)
        with contextlib.suppress(ChannelError):
            self._channel.send_nowait(HookAnswers(news.call, []))


EXIT_REFUSED: Final = 1
"""The exit code of a process that has reported to its parent why it cannot start."""
_DEFAULT_THRESHOLDS: Final = (700, 2_000)
"""How many new objects trigger a garbage collection by default: 700 up to Python 3.12, and 2000 from Python 3.13."""
_THRESHOLD: Final = 20_000


def prepare_process() -> socket.socket:
    """Prepare a worker or task process and return its socket. Call this function in the main thread before importing user code."""
    correct_inherited()
    sock = adopt_channel()
    offer_stack_dumps()
    # Ignore these signals and let the supervisor decide, because a terminal or service manager sends them to every process
    # in the tree. Do not use SIG_IGN, because programs that user code starts would inherit it.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        take_signal(number, _ignore)
    return sock


def refuse_to_start(sock: socket.socket, *, code: str, message: str, fix: str | None = None) -> None:
    """Report to the parent process why this process cannot start. The caller must exit afterwards."""
    channel = BlockingChannel(sock, messages=FromTaskProcess)
    try:
        channel.send(Refused(code, message, fix))
    except ChannelClosed:
        exit_orphaned()


def run_worker_process(
    sock: socket.socket,
    *,
    hello: Hello,
    make_worker: Callable[[Welcome, SupervisorLink], Worker],
    resources: ResourceSet | None = None,
    hooks: HookRunner | None = None,
) -> int:
    """Run a worker process until it shuts down, and return the exit code to pass to `leave`.

    `make_worker` is called in the running event loop, after the `resources` are open.
    """
    _collect_garbage_rarely()
    return run_through(_serve(sock, hello, make_worker, resources or ResourceSet(), hooks or NoHooks()))


def _collect_garbage_rarely() -> None:
    """Exempt imported objects from garbage collection, and collect less often.

    Garbage collection took a third of the time of short tasks (docs/performance.md). A program that has set its own thresholds keeps
    them.
    """
    gc.freeze()
    first, *others = gc.get_threshold()
    if first in _DEFAULT_THRESHOLDS:
        gc.set_threshold(_THRESHOLD, *others)


async def _serve(
    sock: socket.socket,
    hello: Hello,
    make_worker: Callable[[Welcome, SupervisorLink], Worker],
    resources: ResourceSet,
    hooks: HookRunner,
) -> int:
    channel = await AsyncChannel.open(sock, messages=ToWorkerProcess, on_eof=exit_orphaned)
    try:
        await resources.aopen()
    except ResourceFailed as error:
        await channel.send(Refused(error.code, error.message, error.fix))
        await channel.aclose()
        return EXIT_REFUSED
    close_within_s: float | None = CLOSE_WITHIN_S
    try:
        await channel.send(hello)
        welcome = await channel.receive()
        if not isinstance(welcome, Welcome):
            return 0  # the supervisor stopped this process before any work began
        worker = make_worker(welcome, ChannelLink(channel))
        async with TaskScope(name="worker process") as scope:
            hook_requests = HookRequests(hooks, channel=channel, scope=scope)
            scope.start(_obey(worker, hook_requests, channel), name="supervisor's orders", critical=True)
            code = await worker.run()
        # Code that is still running might use the resources until the process has exited.
        close_within_s = None if worker.code_left else worker.grace_left_s(at_most=CLOSE_WITHIN_S)
    finally:
        if close_within_s is not None:
            await resources.aclose(within_s=close_within_s)
    await channel.aclose()
    return code


async def _obey(worker: Worker, hook_requests: HookRequests, channel: AsyncChannel) -> None:
    while True:
        message: ToWorkerProcess = await channel.receive()
        match message:
            case AskHooks() | TellHooks():
                hook_requests.obey(message)
            case _:
                worker.obey(message)


def _ignore(number: int, frame: object) -> None:
    del number, frame
