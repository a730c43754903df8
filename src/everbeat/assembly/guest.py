"""A worker that is a guest in another program: it works on the program's loop, and a thread of its own beats for it.

What lives here: both halves and the line between them. The beats do not share the loop, so that user code which blocks it
is not taken for dead. What may not: signals, which belong to the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from msgspec.structs import replace

from everbeat.assembly.blueprint import Blueprint
from everbeat.assembly.parts import Surroundings, local_hooks, make_supervision, take_tree_lock
from everbeat.assembly.worker_parts import make_worker, plan_of, prepare
from everbeat.config import RecoveryConfig
from everbeat.errors import WorkerError
from everbeat.runtime.main_loop import run_through
from everbeat.runtime.nursery import CriticalCancelled, Nursery
from everbeat.runtime.signals import signals_call
from everbeat.runtime.threads import LastingExecutor
from everbeat.store.target import Target
from everbeat.worker.farewell import EXIT_CODE_RUNS, EXIT_SLOTS_LEAKED, EXIT_UNSETTLED
from everbeat.worker.messenger import MakeMessenger
from everbeat.worker.protocol import (
    AskBeat,
    Drain,
    FromSupervisor,
    FromWorker,
    Held,
    Leaving,
    Stop,
    Tick,
    Welcome,
)
from everbeat.worker.seat import Seat
from everbeat.worker.supervision import Supervision
from everbeat.worker.worker import Worker

Result = TypeVar("Result")
_JOIN_S: Final = 30.0
_SETTLE_S: Final = 5.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger("everbeat.worker")


class Guest:
    """One run of a worker in this process."""

    def __init__(self, blueprint: Blueprint) -> None:
        self._blueprint = blueprint
        self._around = Surroundings()
        self._threads = LastingExecutor(max_workers=1)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker: Worker | None = None
        self._work: asyncio.Task[int] | None = None
        self._early: list[FromSupervisor] = []
        self._stops = 0
        self._is_cancelled = False
        self._is_loop_ending = False
        self._failure: WorkerError | None = None

    async def run(self) -> None:
        """Works until it is told to stop. Cancelling it is the first stop: it drains, and only then is cancelled.

        The end of `asyncio.run` cancels everything on the loop: then what runs is stopped at once, by its policy.

        Raises WorkerError, a DatabaseError, a NatsError.
        """
        self._loop = asyncio.get_running_loop()
        self._blueprint.check()
        opened = await self._apart(self._blueprint.address.open)
        try:
            make_messenger = await self._apart(lambda: prepare(self._blueprint, opened))
            await self._work_on(opened.target, make_messenger)
        finally:
            await self._apart(opened.close)
        if self._failure is not None:
            raise self._failure
        if self._is_cancelled:
            raise asyncio.CancelledError

    async def _apart(self, call: Callable[[], Result]) -> Result:
        # Not asyncio.to_thread: a program whose main thread has ended has no pools any more.
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The program's loop, once it works there."""
        return self._loop

    def stop(self) -> None:
        """Asks to leave, from any thread: first in good order, the second time at once."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has left
                self._loop.call_soon_threadsafe(self._stop)

    async def _work_on(self, target: Target, make_messenger: MakeMessenger) -> None:
        plan = replace(plan_of(self._blueprint, target), on_loop_ending=self._note_loop_ending)
        minder = Minder(target, self._blueprint.recovery, around=self._around, guest=self)
        try:
            welcome = asyncio.wrap_future(minder.start(self._blueprint))
            await self._until_done(welcome)
            self._worker = make_worker(
                plan, welcome=welcome.result(), link=minder, around=self._around, on_fatal=self.fail,
                make_messenger=make_messenger,
            )  # fmt: skip
            for message in self._early:
                self._worker.obey(message)
            if self._stops:
                self._obey_stops(self._worker)
            async with Nursery(
                name="guest", on_fatal=self.fail, on_loop_ending=self._note_loop_ending
            ) as nursery:
                self._work = nursery.start(self._worker.run(), name="worker")
                await self._until_left(self._work)
        finally:
            await self._until_done(asyncio.get_running_loop().run_in_executor(self._threads, minder.stop))

    async def _until_left(self, work: asyncio.Task[int]) -> None:
        await self._until_done(work)
        if self._failure is not None:
            return
        if work.cancelled():
            self._tell_left_behind("the program has cancelled its parts")
        elif work.result() == EXIT_UNSETTLED:
            self._tell_left_behind("the database could not be reached in time")
        elif work.result() == EXIT_CODE_RUNS:
            self._tell_left_behind("its code still runs in this program and cannot be ended")
        elif work.result() == EXIT_SLOTS_LEAKED:
            self._failure = WorkerError(
                "Every slot of a kind is kept by code that was given up and does not end, so this worker left.",
                fix="restart the program; let thread tasks look at Context.cancelled, or run them with run_in='process'.",
            )

    async def _until_done(self, work: asyncio.Future[Result]) -> None:
        """A cancellation meanwhile is a stop, and is passed on at the end."""
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                self._is_cancelled = True
                self._stop()

    def _note_loop_ending(self) -> None:
        # Called while the loop stands still; in its very next turn, before any code on it sees that all was cancelled.
        if self._loop is not None and not self._is_loop_ending:
            self._is_loop_ending = True
            _log.info("loop_ends running=stopped")
            self._loop.call_soon(self._stop_at_once)

    def _stop_at_once(self) -> None:
        self._stops += 1
        self._stop()

    def _tell_left_behind(self, why: str) -> None:
        _log.warning("left_to_recovery problem=%r", f"what this worker holds is not handed back: {why}")

    def _stop(self) -> None:
        self._stops += 1
        if self._worker is not None:
            self._obey_stops(self._worker)

    def _obey_stops(self, worker: Worker) -> None:
        grace_ms = round(self._blueprint.worker.grace_s * 1_000)
        worker.obey(Drain(grace_ms) if self._stops == 1 else Stop())

    def tell(self, message: FromSupervisor) -> None:
        """Hands a message of the supervision to the worker, from the supervision's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the program's loop is closed
            self._loop.call_soon_threadsafe(self._obey, message)

    def _obey(self, message: FromSupervisor) -> None:
        if self._worker is None:
            self._early.append(message)
        else:
            self._worker.obey(message)

    def fail(self, name: str, error: BaseException) -> None:
        """A part that nothing goes on without has crashed, in either thread: the worker ends, the program goes on."""
        if not (self._is_cancelled and isinstance(error, CriticalCancelled)):
            self._failure = self._failure or WorkerError(f"The worker's {name} crashed with {error!r}.")
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._abandon)

    def _abandon(self) -> None:
        if self._work is not None:
            self._work.cancel()


def run_guest(guest: Guest) -> None:
    """Runs a guest in this thread; in the main thread SIGTERM and SIGINT are its stops."""

    async def run() -> None:
        with signals_call(guest.stop, numbers=_SIGNALS):
            await guest.run()

    run_through(run())


class Minder:
    """The supervision of a guest, in a thread and a loop of its own. It is the worker's link."""

    def __init__(
        self, target: Target, recovery: RecoveryConfig, *, around: Surroundings, guest: Guest
    ) -> None:
        self._target = target
        self._recovery = recovery
        self._around = around
        self._guest = guest
        self._welcome: Future[Welcome] = Future()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()
        self._seat: Seat | None = None
        self._supervision: Supervision | None = None
        self._has_left = self._leaves_code = False

    def start(self, blueprint: Blueprint) -> Future[Welcome]:
        """Registers the guest and begins to beat; the future tells the worker who it is, or why it cannot be."""
        self._thread = threading.Thread(
            target=lambda: run_through(self._mind(blueprint)), name="everbeat-minder", daemon=True
        )
        self._thread.start()
        return self._welcome

    def tell(self, message: FromWorker) -> None:
        """What the worker says of itself."""
        match message:
            case Held() | Tick() if self._seat is not None:
                self._in_thread(self._seat.hear, message)
            case AskBeat() if self._supervision is not None:
                self._in_thread(self._supervision.beat_now)
            case Leaving(code_runs):
                self._has_left, self._leaves_code = not code_runs, code_runs
            case _:
                pass

    def stop(self) -> None:
        """Ends the beats, after the worker has ended."""
        self._in_thread(self._over.set)
        if self._thread is not None:
            self._thread.join(_JOIN_S)

    def _in_thread(self, call: object, *arguments: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(call, *arguments)  # type: ignore[arg-type]

    async def _mind(self, blueprint: Blueprint) -> None:
        self._loop = asyncio.get_running_loop()
        supervision = make_supervision(
            self._target,
            self._recovery,
            around=self._around,
            lock=take_tree_lock(),
            slot=blueprint.worker.slot,
            hooks=local_hooks(blueprint.hooks, self._recovery, around=self._around, loop=self._guest.loop),
            on_fatal=self._guest.fail,
        )
        self._supervision = supervision
        try:
            await supervision.open()
            queues = blueprint.worker.queues
            self._seat = supervision.new_seat(
                pid=os.getpid(),
                queues=None if queues is None else list(queues),
                metadata={
                    "tasks": sorted(blueprint.definitions),
                    "lanes": blueprint.lanes(),
                    "parameters": blueprint.parameters(),
                },
                tell=self._guest.tell,
                on_loop=blueprint.on_loop(),
            )
            welcome = await supervision.register(self._seat)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the program waits for it
            self._welcome.set_exception(error)
            await supervision.close()
            return
        self._welcome.set_result(welcome)
        await self._over.wait()
        supervision.dismiss(self._seat)
        if self._has_left:
            await supervision.burials.in_order(self._seat)
        elif self._leaves_code:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(supervision.burials.with_running_code(self._seat), _SETTLE_S)
        await supervision.close()
