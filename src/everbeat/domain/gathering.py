"""Collecting mistakes instead of raising the first: how `everbeat check` reads a user's module to its end.

What lives here: `gathering`, and what those who find a mistake call. Outside `gathering()` they simply raise. What may
not: finding mistakes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Self, TypeVar, cast

from msgspec import Struct

from everbeat.errors import EverbeatError

T = TypeVar("T")


class Mistake(Struct, frozen=True):
    """An error that was not raised; `where` is the `file:line` of the user's code that made it."""

    error: EverbeatError
    where: str | None


_mistakes: ContextVar[list[Mistake] | None] = ContextVar("everbeat_mistakes", default=None)


@contextmanager
def gathering() -> Iterator[list[Mistake]]:
    """Within it, code of this thread that everbeat would refuse goes on with defaults and stand-ins."""
    mistakes: list[Mistake] = []
    token = _mistakes.set(mistakes)
    try:
        yield mistakes
    finally:
        _mistakes.reset(token)


def raise_or_gather(error: EverbeatError) -> None:
    """Raises the error; returns only where somebody gathers."""
    mistakes = _mistakes.get()
    if mistakes is None:
        raise error
    mistakes.append(Mistake(error, place_of_caller()))


def attempt(make: Callable[[], T], *, otherwise: object) -> T:
    """What `make` gives; `otherwise`, of the same shape, only where somebody gathers and it raised."""
    try:
        return make()
    except EverbeatError as error:
        raise_or_gather(error)
        return cast(T, otherwise)


class StandIn:
    """What takes the place of a task that could not be registered: it bears everything, so that reading goes on."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Self:
        return self

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


def place_of_caller() -> str | None:
    """`file:line` of the nearest code outside everbeat and the standard dataclasses."""
    frame = sys._getframe(1)
    while frame is not None:
        room = frame.f_globals.get("__name__", "")
        if room != "dataclasses" and not f"{room}.".startswith("everbeat."):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
