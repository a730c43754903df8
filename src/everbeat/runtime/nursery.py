"""The one place that creates asyncio tasks: none is forgotten, none dies in silence.

What lives here: starting, holding, cancelling and reporting coroutines. What may not: what the coroutines do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import traceback
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from everbeat.runtime.exit_report import EXIT_SOFTWARE as EXIT_SOFTWARE

Result = TypeVar("Result")

_log = logging.getLogger("everbeat.runtime")


class CriticalEnded(Exception):
    """A coroutine that had to run for ever returned."""


class CriticalCancelled(CriticalEnded):
    """It was cancelled by somebody who is not its owner."""


class _Sheltered(asyncio.Task[Any]):
    """Not cancelled by the end of `asyncio.run`, which cancels every task of a loop that has stopped, and runs it on until they end.

    Nobody else cancels while the loop does not run; the owner is told, and cancels in its turn.
    """

    on_loop_ending: Callable[[], None] | None = None

    def cancel(self, msg: Any = None) -> bool:
        if self.on_loop_ending is None or self.get_loop().is_running():
            return super().cancel(msg)
        self.on_loop_ending()
        return False


class _Lent(_Sheltered):
    """Its coroutine says itself that it is over, unless it was cancelled before its first step."""

    on_cancelled: Callable[[asyncio.Task[Any]], object]

    def cancel(self, msg: Any = None) -> bool:
        self.add_done_callback(self.on_cancelled)
        return super().cancel(msg)


def end_process(name: str, error: BaseException) -> None:
    """End this process at once with `EXIT_SOFTWARE`: half a process that looks alive is worse than none."""
    _log.critical("process_ended because=%s error=%r exit_code=%d", name, error, EXIT_SOFTWARE)
    logging.shutdown()
    os._exit(EXIT_SOFTWARE)


class Nursery:
    """Holds the asyncio tasks of one owner; `close` cancels and awaits all of them.

    `on_fatal(name, error)` is called once, when a critical one crashes or returns; the default ends the
    process. A worker that is a guest in another program passes its own, and `on_loop_ending`: what is held here then
    outlives the cancellation of everything with which `asyncio.run` ends, and this is called instead, once or more often,
    while the loop does not run. The owner must see to it that the nursery is closed: `asyncio.run` waits for it.
    """

    def __init__(
        self,
        *,
        name: str,
        on_fatal: Callable[[str, BaseException], None] = end_process,
        on_loop_ending: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self._on_fatal = on_fatal
        self._on_loop_ending = on_loop_ending
        self._running: set[asyncio.Task[Any]] = set()
        self._lent: set[asyncio.Task[Any]] = set()
        self._critical: set[asyncio.Task[Any]] = set()
        self._closing = False
        self._fatal = False

    def __len__(self) -> int:
        return len(self._running) + len(self._lent)

    def start(
        self, coroutine: Coroutine[Any, Any, Result], *, name: str, critical: bool = False
    ) -> asyncio.Task[Result]:
        """Run `coroutine` until it ends or the nursery closes; raises RuntimeError once closing."""
        self._require_open(coroutine, name)
        task = self._made(coroutine, name)
        self._running.add(task)
        if critical:
            self._critical.add(task)
        task.add_done_callback(self._ended)
        return task

    async def beside(
        self, coroutine: Coroutine[Any, Any, Result], act: Callable[[], object], *, name: str
    ) -> Result:
        """Runs `coroutine`, and calls `act` as soon as that waits for the first time; returns or raises what it does.

        `act` is called whatever happens; should it raise, that is logged, and what is under way is not left alone.
        """
        task = self._made(coroutine, name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.sleep(0)
        finally:
            try:
                act()
            except Exception:  # noqa: BLE001 - see above
                _log.exception("crashed nursery=%s name=%s", self.name, name)
        return await task

    def lend(
        self,
        coroutine: Coroutine[Any, Any, None],
        *,
        name: str,
        on_cancelled: Callable[[asyncio.Task[Any]], object],
    ) -> asyncio.Task[None]:
        """The same for a coroutine that raises nothing and gives its task back with its last step: no call follows its end.

        `on_cancelled(task)` is called when a task that somebody cancelled has ended: it may have been before the first step.
        """
        self._require_open(coroutine, name)
        task = _Lent(coroutine, loop=asyncio.get_running_loop(), name=name)
        task.on_cancelled, task.on_loop_ending = on_cancelled, self._on_loop_ending
        self._lent.add(task)
        return task

    def give_back(self, task: asyncio.Task[Any]) -> None:
        """What was lent is over."""
        self._lent.discard(task)

    def _require_open(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        if self._closing:
            coroutine.close()
            raise RuntimeError(
                f"Nursery {self.name!r} is closing and starts nothing new; {name!r} was not started."
            )

    def _made(self, coroutine: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        loop = asyncio.get_running_loop()
        if self._on_loop_ending is None:
            return loop.create_task(coroutine, name=name)
        sheltered = _Sheltered(coroutine, loop=loop, name=name)
        sheltered.on_loop_ending = self._on_loop_ending
        return sheltered

    async def close(self) -> None:
        """Cancel everything and wait until it has ended; safe to call twice. The caller itself is spared."""
        self._closing = True
        mine = asyncio.current_task()
        while others := {task for task in (self._running | self._lent_out()) if task is not mine}:
            for task in others:
                task.cancel()
            # Again after a while: code that swallows one cancellation must not hold up the end for ever.
            await asyncio.wait(others, timeout=1.0)

    def _lent_out(self) -> set[asyncio.Task[Any]]:
        return {task for task in self._lent if not task.done()}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        critical = task in self._critical
        self._critical.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            level = logging.CRITICAL if critical else logging.ERROR
            trace = "".join(traceback.format_exception(error))
            _log.log(
                level,
                "crashed nursery=%s name=%s critical=%s\n%s",
                self.name,
                task.get_name(),
                critical,
                trace,
            )
        if not critical or self._closing or self._fatal:
            return
        self._fatal = True
        if error is None:
            kind, how = (CriticalCancelled, "was cancelled") if task.cancelled() else (CriticalEnded, "ended")
            error = kind(f"{task.get_name()} {how} although it had to run until its owner closes.")
            _log.critical(
                "ended nursery=%s name=%s cancelled=%s", self.name, task.get_name(), task.cancelled()
            )
        self._on_fatal(task.get_name(), error)
