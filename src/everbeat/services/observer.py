"""How an observer measures silence: by its own clock, from what it saw itself, with the database reachable throughout.

What lives here: who observes, and the windows. What may not: statements, and what follows from a silence.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from everbeat.store.statement import Statement

T = TypeVar("T")
CALM_S: Final = 10.0
"""For this long after a reconnect of the observer, a missing session proves nothing, unless the observer has itself seen it held
since then: what cut the observer off may have cut off others."""


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
        """How often a beat of its own failed or a session was lost, so far."""
        ...

    async def can_connect(self) -> bool:
        """Whether a new connection is to be had now."""
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

    def restart_of(self, keys: Collection[str]) -> None:
        """Forget these: none of them is judged before a whole window from the next look."""
        for key in keys:
            self._windows.pop(key, None)

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

    def has_lapsed(self, disturbances: int) -> bool:
        """Whether something happened since the last look that excuses any silence: what followed from that look is dropped."""
        return disturbances != self._disturbances


class Calm:
    """Whether a session that is missing may belong to a living tree on its way back.

    An observer that was cut off knows it by its own reconnect. One that has just started does not: it learns from the server that
    a crash ended all sessions, and counts from its own first look. The server cannot have accepted connections for much longer.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._began_at: float | None = None

    def look(self, at: float) -> None:
        """Take notice of a look that was answered."""
        if self._began_at is None:
            self._began_at = at

    def covers(self, *, lost_in_crash: bool, at: float) -> bool:
        """Whether a missing session proves nothing yet; `lost_in_crash`: the server has crashed since it was opened."""
        moments = (self._observer.reconnected_at, self._began_at if lost_in_crash else None)
        return any(since is not None and at - since < CALM_S for since in moments)
