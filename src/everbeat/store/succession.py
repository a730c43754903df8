"""What a session does about the backends of its earlier connections that the server has not ended yet.

A backend that waits for a standby does not notice that its client has hung up. So a session that connected again and again
would leave more and more of them behind.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from itertools import count
from typing import Any, Final

import psycopg
from psycopg import AsyncConnection

from everbeat.store.statement import compose
from everbeat.store.target import is_pooled


class _Names:
    """Numbers for the sessions of this process: no two that are open bear the same, and a free one is used again."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._borne: set[tuple[str, int]] = set()
        self._used: set[tuple[str, int]] = set()

    def take(self, purpose: str) -> tuple[int, bool]:
        """Return the first free number for this purpose, and whether another session bore it before."""
        with self._guard:
            number = next(each for each in count(1) if (purpose, each) not in self._borne)
            was_used = (purpose, number) in self._used
            self._borne.add((purpose, number))
            self._used.add((purpose, number))
        return number, was_used

    def give_back(self, purpose: str, number: int) -> None:
        """Make the number free for the next session."""
        with self._guard:
            self._borne.discard((purpose, number))


_NAMES: Final = _Names()


class Succession:
    """The connections of one session, each after the other. All bear one name on the server, which no other session bears."""

    def __init__(self) -> None:
        self._borne: tuple[str, int] | None = None
        self._had_others = False

    def name(self, purpose: str) -> str:
        """Return the name of the next connection: the purpose, the pid, and a number."""
        if self._borne is None:
            number, self._had_others = _NAMES.take(purpose)
            self._borne = purpose, number
        else:
            self._had_others = True
        return f"{self._borne[0]} {os.getpid()}.{self._borne[1]}"

    async def must_wait(self, connection: AsyncConnection[Any], *, schema: str) -> bool:
        """Whether earlier backends must end before this connection can be used. Those that wait for their client are ended."""
        if not self._had_others or is_pooled(connection):
            return False
        cursor = await connection.execute(compose("worker/left_behind", schema))
        must_wait, idle = await cursor.fetchone() or (False, None)
        if idle:
            # Where the function is withheld from the role, the server ends them when it notices that their client is gone.
            with suppress(psycopg.errors.InsufficientPrivilege):
                await connection.execute(compose("worker/end_left_behind", schema), {"pids": idle})
        return bool(must_wait)

    def end(self) -> None:
        """Let the next session of this purpose bear the name, and find what this one has left."""
        if self._borne is not None:
            _NAMES.give_back(*self._borne)
            self._borne = None
