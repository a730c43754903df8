"""Run a process's main coroutine with signal handling, and report when its event loop is blocked."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import AsyncGeneratorType, FrameType
from typing import Any, Final, NoReturn, TypeVar

from everbeat.runtime.blocking import LastingExecutor
from everbeat.runtime.events import LoopBlocked, LoopFreed
from everbeat.runtime.failure_log import LOG
from everbeat.runtime.fork import loop_of_this_thread
from everbeat.runtime.processes import EXIT_CODE_RUNS as EXIT_CODE_RUNS
from everbeat.runtime.processes import EXIT_SLOTS_LEAKED as EXIT_SLOTS_LEAKED
from everbeat.runtime.processes import EXIT_UNSETTLED as EXIT_UNSETTLED
from everbeat.runtime.processes import cut_off_later

Result = TypeVar("Result")

WIND_UP_PATIENCE_S: Final = 0.5
"""How many seconds the remaining tasks on the loop may take to finish. asyncio.Runner would wait forever for code that suppresses its
cancellation."""

_log = logging.getLogger("everbeat.runtime")


def run_through(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` to completion in a new loop, even if stray tasks on the loop call `sys.exit`, raise KeyboardInterrupt or never finish."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.set_default_executor(LastingExecutor())
    with loop_of_this_thread(loop):
        try:
            return _run_to_its_end(loop, main)
        finally:
            try:
                _run_to_its_end(loop, _wind_up())
            finally:
                asyncio.set_event_loop(None)
                loop.close()


def _run_to_its_end(loop: asyncio.AbstractEventLoop, main: Coroutine[Any, Any, Result]) -> Result:
    task = loop.create_task(main)
    while True:
        try:
            return loop.run_until_complete(task)
        except (SystemExit, KeyboardInterrupt) as problem:
            # asyncio passes on these two exceptions from any of its tasks. Only those of the main coroutine may exit the process.
            if task.done():
                raise
            _log.error("exit_refused reason=%r", problem)


async def _wind_up() -> None:
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        _, running = await asyncio.wait(left, timeout=WIND_UP_PATIENCE_S)
        if running:
            _log.warning("left_behind tasks=%s", ", ".join(sorted(task.get_name() for task in running)))
    ending = loop.create_task(loop.shutdown_asyncgens())
    await asyncio.wait({ending}, timeout=WIND_UP_PATIENCE_S)


@contextmanager
def signals_call(call: Callable[[], object], *, numbers: Sequence[int]) -> Iterator[None]:
    """Inside the block, call `call` in the running loop on each of the given signals. Outside the main thread, this does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in numbers:
        before = signal.getsignal(number)
        loop.add_signal_handler(number, call)
        _taken[number] = signal.getsignal(number), before
    try:
        yield
    finally:
        for number in numbers:
            _taken.pop(number, None)
            loop.remove_signal_handler(number)


def take_signal(number: int, handler: Callable[[int, Any], object]) -> None:
    """Install `handler` for this signal in this process, but not in its forked children. Call this in the main thread."""
    _, before = _taken.get(number, (None, signal.getsignal(number)))
    signal.signal(number, handler)
    _taken[number] = handler, before


_taken: dict[int, tuple[Any, Any]] = {}
"""For each signal number, everbeat's handler and the previous handler."""


_thread = threading.local()


def _block_before_fork() -> None:
    # A signal that reaches the child right after the fork would still call these handlers. It would be lost or passed to the parent.
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _taken)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _give_back_in_child() -> None:
    if _taken:
        # A child would write its signals to the pipe of its parent's loop, and the parent would handle them.
        signal.set_wakeup_fd(-1)
    for number, (ours, before) in _taken.items():
        if before is not None and signal.getsignal(number) is ours:
            signal.signal(number, before)
    _taken.clear()
    _unblock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_block_before_fork, after_in_parent=_unblock, after_in_child=_give_back_in_child
    )

EXIT_ORDERLY: Final = 0


def leave(code: int) -> NoReturn:
    """Exit with `code`. Log handlers, user code's threads and exit handlers have 1 s to finish; then the process is terminated."""
    cut_off_later(code)
    LOG.flush()  # the exit handler comes last and can be too late
    sys.exit(code)


try:
    import resource

    _COUNTS_SWITCHES = hasattr(resource, "RUSAGE_THREAD")  # macOS does not count context switches per thread.
except ImportError:  # Windows
    _COUNTS_SWITCHES = False


_LONGEST_PERIOD_S: Final = 0.5
_STACK_FRAMES: Final = 30
# An idle loop waits in these modules. It is not blocked there, even if the whole process was stopped in the meantime.
_IDLE_MODULES: Final = ("selectors", "asyncio.windows_events")


def name_of(task: asyncio.Task[Any]) -> str:
    """Return the task's name in asyncio."""
    return task.get_name()


class LoopWatch:
    """Emits one event when `loop` has been blocked for `threshold_s` seconds, and another when it is running again.

    A daemon thread requests an echo from the loop twice a second, and at least twice within `threshold_s`. `describe` returns the public
    name of the blocking coroutine. `emit` is called from the daemon thread. Code that holds the GIL stops this thread too. In that case,
    the event follows once the GIL is released, with the stack of the code that held it.

    Any thread might have held the GIL: `in_threads` names the code in other threads. If `is_code` returns False for a coroutine, it was
    only waiting for the GIL and is not named.
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
        """Start watching. Call this once, from any thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and wait up to 1 s for the watch thread to finish."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=1.0)

    def lag_s(self) -> float:
        """Return the loop's lag in seconds: the age of the pending echo, or the delay of the last echo."""
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
                self._forgiven_s += overslept  # The whole process was stopped, not the loop alone.
            try:
                self._check(now, overslept, held=waited_for_the_gil and overslept > self._threshold_s)
            except Exception:  # noqa: BLE001 - a broken listener must not stop the watch thread
                _log.exception("loop_watch_failed")
            if self._loop.is_closed() or (self._asked_at is None and not self._ask()):
                return

    def _check(self, now: float, overslept: float, *, held: bool) -> None:
        asked_at = self._asked_at
        if asked_at is None:
            if self._blocked is not None:
                self._report_end()
            if held:
                # Nothing in this process has run since the last echo, not even this thread. Report at once, because the code that held the
                # GIL has executed only a few more instructions.
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
        running = asyncio.current_task(self._loop)
        is_waiting = running is not None and not self._is_code(running)
        # Only code blocks the loop for long. Any other task waits for the GIL. A thread can hold it in several calls, between which the
        # watch gets it before the loop does.
        elsewhere = self._in_threads() if held or is_waiting else ()
        if frame is None or (_is_idle(frame) and not elsewhere):
            return
        if elsewhere and is_waiting:
            running, held = None, True
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
        except Exception:  # noqa: BLE001 - a block must be reported even if the name cannot be determined
            return name_of(task)


def _is_idle(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") in _IDLE_MODULES


def _waited_for_the_gil(switches: int, seconds: float) -> bool:
    # A thread that is waiting for the GIL wakes up every switch interval to request it again. A stopped thread, or a thread without a CPU, does
    # not wake up. A third of these wakeups is enough, because a busy machine delays them.
    return not _COUNTS_SWITCHES or switches * sys.getswitchinterval() >= seconds / 3


def _voluntary_switches() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if _COUNTS_SWITCHES else 0


_MOST_FRAMES: Final = 50
_UNKNOWN: Final = "(unknown place)"


def coroutine_stack(task: asyncio.Task[Any]) -> str:
    """Return the frames of a suspended task, outermost first, including everything that it awaits."""
    summary = traceback.StackSummary.extract(
        ((frame, frame.f_lineno) for frame in _awaited(task.get_coro())), limit=_MOST_FRAMES
    )
    return "".join(summary.format()) or _UNKNOWN


def thread_stack(identifier: int | None) -> str:
    """Return the frames of a thread, outermost first."""
    frame = None if identifier is None else sys._current_frames().get(identifier)
    if frame is None:
        return _UNKNOWN
    return "".join(traceback.format_list(traceback.extract_stack(frame, limit=_MOST_FRAMES)))


def _awaited(awaitable: object) -> Iterator[FrameType]:
    """Yield the frames of nested awaitables. Coroutines, generators and async generators name the frame and the next awaitable differently."""
    while awaitable is not None:
        frames = (getattr(awaitable, f"{prefix}_frame", None) for prefix in ("cr", "gi", "ag"))
        yield from (frame for frame in frames if frame is not None)
        awaitable = _successor(awaitable)


def _successor(awaitable: object) -> object:
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(awaitable, name):
            return getattr(awaitable, name)
    # The step of an async generator has no attribute for its generator, but the garbage collector can find the generator.
    return next((each for each in gc.get_referents(awaitable) if isinstance(each, AsyncGeneratorType)), None)
