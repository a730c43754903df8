"""Two faces of one method: written once as a plan, called by threads and awaited by event loops.

What lives here: `blocking` and `awaiting`. What may not: any particular method.

    class App:
        def _cancel(self, task_id: UUID) -> Plan[CancelResult]: ...

        cancel = blocking(_cancel)
        acancel = awaiting(_cancel)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from everbeat.client.door import Door
from everbeat.store.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")


class HasDoor(Protocol):
    """Whatever asks the database through a door."""

    @property
    def door(self) -> Door: ...


S = TypeVar("S", bound=HasDoor)


def blocking(plan: Callable[Concatenate[S, P], Plan[T]]) -> Callable[Concatenate[S, P], T]:
    """The face for threads; refuses to run inside an event loop, naming its twin."""
    name = plan.__name__.removeprefix("_")

    @functools.wraps(plan)
    def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        owner = type(self).__name__
        return self.door.run(plan(self, *args, **kwargs), name=f"{owner}.{name}", twin=f"{owner}.a{name}")

    return _named(method, plan, name)


def awaiting(
    plan: Callable[Concatenate[S, P], Plan[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The face for event loops."""

    @functools.wraps(plan)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.door.arun(plan(self, *args, **kwargs))

    return _named(method, plan, f"a{plan.__name__.removeprefix('_')}")


M = TypeVar("M", bound=Callable[..., Any])


def _named(method: M, plan: Callable[..., Any], name: str) -> M:
    method.__name__ = name
    method.__qualname__ = f"{plan.__qualname__.rpartition('.')[0]}.{name}"
    return method
