"""Registering the recovery hooks of an app: one for each scope, refused where it is taken or cannot be called.

What lives here: the registry and the types of its decorators. What may not: calling hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, Protocol, TypeAlias, TypeVar, cast, overload

from everbeat.domain.checks import task_name
from everbeat.domain.gathering import StandIn, attempt, raise_or_gather
from everbeat.domain.hooks import Hook, HookAnswer, HookKind, HookSet, RecoveryContext, SweepSummary
from everbeat.domain.signature import is_async_function, location_of
from everbeat.errors import RegistrationError

DecidingHook: TypeAlias = Callable[[RecoveryContext], HookAnswer | Awaitable[HookAnswer]]
InterruptedHook: TypeAlias = Callable[[RecoveryContext], object]
RecoveredHook: TypeAlias = Callable[[SweepSummary], object]

D = TypeVar("D", bound=DecidingHook)
F = TypeVar("F", bound=Callable[..., Any])

_GIVEN: Final[Mapping[HookKind, str]] = {
    "on_recovery": "RecoveryContext",
    "on_interrupted": "RecoveryContext",
    "on_recovered": "SweepSummary",
}


class RecoveryDecorator(Protocol):
    """`@app.on_recovery`, with or without the name of a task."""

    @overload
    def __call__(self, function: D, /) -> D: ...
    @overload
    def __call__(self, *, task: str | None = None) -> Callable[[D], D]: ...


class HookRegistry:
    """The hooks of one app as they are registered."""

    def __init__(self) -> None:
        self._recovery: dict[str | None, Hook] = {}
        self._others: dict[HookKind, Hook] = {}

    def hooks(self) -> HookSet:
        """Those registered so far."""
        return HookSet(
            recovery=dict(self._recovery),
            interrupted=self._others.get("on_interrupted"),
            recovered=self._others.get("on_recovered"),
        )

    def deciding(self, function: D | None = None, /, *, task: str | None = None) -> Any:
        """The decorator of `on_recovery`."""
        if task is not None:
            attempt(lambda: task_name(task, subject="on_recovery.task"), otherwise=task)

        def register(hook: D) -> D:
            made = _hook("on_recovery", hook, task=task)
            scope = "for all tasks" if task is None else f"for task {task!r}"
            if made is not None and self._is_free(made, self._recovery.get(task), scope):
                self._recovery[task] = made
            return hook if callable(hook) else cast(D, StandIn())

        return register if function is None else register(function)

    def other(self, kind: HookKind, function: F) -> F:
        """The decorator of the hooks that are only told."""
        made = _hook(kind, function)
        if made is not None and self._is_free(made, self._others.get(kind), "of this app"):
            self._others[kind] = made
        return function

    def _is_free(self, hook: Hook, taken: Hook | None, scope: str) -> bool:
        if taken is None:
            return True
        raise_or_gather(
            RegistrationError(
                f"There is already an {hook.kind} hook {scope}: {taken.name}, by {taken.where}.",
                fix="let one function decide, or limit one of them to a task: @app.on_recovery(task=...)."
                if hook.kind == "on_recovery"
                else "let one function call the others.",
                where=hook.where,
            )
        )
        return False


def _hook(kind: HookKind, function: Callable[..., Any], *, task: str | None = None) -> Hook | None:
    where = location_of(function) if callable(function) else None
    problem = _problem(function)
    if problem is not None:
        raise_or_gather(
            RegistrationError(
                f"{function!r} cannot be an {kind} hook: {problem}.",
                fix="name the task: @app.on_recovery(task=...)."
                if isinstance(function, str)
                else f"write a `def` or `async def` with one parameter, the {_GIVEN[kind]}.",
                where=where,
            )
        )
        return None
    return Hook(kind=kind, function=function, is_async=is_async_function(function), task=task, where=where)


def _problem(function: Callable[..., Any]) -> str | None:
    if not callable(function):
        return "it is not a function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "it is a generator"
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return "it cannot be called with one argument"
    return None
