"""Context managers that users write as functions: generators, or factories of context managers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from msgspec import Struct

from everbeat.domain.task.steps import location_of
from everbeat.errors import RegistrationError


class ManagerFactory(Struct, frozen=True, kw_only=True):
    """A user's function that returns a context manager. `where` is the `file:line` of its definition, or empty if unknown."""

    name: str
    where: str
    is_async: bool
    make: Callable[..., Any]

    def __str__(self) -> str:
        return f"{self.name!r} ({self.where})" if self.where else repr(self.name)


def manager_factory(function: Any, *, what: str, parameters: int, takes: str) -> ManagerFactory:
    """Return the factory for a user's function. `what` names the registration in errors, `takes` the parameters.

    Raises RegistrationError if the function is neither a generator function nor a factory of context managers.
    """
    where = location_of(function) if callable(function) else None
    name = str(getattr(function, "__name__", type(function).__name__))
    made = _made(function)
    if made is None or not _accepts(function, parameters):
        problem = (
            f"cannot be called with {takes}"
            if made is not None
            else "is neither a generator function nor a function that makes context managers"
        )
        raise RegistrationError(
            f"{function!r} cannot be {what}: it {problem}.",
            fix=f"write a `def` or `async def` with {takes} and exactly one `yield`.",
            where=where,
        )
    make, is_async = made
    return ManagerFactory(name=name, where=where or "", is_async=is_async, make=make)


def _made(function: Any) -> tuple[Callable[..., Any], bool] | None:
    """Return a function that makes context managers, and whether they are async. Return None for any other function."""
    if inspect.isasyncgenfunction(function):
        return asynccontextmanager(function), True
    if inspect.isgeneratorfunction(function):
        return contextmanager(function), False
    if isinstance(function, type):
        for name, is_async in (("__enter__", False), ("__aenter__", True)):
            if hasattr(function, name):
                return function, is_async
        return None
    # contextmanager and asynccontextmanager leave the generator function in `__wrapped__`.
    inner = inspect.unwrap(function) if callable(function) else function
    if inner is not function and inspect.isasyncgenfunction(inner):
        return function, True
    if inner is not function and inspect.isgeneratorfunction(inner):
        return function, False
    return None


def _accepts(function: Any, parameters: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * parameters)
    except (TypeError, ValueError):
        return False
    return True
