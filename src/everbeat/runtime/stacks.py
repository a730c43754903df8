"""Where code stands at this moment, as text for a log: a coroutine down to what it awaits, a thread, without stopping either.

What lives here: reading frames. What may not: whose code it is, and processes, which write their stacks themselves
(`parent.offer_stack_dumps`).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import traceback
from collections.abc import Iterator
from types import AsyncGeneratorType, FrameType
from typing import Any, Final

_MOST_FRAMES: Final = 50
_UNKNOWN: Final = "(it cannot be told where)"


def coroutine_stack(task: asyncio.Task[Any]) -> str:
    """The frames of a suspended task, the outermost first, through all that it awaits."""
    summary = traceback.StackSummary.extract(
        ((frame, frame.f_lineno) for frame in _awaited(task.get_coro())), limit=_MOST_FRAMES
    )
    return "".join(summary.format()) or _UNKNOWN


def thread_stack(identifier: int | None) -> str:
    """The frames of a thread, the outermost first."""
    frame = None if identifier is None else sys._current_frames().get(identifier)
    if frame is None:
        return _UNKNOWN
    return "".join(traceback.format_list(traceback.extract_stack(frame, limit=_MOST_FRAMES)))


def _awaited(awaitable: object) -> Iterator[FrameType]:
    """Coroutines, generators and asynchronous generators name their frame and their successor each in its own words."""
    while awaitable is not None:
        frames = (getattr(awaitable, f"{prefix}_frame", None) for prefix in ("cr", "gi", "ag"))
        yield from (frame for frame in frames if frame is not None)
        awaitable = _successor(awaitable)


def _successor(awaitable: object) -> object:
    for name in ("cr_await", "gi_yieldfrom", "ag_await"):
        if hasattr(awaitable, name):
            return getattr(awaitable, name)
    # The step of an asynchronous generator does not say whose step it is; the garbage collector knows.
    return next((each for each in gc.get_referents(awaitable) if isinstance(each, AsyncGeneratorType)), None)
