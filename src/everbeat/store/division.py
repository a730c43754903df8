"""A batch that PostgreSQL refuses for its data, divided until the guilty row is alone: its neighbours are written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from everbeat.store.refusals import is_refused_data

RowT = TypeVar("RowT")
WrittenT = TypeVar("WrittenT")


async def divided(
    batch: Sequence[RowT],
    write: Callable[[Sequence[RowT]], Awaitable[list[WrittenT]]],
    refused: Callable[[RowT, Exception], Awaitable[list[WrittenT]]],
    *,
    is_refused: Callable[[BaseException], bool] = is_refused_data,
) -> list[WrittenT]:
    """Return what `write` answers for all parts of the batch, and what `refused` answers for each row that is refused alone.

    `is_refused`: which errors speak of the rows. Any other one is raised.
    """
    try:
        return await write(batch)
    except Exception as problem:
        if not is_refused(problem):
            raise
        if len(batch) == 1:
            return await refused(batch[0], problem)
    middle = len(batch) // 2
    first = await divided(batch[:middle], write, refused, is_refused=is_refused)
    return first + await divided(batch[middle:], write, refused, is_refused=is_refused)
