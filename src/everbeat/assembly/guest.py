"""A worker that is a guest in another program: it works on the program's loop, and a thread of its own beats for it.

What lives here: both halves and the line between them. The beats do not share the loop, so that user code which blocks it
is not taken for dead. What may not: signals, which belong to the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Final, TypeVar

from msgspec.structs import replace

from everbeat.assembly.blueprint import Blueprint
from everbeat.assembly.minder import Minder
from everbeat.assembly.parts import Surroundings
from everbeat.assembly.remaining_code import RemainingCode
from everbeat.assembly.worker_parts import make_worker, plan_of, prepare
from everbeat.errors import WorkerError
from everbeat.runtime.main_loop import run_through
from everbeat.runtime.nursery import CriticalCancelled, Nursery
from everbeat.runtime.signals import signals_call
from everbeat.runtime.threads import LastingExecutor
from everbeat.store.target import Target
from everbeat.worker.farewell import EXIT_CODE_RUNS, EXIT_SLOTS_LEAKED, EXIT_UNSETTLED
from everbeat.worker.messenger import MakeMessenger
from everbeat.worker.protocol import (
    Drain,
    FromSupervisor,
    Stop,
)
from everbeat.worker.worker import Worker

Result = TypeVar("Result")
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
        minder = Minder(opened.target, self._blueprint.recovery, around=self._around, guest=self)
        try:
            make_messenger = await self._apart(lambda: prepare(self._blueprint, opened))
            await self._work_on(opened.target, make_messenger, minder)
        finally:
            await self._apart(lambda: minder.afterwards(opened.close))
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

    async def _work_on(self, target: Target, make_messenger: MakeMessenger, minder: Minder) -> None:
        plan = replace(plan_of(self._blueprint, target), on_loop_ending=self._note_loop_ending)
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
            loop = asyncio.get_running_loop()
            left = RemainingCode(() if self._worker is None else self._worker.code_left, loop=loop)
            await self._until_done(loop.run_in_executor(self._threads, minder.stop, left))

    async def _until_left(self, work: asyncio.Task[int]) -> None:
        await self._until_done(work)
        if self._failure is not None:
            return
        if work.cancelled():
            self._tell_left_behind("the program has cancelled its parts")
        elif work.result() == EXIT_UNSETTLED:
            self._tell_left_behind("the database could not be reached in time")
        elif work.result() == EXIT_CODE_RUNS:
            _log.warning(
                "code_runs_on problem=%r",
                "code that a stop cannot end runs on in this program; its tasks are kept until it ends, so that no second run overlaps",
            )
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
