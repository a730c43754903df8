"""How an observer measures silence: by its own clock, from what it saw itself, with the database reachable throughout.

What lives here: who observes, and the windows. What may not: statements, and what follows from a silence.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Protocol, TypeVar

from msgspec import Struct

from everbeat.store.statement import Statement

T = TypeVar("T")


class Statements(Protocol):
    """Runs statements, repeating each for `patience_s` seconds over a lost connection (None: for ever, 0: one try)."""

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        """The answer; raises a DatabaseError."""
        ...


class Observer(Protocol):
    """The supervisor in whose process a caretaker runs."""

    @property
    def supervisor_id(self) -> str:
        """Its present id; a new one after it was declared dead and came back."""
        ...

    @property
    def is_pooled(self) -> bool:
        """Whether a transaction pooler stands before the database, so that sessions prove nothing."""
        ...

    @property
    def disturbances(self) -> int:
        """How often a beat of its own failed, a session was lost or a connection refused, so far."""
        ...

    async def can_connect(self) -> bool:
        """Whether a new connection is to be had now; counts a disturbance if not."""
        ...

    @property
    def reconnected_at(self) -> float | None:
        """When, by its monotonic clock, a lost session was last open again; None if none was ever lost."""
        ...


class _Window(Struct):
    sequence: int
    since: float
    looks: int = 1


class Windows:
    """Since when each sequence has stood still. Any change is a sign of life, backwards too: a failover can lose beats."""

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}

    def see(self, key: str, sequence: int, *, at: float) -> None:
        """`key` showed `sequence` at the moment `at`."""
        window = self._windows.get(key)
        if window is None or window.sequence != sequence:
            self._windows[key] = _Window(sequence, at)
        else:
            window.looks += 1

    def since(self, key: str) -> float | None:
        """The moment since which `key` has stood still; None if it was never seen."""
        window = self._windows.get(key)
        return None if window is None else window.since

    def is_suspect(self, key: str) -> bool:
        """Whether it stood still from one look to another."""
        window = self._windows.get(key)
        return window is not None and window.looks > 1

    def restart(self) -> None:
        """Forget everything: nobody is judged before a whole window from now."""
        self._windows.clear()

    def keep(self, keys: Collection[str]) -> None:
        """Forget all but these."""
        for gone in self._windows.keys() - set(keys):
            del self._windows[gone]


class Amnesty:
    """Whether a look may be compared with the one before it, or something happened between that excuses any silence."""

    def __init__(self, *, longest_gap_s: float) -> None:
        self._longest_gap_s = longest_gap_s
        self._looked_at: float | None = None
        self._server: datetime | None = None
        self._disturbances = 0

    def is_due(self, *, asked_at: float, answered_at: float, server: datetime, disturbances: int) -> bool:
        """Whether all windows restart: this observer was away or cut off, or another server answered."""
        first = self._looked_at is None
        gap = 0.0 if self._looked_at is None else asked_at - self._looked_at
        other_server = self._server is not None and server != self._server
        disturbed = disturbances != self._disturbances
        self._looked_at, self._server, self._disturbances = answered_at, server, disturbances
        return not first and (gap > self._longest_gap_s or other_server or disturbed)
