"""The only module that creates asyncio tasks, and the loop that runs a periodic service."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from random import Random
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

from everbeat.runtime.clock import Backoff, Clock
from everbeat.runtime.events import ServiceFailed, ServiceRecovered
from everbeat.runtime.processes import EXIT_SOFTWARE as EXIT_SOFTWARE
from everbeat.runtime.processes import cut_off_later

Result = TypeVar("Result")

_log = logging.getLogger("everbeat.runtime")


class CriticalEnded(Exception):
    """A coroutine that must run forever has returned."""


class CriticalCancelled(CriticalEnded):
    """A critical coroutine was cancelled, but not by its owner."""


class _Sheltered(asyncio.Task[Any]):
    """A task that `asyncio.run` does not cancel when it finishes.

    `asyncio.run` cancels every task of its stopped loop and then runs the loop until all tasks have finished. No other code cancels tasks
    while the loop is not running. `on_loop_ending` is called instead, and the owner cancels the task later.
    """

    on_loop_ending: Callable[[], None] | None = None

    def cancel(self, msg: Any = None) -> bool:
        if self.on_loop_ending is None or self.get_loop().is_running():
            return super().cancel(msg)
        self.on_loop_ending()
        return False


class _Lent(_Sheltered):
    """A task whose coroutine itself reports when it finishes, unless it was cancelled before its first step."""

    on_cancelled: Callable[[asyncio.Task[Any]], object] | None = None

    def cancel(self, msg: Any = None) -> bool:
        if self.on_cancelled is not None:  # None during the first step of an eager task
            self.add_done_callback(self.on_cancelled)
        return super().cancel(msg)


_EAGER: Final[Mapping[str, Any]] = {"eager_start": True} if sys.version_info >= (3, 12) else {}
"""Since Python 3.12, a task can run its first step at once. A coroutine that never waits then costs no turn of the loop."""


def end_process(name: str, error: BaseException) -> None:
    """Exit this process with `EXIT_SOFTWARE`, because a process without an essential part is worse than no process.

    Log handlers have 1 s to write the reason.
    """
    cut_off_later(EXIT_SOFTWARE)
    _log.critical("process_ended because=%s error=%r exit_code=%d", name, error, EXIT_SOFTWARE)
    logging.shutdown()
    os._exit(EXIT_SOFTWARE)


class TaskScope:
    """Holds the asyncio tasks of one owner. `close` cancels and awaits all of them.

    `on_fatal(name, error)` is called once when a critical task crashes or returns. The default handler exits the process. An in-process
    worker passes another handler, and also `on_loop_ending`. Its tasks then survive when `asyncio.run` finishes and cancels all tasks.
    `on_loop_ending` is called instead, perhaps several times, while the loop is not running. The owner must then close the scope, because
    `asyncio.run` waits for its tasks.
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
        """Run `coroutine` in a task until it finishes or the scope is closed. Raises RuntimeError if the scope is already closing."""
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
        """Run `coroutine`, and call `act` when the coroutine first waits. Return its result or raise its error.

        `act` is always called. If it raises an error, the error is logged, and the coroutine is still awaited.
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
                _log.exception("crashed scope=%s name=%s", self.name, name)
        return await task

    def lend(
        self,
        coroutine: Coroutine[Any, Any, None],
        *,
        name: str,
        on_cancelled: Callable[[asyncio.Task[Any]], object],
        at_once: bool = False,
    ) -> asyncio.Task[None]:
        """Run a coroutine that raises nothing, and whose owner calls `give_back` in its last step. This saves one callback per task.

        `on_cancelled(task)` is called when a cancelled task has finished, perhaps before its first step. `at_once`: since Python 3.12,
        the first step runs before this method returns.
        """
        self._require_open(coroutine, name)
        task = _Lent(coroutine, loop=asyncio.get_running_loop(), name=name, **(_EAGER if at_once else {}))
        if not task.done():
            task.on_cancelled, task.on_loop_ending = on_cancelled, self._on_loop_ending
            self._lent.add(task)
        return task

    def give_back(self, task: asyncio.Task[Any]) -> None:
        """Forget a task that was started by `lend` and is in its last step."""
        self._lent.discard(task)

    def _require_open(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        if self._closing:
            coroutine.close()
            raise RuntimeError(
                f"The task scope {self.name!r} is closing and starts nothing new; {name!r} was not started."
            )

    def _made(self, coroutine: Coroutine[Any, Any, Result], name: str) -> asyncio.Task[Result]:
        loop = asyncio.get_running_loop()
        if self._on_loop_ending is None:
            return loop.create_task(coroutine, name=name)
        sheltered = _Sheltered(coroutine, loop=loop, name=name)
        sheltered.on_loop_ending = self._on_loop_ending
        return sheltered

    async def close(self) -> None:
        """Cancel all tasks except the caller's, and wait until they have finished. A second call is safe."""
        self._closing = True
        mine = asyncio.current_task()
        while others := {task for task in (self._running | self._lent_out()) if task is not mine}:
            for task in others:
                task.cancel()
            # Cancel again after 1 s: code that suppresses one cancellation must not delay the shutdown forever.
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
                "crashed scope=%s name=%s critical=%s\n%s",
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
            _log.critical("ended scope=%s name=%s cancelled=%s", self.name, task.get_name(), task.cancelled())
        self._on_fatal(task.get_name(), error)


JITTER: Final = 0.1
"""A period is shorter than the interval by up to this fraction. The period is never longer, because intervals are promises."""


class Service(Protocol):
    """A service that does its work periodically."""

    @property
    def name(self) -> str:
        """Return the name for logs and events."""
        ...

    @property
    def interval_s(self) -> float:
        """Return the seconds from the start of one tick to the start of the next. The runner reads this property again before every wait."""
        ...

    async def tick(self) -> float | None:
        """Do one pass. Return the number of seconds until the next pass (0 for at once), or None for the usual interval."""
        ...


class ServiceRunner:
    """Runs one service until it is cancelled.

    `emit` receives an event for each failure and for the first success after failures. Setting `wake`, or calling `wake_now`, starts the
    next tick early. The event belongs to this runner, which clears it. `tick_timeout_s` cancels a tick that hangs; otherwise the service
    would silently stop.
    """

    def __init__(
        self,
        service: Service,
        *,
        clock: Clock,
        random: Random,
        emit: Callable[[ServiceFailed | ServiceRecovered], None],
        wake: asyncio.Event | None = None,
        backoff: Backoff | None = None,
        tick_timeout_s: float | None = None,
        first_delay_s: float = 0.0,
    ) -> None:
        self.service = service
        self.ticks = 0
        self.consecutive_failures = 0
        self._clock = clock
        self._random = random
        self._emit = emit
        self._wake = asyncio.Event() if wake is None else wake
        self._backoff = backoff or Backoff(first_s=0.5, longest_s=30.0, spread=(1.0, 1.25), random=random)
        self._tick_timeout_s = tick_timeout_s
        self._first_delay_s = first_delay_s

    def wake_now(self) -> None:
        """Start the next tick at once, or right after the current tick. Call this only from the loop's thread."""
        self._wake.set()

    async def run(self) -> None:
        """Tick forever. Only cancellation stops this coroutine, and it stops promptly."""
        await self._pause(self._first_delay_s)
        while True:
            # Cleared before the tick: a wake during the tick may be about something that the tick has not seen.
            self._wake.clear()
            started = self._clock.monotonic()
            try:
                async with asyncio.timeout(self._tick_timeout_s):
                    wanted = await self.service.tick()
            except asyncio.CancelledError as error:
                if _is_being_cancelled():
                    raise
                await self._pause_after_failure(error)
            except Exception as error:  # noqa: BLE001 - no failure of a tick may stop the loop
                await self._pause_after_failure(error)
            else:
                self._succeeded()
                if _is_being_cancelled():
                    raise asyncio.CancelledError  # The tick suppressed the cancellation.
                await self._pause(self._due_in(started, wanted))

    def _due_in(self, started: float, wanted: float | None) -> float:
        if wanted is not None and not math.isnan(wanted):
            return max(0.0, wanted)
        period = self.service.interval_s * (1.0 - JITTER * self._random.random())
        # If a tick takes longer than its interval, the next one follows at once. Ticks missed in the meantime are not made up for.
        return max(0.0, started + period - self._clock.monotonic())

    async def _pause(self, seconds: float) -> None:
        if seconds > 0.0 and not self._wake.is_set():
            await self._clock.wait(self._wake, timeout_s=seconds)
        else:
            # A service that is always due must still let other tasks run, and must still be cancellable.
            await asyncio.sleep(0)

    async def _pause_after_failure(self, error: BaseException) -> None:
        self.consecutive_failures += 1
        # A failing heartbeat must not run less often than a healthy one.
        longest_s = min(self._backoff.longest_s, max(self.service.interval_s, self._backoff.first_s))
        delay = min(self._backoff.delay(self.consecutive_failures), longest_s)
        self._tell(
            ServiceFailed(
                name=self.service.name,
                error=error,
                consecutive=self.consecutive_failures,
                retry_in_s=delay,
            )
        )
        # A flood of hints must not turn a failing service into a busy loop: a wake counts only after the first delay.
        unconditional = min(delay, self._backoff.first_s)
        await self._clock.sleep(unconditional)
        await self._pause(delay - unconditional)

    def _succeeded(self) -> None:
        self.ticks += 1
        failures, self.consecutive_failures = self.consecutive_failures, 0
        if failures:
            self._tell(ServiceRecovered(name=self.service.name, failures=failures))

    def _tell(self, event: ServiceFailed | ServiceRecovered) -> None:
        try:
            self._emit(event)
        except Exception:  # noqa: BLE001 - an error in the callback must not stop the loop
            _log.exception("event_lost service=%s", self.service.name)


def _is_being_cancelled() -> bool:
    # A tick may also raise a CancelledError that comes from an inner future. That is an error like any other.
    current = asyncio.current_task()
    return current is None or current.cancelling() > 0
