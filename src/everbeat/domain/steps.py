"""What running code says of its steps, checked before anything is made of it.

What lives here: the rules of progress and of the items of a `resume`. What may not: counting steps (`checkpoint`).
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterable
from typing import Any

from everbeat.domain.settings import shown
from everbeat.errors import PayloadError


def share_of(stage: object, fraction: Any, *, task_name: str) -> float | None:
    """The fraction cut to 0..1; None where it is unknown. Raises PayloadError unless stage and fraction are what they should be."""
    if not isinstance(stage, str):
        raise PayloadError(
            f"The stage {shown(stage)} of Context.progress in task {task_name!r} is of type {type(stage).__name__}, not a text.",
            parameter="stage",
            fix="name the stage first, then the fraction: ctx.progress('resize', 0.5).",
        )
    try:
        if fraction is None or _is_nan(fraction):
            return None
        return float(min(max(fraction, 0.0), 1.0))
    except (TypeError, ValueError):
        raise PayloadError(
            f"The fraction {shown(fraction)} of Context.progress in task {task_name!r} is of type "
            f"{type(fraction).__name__}, not a number.",
            parameter="fraction",
            fix="pass a number from 0 to 1 such as n / total, or None where it is unknown.",
        ) from None


def _is_nan(fraction: Any) -> bool:
    if isinstance(fraction, bool):
        raise TypeError
    try:
        return math.isnan(fraction)
    except OverflowError:  # an int beyond all floats
        return False


def require_items(items: object, *, name: str, task_name: str) -> None:
    """Raises PayloadError unless a `for` can walk over the items, in the same order in every process."""
    is_set = isinstance(items, (set, frozenset))
    if not is_set and (hasattr(type(items), "__iter__") or hasattr(type(items), "__getitem__")):
        return
    fix = "pass a list, a range or another iterable, in the same order each time"
    what = f"are of type {type(items).__qualname__}, which no loop can walk over"
    if is_set:
        what = f"are of type {type(items).__qualname__}, whose order may be another one in the next process"
        fix = "pass them in an order that stays: sorted(...)"
    elif isinstance(items, AsyncIterable):
        what = f"are asynchronous (of type {type(items).__qualname__}), which a plain loop cannot walk over"
        fix = "write 'async for ... in Context.aresume(...)' in an async task, or pass a list, a range or another iterable"
    elif type(items) is int:
        fix = f"pass range({items}) to do so many steps, or a list or another iterable"
    raise PayloadError(
        f"The items {shown(items)} of the resume {name!r} in task {task_name!r} {what}.",
        parameter="items",
        fix=f"{fix}.",
    )
