"""The supervision of a guest: it beats in a thread and a loop of its own, also for code that goes on after the guest has left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, Protocol

from everbeat.assembly.blueprint import Blueprint
from everbeat.assembly.parts import Surroundings, local_hooks, make_supervision, take_tree_lock
from everbeat.assembly.remaining_code import RemainingCode
from everbeat.config import RecoveryConfig
from everbeat.runtime.main_loop import run_through
from everbeat.store.target import Target
from everbeat.worker.protocol import AskBeat, FromSupervisor, FromWorker, Held, Leaving, Tick, Welcome
from everbeat.worker.seat import Seat
from everbeat.worker.supervision import Supervision

_JOIN_S: Final = 30.0
_SETTLE_S: Final = 5.0


class Host(Protocol):
    """The guest."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The program's loop, once it works there."""
        ...

    def tell(self, message: FromSupervisor) -> None:
        """Hands a message of the supervision to the worker, from the supervision's thread."""
        ...

    def fail(self, name: str, error: BaseException) -> None:
        """A part that nothing goes on without has crashed."""
        ...


class Minder:
    """The supervision of a guest, in a thread and a loop of its own. It is the worker's link."""

    def __init__(
        self, target: Target, recovery: RecoveryConfig, *, around: Surroundings, guest: Host
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
        self._left: RemainingCode | None = None
        self._has_parted = threading.Event()

    def start(self, blueprint: Blueprint) -> Future[Welcome]:
        """Registers the guest and begins to beat; the future tells the worker who it is, or why it cannot be."""
        self._thread = threading.Thread(
            target=lambda: self._run(blueprint), name="everbeat-minder", daemon=True
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

    def stop(self, left: RemainingCode) -> None:
        """Ends the beats, after the worker has ended. Those for code that goes on end with it, after this call."""
        self._left = left
        self._in_thread(self._over.set)
        if self._thread is not None:
            self._has_parted.wait(_JOIN_S)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Make the call when the beats have ended; waits for it unless code goes on."""

        def wait() -> None:
            if self._thread is not None:
                self._thread.join()
            call()

        if self._thread is not None and self._leaves_code and self._thread.is_alive():
            threading.Thread(target=wait, name="everbeat-afterwards", daemon=True).start()
        else:
            call()

    def _run(self, blueprint: Blueprint) -> None:
        try:
            run_through(self._mind(blueprint))
        finally:
            self._has_parted.set()

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
            supervision.drain()
            self._has_parted.set()
            if self._left is not None:
                await supervision.burials.after_code(self._seat, partial(self._left.settle, supervision))
        await supervision.close()
