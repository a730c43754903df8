"""Run generators that yield requests, so that the same code works in threads and on event loops."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def perform(plan: Generator[Any, Any, T], do: Callable[[Any], Any]) -> T:
    """Run a plan in this thread and return its result. `do` performs each yielded step, and its errors are raised inside the plan."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = plan.send(answer) if failure is None else plan.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            answer, failure = do(step), None
        except BaseException as error:  # noqa: BLE001 - the plan can handle the error; otherwise `throw` raises it
            failure = error


async def aperform(plan: Generator[Any, Any, T], do: Callable[[Any], Awaitable[Any]]) -> T:
    """Run a plan like `perform`, but on the running event loop."""
    answer: Any = None
    failure: BaseException | None = None
    while True:
        try:
            step = plan.send(answer) if failure is None else plan.throw(failure)
        except StopIteration as end:
            value: T = end.value
            return value
        try:
            answer, failure = await do(step), None
        except BaseException as error:  # noqa: BLE001 - as above
            failure = error
