"""Two faces of one method: written once as a plan, called by threads and awaited by event loops.

What lives here: `blocking` and `awaiting`. What may not: any particular method.

    class App:
        def _cancel(self, task_id: UUID) -> Plan[CancelResult]: ...

        cancel = blocking(_cancel)
        acancel = awaiting(_cancel)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from everbeat.client.door import Door
from everbeat.domain.settings import shown
from everbeat.errors import ConfigurationError, Problem, nearest
from everbeat.store.plan import Plan

P = ParamSpec("P")
T = TypeVar("T")

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


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
        return self.door.run(
            begun(plan, name, self, *args, **kwargs), name=f"{owner}.{name}", twin=f"{owner}.a{name}"
        )

    return _named(method, plan, name)


def awaiting(
    plan: Callable[Concatenate[S, P], Plan[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """The face for event loops."""
    name = f"a{plan.__name__.removeprefix('_')}"

    @functools.wraps(plan)
    async def method(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.door.arun(begun(plan, name, self, *args, **kwargs))

    return _named(method, plan, name)


def begun(
    plan: Callable[Concatenate[S, P], Plan[T]], name: str, owner: S, /, *args: P.args, **kwargs: P.kwargs
) -> Plan[T]:
    """The plan of a call. Raises ConfigurationError for an argument of an unknown name, TypeError for other wrong calls."""
    try:
        return plan(owner, *args, **kwargs)
    except TypeError:
        signature = inspect.signature(plan)
        try:
            signature.bind(owner, *args, **kwargs)
        except TypeError as mistake:
            raise _wrong_call(f"{type(owner).__name__}.{name}", signature, kwargs, mistake) from None
        raise


def _wrong_call(
    subject: str, signature: inspect.Signature, given: Mapping[str, object], mistake: TypeError
) -> Exception:
    known = [each.name for each in signature.parameters.values() if each.kind in _NAMED][1:]
    problems = []
    for name in given.keys() - known:
        guess = nearest(name, known)
        problems.append(
            Problem(
                code="UNKNOWN_NAME",
                subject=f"{subject}.{name}",
                value=shown(given[name]),
                rule=f"{subject} has no argument of this name",
                fix=f"use {guess}" if guess else f"use one of {', '.join(known) or 'none'}",
            )
        )
    return ConfigurationError(problems) if problems else TypeError(f"{subject}(): {mistake}")


M = TypeVar("M", bound=Callable[..., Any])


def _named(method: M, plan: Callable[..., Any], name: str) -> M:
    method.__name__ = name
    method.__qualname__ = f"{plan.__qualname__.rpartition('.')[0]}.{name}"
    return method
