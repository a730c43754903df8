"""A task function as the worker sees it: what to run, how to read its arguments, and its options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from everbeat.domain.codec import CallCodec
from everbeat.domain.policy import TaskOptions

RunIn = Literal["async", "thread", "process"]


class TaskDefinition(Struct, frozen=True, kw_only=True):
    """One registered task function; `where` is the `file:line` of its definition."""

    name: str
    function: Callable[..., Any]
    is_async: bool
    codec: CallCodec
    options: TaskOptions
    where: str

    @property
    def run_in(self) -> RunIn:
        """Where its code runs: as asked, else on the loop for `async def` and in a thread for `def`."""
        return self.options.run_in or ("async" if self.is_async else "thread")
