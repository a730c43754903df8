"""The border between code that blocks and event loops.

What lives here: the refusal of blocking calls on a loop, and work on a loop that no cancellation breaks off. What may not:
what is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from everbeat.errors import BlockingCallInLoop

T = TypeVar("T")


def refuse_in_loop(name: str, *, twin: str | None = None, instead: str | None = None) -> None:
    """Raises BlockingCallInLoop if an event loop runs in this thread; `twin` is awaited, or something else done instead."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise BlockingCallInLoop(name, twin, instead=instead)


async def unbroken(work: Coroutine[Any, Any, T]) -> T:
    """Awaits it to its end, whatever cancels the waiter meanwhile; the cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as problem:
            cancelled = problem
    if cancelled is not None:
        task.cancelled() or task.exception()  # looked at, so that asyncio does not complain of it
        raise cancelled
    return task.result()
