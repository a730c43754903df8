"""What can be told of a function from outside: whether it is async, where it is written, what it gives in the end.

What lives here: these looks. What may not: whether a function can be a task (`signature`).
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Awaitable, Callable
from typing import Any


def is_async_function(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives something to await, also through decorators that wrap it."""
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(inspect.unwrap(function)):
        return True
    returned = getattr(function, "__annotations__", {}).get("return")
    origin = typing.get_origin(returned)
    return isinstance(origin, type) and issubclass(origin, Awaitable)


def location_of(function: Callable[..., Any]) -> str | None:
    """`file:line` of the function's definition, or None for one that was not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def returned_type(hint: Any) -> Any:
    """What a function gives in the end, by the annotation of its result: also where that is to be awaited."""
    if hint in (typing.NoReturn, typing.Never):
        return None
    origin = typing.get_origin(hint)
    if isinstance(origin, type) and issubclass(origin, Awaitable):
        return typing.get_args(hint)[-1]
    return hint
