"""Signals of the main thread: as calls on its event loop, or by handlers of our own; never in what user code forks."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals_call(call: Callable[[], object], *, numbers: Sequence[int]) -> Iterator[None]:
    """Inside, each of these signals is a call in the running loop; outside the main thread signals are left alone."""
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
    """Have `handler` called for this signal from now on, in this process but not in what it forks; in the main thread."""
    _, before = _taken.get(number, (None, signal.getsignal(number)))
    signal.signal(number, handler)
    _taken[number] = handler, before


_taken: dict[int, tuple[Any, Any]] = {}
"""By number, our handler and the one before it."""


_thread = threading.local()


def _block_before_fork() -> None:
    # A signal that reaches the child in its first moments would still find our handlers there, and be lost or passed to the parent.
    _thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _taken)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _thread.mask)


def _give_back_in_child() -> None:
    if _taken:
        # A child would write the signals that it gets into the pipe of its parent's loop, which would take them for its own.
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
