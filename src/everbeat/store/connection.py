"""Connections to PostgreSQL whose sockets no forked child keeps, from the first packet to the last."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from psycopg import AsyncConnection, BaseConnection, Connection

from everbeat.runtime.fork import close_in_forked_child


class _Own(BaseConnection[Any]):
    """A connection of everbeat's own. A child that user code forks would otherwise keep its session alive."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        close_in_forked_child(self)

    @classmethod
    def _connect_gen(cls, *arguments: Any, **named: Any) -> Any:
        return _watched(super()._connect_gen(*arguments, **named))


class OwnConnection(_Own, Connection[Any]):
    """One for threads."""


class OwnAsyncConnection(_Own, AsyncConnection[Any]):
    """One for event loops."""


class _Attempt:
    """The socket of a connection that is being made; libpq owns it, and may replace it by another."""

    def __init__(self) -> None:
        self._number = -1
        self._identity: tuple[int, int] | None = None

    def is_at(self, number: int) -> None:
        """libpq waits for this descriptor now."""
        if number != self._number:
            self._number, self._identity = number, _identity_of(number)

    def fileno(self) -> int:
        """The descriptor, unless libpq has closed it and its number belongs to something else."""
        return self._number if self._identity == _identity_of(self._number) else -1


def _identity_of(number: int) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.fstat(number)
        return found.st_dev, found.st_ino
    return None


def _watched(connecting: Generator[tuple[int, Any], Any, Any]) -> Generator[tuple[int, Any], Any, Any]:
    attempt, answer = _Attempt(), None
    close_in_forked_child(attempt)
    while True:
        try:
            number, wanted = connecting.send(answer)
        except StopIteration as end:
            return end.value
        attempt.is_at(number)
        answer = yield number, wanted
