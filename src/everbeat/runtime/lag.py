"""A watch on an event loop from outside: how late it is, and whose code keeps it from turning.

What lives here: noticing and telling. What may not: deciding that a worker is dead; a blocked loop is not a
death.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from everbeat.runtime.events import LoopBlocked, LoopFreed

try:
    import resource

    _COUNTS_SWITCHES = hasattr(resource, "RUSAGE_THREAD")  # macOS does not count them for one thread.
except ImportError:  # Windows
    _COUNTS_SWITCHES = False

_log = logging.getLogger("everbeat.runtime")

_LONGEST_PERIOD_S: Final = 0.5
_STACK_FRAMES: Final = 30
# Where an idle loop waits: nobody's fault, even if the whole process was stopped meanwhile.
_IDLE_MODULES: Final = ("selectors", "asyncio.windows_events")


def name_of(task: asyncio.Task[Any]) -> str:
    """The name asyncio knows the coroutine by."""
    return task.get_name()


class LoopWatch:
    """Tells once when `loop` has not turned for `threshold_s` seconds, and once when it turns again.

    A daemon thread asks the loop for an echo twice a second, and twice within `threshold_s`. `describe` turns the blocking coroutine
    into the name people know; `emit` is called from the thread. Code that holds the GIL stops the thread too:
    it is then told the moment the GIL is free, with the stack of the code that held it.

    Who held the GIL may have been any thread: `in_threads` names the code in others, and a coroutine that is none of
    what is blamed (`is_code` says no) only waited for it.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        threshold_s: float,
        emit: Callable[[LoopBlocked | LoopFreed], None],
        describe: Callable[[asyncio.Task[Any]], str] = name_of,
        in_threads: Callable[[], tuple[str, ...]] = tuple,
        is_code: Callable[[asyncio.Task[Any]], bool] = lambda _: True,
    ) -> None:
        self._loop = loop
        self._threshold_s = threshold_s
        self._emit = emit
        self._describe = describe
        self._in_threads = in_threads
        self._is_code = is_code
        self._period_s = min(_LONGEST_PERIOD_S, threshold_s / 2)
        self._stop = threading.Event()
        self._loop_thread: int | None = None
        self._asked_at: float | None = None
        self._forgiven_s = 0.0
        self._echoed_at = 0.0
        self._lag_s = 0.0
        self._blocked: tuple[str, ...] | None = None
        self._blocked_since = 0.0
        self._thread = threading.Thread(target=self._watch, name="everbeat-loop-watch", daemon=True)

    def start(self) -> None:
        """Begin to watch; from any thread, once."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch and wait for its thread; at most a moment."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def lag_s(self) -> float:
        """How late the loop is, in seconds: the age of the awaited echo, or the delay of the last one."""
        asked_at = self._asked_at
        return self._lag_s if asked_at is None else max(self._lag_s, time.monotonic() - asked_at)

    def _watch(self) -> None:
        woke_at, switches = time.monotonic(), _voluntary_switches()
        if not self._ask():
            return
        while not self._stop.wait(self._period_s):
            now, switches_now = time.monotonic(), _voluntary_switches()
            overslept = max(0.0, now - woke_at - self._period_s)
            waited_for_the_gil = _waited_for_the_gil(switches_now - switches, overslept)
            woke_at, switches = now, switches_now
            if not waited_for_the_gil:
                self._forgiven_s += overslept  # The whole process stood still, which is nobody's fault.
            try:
                self._look(now, overslept, held=waited_for_the_gil and overslept > self._threshold_s)
            except Exception:  # noqa: BLE001 - a broken listener must not end the watch
                _log.exception("loop_watch_failed")
            if self._loop.is_closed() or (self._asked_at is None and not self._ask()):
                return

    def _look(self, now: float, overslept: float, *, held: bool) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            if self._blocked is not None:
                self._report_end()
            if held:
                # The last echo came, then nothing in this process ran, this thread included. Look at once:
                # the code that held the GIL has not gone on by more than a few instructions.
                self._report(since=now - overslept, now=now, held=True)
        elif not self._loop.is_running():
            self._forgiven_s = now - asked_at  # Stopped, not blocked.
        elif self._blocked is None and now - asked_at - self._forgiven_s > self._threshold_s:
            self._report(since=asked_at, now=now, held=held)

    def _ask(self) -> bool:
        self._forgiven_s = 0.0
        self._asked_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._echo)
        except RuntimeError:
            return False  # The loop is closed.
        return True

    def _echo(self) -> None:
        self._loop_thread = threading.get_ident()
        self._echoed_at = time.monotonic()
        if self._asked_at is not None:
            self._lag_s = self._echoed_at - self._asked_at
            self._asked_at = None

    def _report(self, *, since: float, now: float, held: bool) -> None:
        frame = sys._current_frames().get(self._loop_thread or -1)
        elsewhere = self._in_threads() if held else ()
        if frame is None or (_is_idle(frame) and not elsewhere):
            return
        running = asyncio.current_task(self._loop)
        if running is not None and elsewhere and not self._is_code(running):
            running = None
        names = (*(() if running is None else (self._name(running),)), *elsewhere)
        self._blocked, self._blocked_since = names, since
        stack = "".join(traceback.format_list(traceback.extract_stack(frame, limit=_STACK_FRAMES)))
        self._emit(LoopBlocked(names=names, seconds=now - since, interpreter_held=held, stack=stack))

    def _report_end(self) -> None:
        names, self._blocked = self._blocked or (), None
        self._emit(LoopFreed(names=names, seconds=self._echoed_at - self._blocked_since))

    def _name(self, task: asyncio.Task[Any]) -> str:
        try:
            return self._describe(task)
        except Exception:  # noqa: BLE001 - a name that cannot be made must not hide the block
            return name_of(task)


def _is_idle(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _IDLE_MODULES


def _waited_for_the_gil(switches: int, seconds: float) -> bool:
    # Who waits for the GIL wakes every switch interval to ask for it again; who is stopped, or gets no
    # processor, does not. A third of these wakeups is enough: a busy machine delays them.
    return not _COUNTS_SWITCHES or switches * sys.getswitchinterval() >= seconds / 3


def _voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if _COUNTS_SWITCHES else 0
