"""One try at a time for all threads and event loops of a process, without a call that waits longer than it wants to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Runs a function that several calls want to succeed once. The first call tries, and the others wait for its end.

    If the try fails, the next call tries, unless its time is over. `left_s` says how many seconds a call still waits for another's
    try; a call's own try must end in time by itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Future[T] | None = None

    def run(self, attempt: Callable[[], T], left_s: Callable[[], float]) -> T:
        """Return the result of a try. Raises TimeoutError if another's try has not ended in time, and what `attempt` raises."""
        while True:
            current, is_own = self._take()
            if is_own:
                self._try(current, attempt)
                return current.result()
            while not current.done() and (wait_s := left_s()) > 0:
                futures.wait([current], timeout=wait_s)
            if _is_last(current, left_s):
                return _result_of_another(current)

    async def arun(self, attempt: Callable[[], T], left_s: Callable[[], float]) -> T:
        """The twin of `run`. The try has a thread of its own: those of the loop's executor stay free, and no end waits for it."""
        while True:
            current, is_own = self._take()
            waited_for = asyncio.wrap_future(current)
            if is_own:
                arguments = (current, attempt)
                trying = threading.Thread(target=self._try, args=arguments, name="everbeat-open", daemon=True)
                try:
                    trying.start()
                except RuntimeError as problem:  # no more threads
                    self._end(current, problem)
                return await waited_for
            while not current.done() and (wait_s := left_s()) > 0:
                await asyncio.wait([waited_for], timeout=wait_s)
            waited_for.cancel()
            if _is_last(current, left_s):
                return _result_of_another(current)

    def _take(self) -> tuple[Future[T], bool]:
        with self._lock:
            if self._current is not None:
                return self._current, False
            self._current = Future()
            self._current.set_running_or_notify_cancel()  # no call that gives up cancels it for the others
            return self._current, True

    def _try(self, current: Future[T], attempt: Callable[[], T]) -> None:
        try:
            result = attempt()
        except BaseException as problem:  # noqa: BLE001 - raised by those who wait
            self._end(current, problem)
        else:
            self._current = None
            current.set_result(result)

    def _end(self, current: Future[T], problem: BaseException) -> None:
        self._current = None
        current.set_exception(problem)


def _result_of_another(current: Future[T]) -> T:
    """Raises TimeoutError for a try that has not ended or was interrupted: the interruption was meant for one call."""
    if current.done() and isinstance(current.exception(), Exception | None):
        return current.result()
    raise TimeoutError


def _is_last(current: Future[T], left_s: Callable[[], float]) -> bool:
    """Whether a call that has waited tries no more: the try succeeded, or its time is over."""
    return (current.done() and current.exception() is None) or left_s() <= 0
