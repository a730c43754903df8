"""Signals of the main thread as calls on its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def signals_call(call: Callable[[], object], *, numbers: Sequence[int]) -> Iterator[None]:
    """Inside, each of these signals is a call in the running loop; outside the main thread signals are left alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, call)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
