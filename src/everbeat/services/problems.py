"""One part of a look that fails must not keep the other parts from being done."""

from __future__ import annotations

from collections.abc import Awaitable, Callable


async def problem_of(part: Callable[[], Awaitable[object]]) -> Exception | None:
    """Do one part and return the error that kept it from being done, for the caller to raise after the other parts."""
    try:
        await part()
    except Exception as problem:  # noqa: BLE001 - the caller raises it
        return problem
    return None
