"""Looking at a measurement: the clock, and waiting for a moment that is seen from outside."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from everbeat.errors import WorkerError
from everbeat.runtime.clock import SystemClock
from everbeat.store.statement import compose

T = TypeVar("T")


class Plain(Protocol):
    """A bare connection of psycopg in autocommit, as the store opens it."""

    def execute(self, query: bytes, params: Any = None, *, prepare: bool | None = None) -> Any: ...

    def cursor(self) -> Any: ...

    def close(self) -> None: ...


def calm(connection: Plain, schema: str, *vacuums: str) -> None:
    """What was filled in is cleaned up and on disk: the server has nothing left to do for it during a measurement."""
    for name in vacuums:
        connection.execute(compose(f"bench/{name}", schema))
    row = connection.execute(compose("bench/may_checkpoint", schema)).fetchone()
    if row and row[0]:
        connection.execute(compose("bench/checkpoint", schema))


def pause(seconds: float) -> None:
    """Lets time pass: what is measured goes on in other processes."""
    threading.Event().wait(seconds)


def timed(what: Callable[[], object]) -> float:
    """How long it took, in seconds."""
    clock = SystemClock()
    began = clock.monotonic()
    what()
    return clock.monotonic() - began


def until(look: Callable[[], T | None], *, within_s: float, what: str, every_s: float = 0.005) -> T:
    """The first answer that is something. Raises WorkerError when there is none in time."""
    clock = SystemClock()
    give_up_at = clock.monotonic() + within_s
    while clock.monotonic() < give_up_at:
        found = look()
        if found:
            return found
        pause(every_s)
    raise WorkerError(
        f"The benchmark waited {within_s:g} s in vain for this: {what}.",
        fix="see above what its worker wrote.",
    )
