"""Blocking calls from an event loop, also when the program's main thread has ended.

What lives here: the executor. What may not: what is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class LastingExecutor(ThreadPoolExecutor):
    """The usual pool; once Python has closed all pools, which it does when the main thread ends, a thread for each call.

    A worker that runs in another thread of a program goes on after the program's main thread; without this it could
    resolve no host name any more, and not leave in good order.
    """

    def submit(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """As any executor."""
        try:
            return super().submit(function, *args, **kwargs)
        except RuntimeError:
            future: Future[R] = Future()

            def call() -> None:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(*args, **kwargs))
                    except BaseException as error:  # noqa: BLE001 - whatever it is, it belongs to the caller
                        future.set_exception(error)

            threading.Thread(target=call, name="everbeat-call", daemon=True).start()
            return future
