"""The supervision of a worker that is a guest in another program: in a thread with an event loop of its own, so that a task
that blocks the program's loop does not stop the beats.

What lives here: the thread, and the way between the two loops. What may not: anything a supervision does.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from everbeat.worker.protocol import FromSupervisor, FromWorker, Held, Tick, Welcome
from everbeat.worker.seat import Seat
from everbeat.worker.supervision import Supervision

T = TypeVar("T")


class EmbeddedSupervision:
    """A link for one worker of this process. `make` is called in the thread of the supervision."""

    def __init__(self, make: Callable[[], Supervision]) -> None:
        self._make = make
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(target=self._run, name="everbeat-supervision", daemon=True)
        self._supervision: Supervision | None = None
        self._seat: Seat | None = None

    async def open(
        self,
        *,
        queues: Sequence[str] | None,
        metadata: Mapping[str, object],
        obey: Callable[[FromSupervisor], None],
    ) -> Welcome:
        """Registers a supervisor and its one worker; `obey` is called in the loop of the caller with every message.

        Raises DatabaseError when the database cannot be reached or refuses; the thread has ended then.
        """
        caller = asyncio.get_running_loop()

        def tell(message: FromSupervisor) -> None:
            if not caller.is_closed():
                caller.call_soon_threadsafe(obey, message)

        self._thread.start()
        try:
            return await self._there(self._open(queues, metadata, tell))
        except BaseException:
            await self._stop()
            raise

    def tell(self, message: FromWorker) -> None:
        """What the worker says of itself."""
        if isinstance(message, Held | Tick) and self._seat is not None:
            self._started.result().call_soon_threadsafe(self._seat.hear, message)

    def drain(self) -> None:
        """Says that the worker claims no more."""
        if self._supervision is not None:
            self._started.result().call_soon_threadsafe(self._supervision.drain)

    async def close(self) -> None:
        """The worker has left; so does its supervisor, whose beats stop last."""
        await self._there(self._close())
        await self._stop()

    async def _open(
        self,
        queues: Sequence[str] | None,
        metadata: Mapping[str, object],
        tell: Callable[[FromSupervisor], None],
    ) -> Welcome:
        supervision = self._make()
        await supervision.open()
        self._supervision = supervision
        self._seat = supervision.new_seat(pid=os.getpid(), queues=queues, metadata=metadata, tell=tell)
        return await supervision.register(self._seat)

    async def _close(self) -> None:
        supervision, seat = self._supervision, self._seat
        if supervision is None or seat is None:
            return
        supervision.dismiss(seat)
        await supervision.burials.in_order(seat)
        await supervision.close()

    async def _there(self, work: Coroutine[Any, Any, T]) -> T:
        loop = await asyncio.wrap_future(self._started)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))

    async def _stop(self) -> None:
        loop = await asyncio.wrap_future(self._started)
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)

    def _run(self) -> None:
        loop = asyncio.new_event_loop()
        try:
            loop.call_soon(self._started.set_result, loop)
            loop.run_forever()
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
