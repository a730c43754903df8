"""How an observer measures silence: by its own clock, from what it saw itself, with the database reachable.

What lives here: who observes, and the windows. What may not: statements, and what follows from a silence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Final, Protocol, TypeVar

from msgspec import Struct

from everbeat.store.statement import Statement
from everbeat.store.workers import WatchedBeats

T = TypeVar("T")

_SERVED_WEIGHT: Final = 2
"""So many seconds of served silence count as one second of undisturbed silence."""
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
    served_from_s: float
    watched_from_s: float
    looks: int = 1


class Windows:
    """How long each sequence has stood still. Any change is a sign of life, backwards too: a failover can lose beats.

    Two measures count, and the longer one holds. The first is the time since the last trouble of the observer. The second is half
    of the served time, which no trouble erases: otherwise small troubles that recur would put off every judgement for ever.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._served_s = 0.0
        self._watched_s = 0.0

    def pass_by(self, *, watched_s: float, served_s: float) -> None:
        """The observer watched for so long since the look before; in so much of it the database served its beats."""
        self._watched_s += watched_s
        self._served_s += served_s

    def see(self, key: str, sequence: int, *, at: float) -> None:
        """`key` showed `sequence` at the moment `at`."""
        window = self._windows.get(key)
        if window is None or window.sequence != sequence:
            self._windows[key] = _Window(sequence, at, self._served_s, self._watched_s)
        else:
            window.looks += 1

    def stands_s(self, key: str, *, at: float) -> float:
        """For how long `key` has stood still, as far as it counts; 0 if it was never seen."""
        window = self._windows.get(key)
        if window is None:
            return 0.0
        return max(at - window.since, (self._served_s - window.served_from_s) / _SERVED_WEIGHT)

    def watched_s(self, key: str) -> float:
        """For how long `key` has stood still while the observer watched, whether that counts or not."""
        window = self._windows.get(key)
        return 0.0 if window is None else self._watched_s - window.watched_from_s

    def next_in(self, key: str, threshold_s: float, *, at: float) -> float:
        """In how many seconds `key` has stood still for so long, if there is no more trouble."""
        window = self._windows.get(key)
        return threshold_s if window is None else threshold_s - (at - window.since)

    def is_suspect(self, key: str) -> bool:
        """Whether it stood still from one look to another."""
        window = self._windows.get(key)
        return window is not None and window.looks > 1

    def excuse(self, *, at: float) -> None:
        """The observer was in trouble: a whole window begins now, unless the served time is enough without it."""
        for window in self._windows.values():
            window.since, window.looks = at, 0

    def forget_some(self, keys: Collection[str]) -> None:
        """None of these is judged before a whole window from the next look."""
        for key in keys:
            self._windows.pop(key, None)

    def forget(self) -> None:
        """Nobody is judged before a whole window from now."""
        self._windows.clear()

    def keep(self, keys: Collection[str]) -> None:
        """Forget all but these."""
        for gone in self._windows.keys() - set(keys):
            del self._windows[gone]


class OwnBeats:
    """How many beats of its own an observer finds in the table at each look.

    Each one is a moment in which the database served a supervisor that beats as all others do. A silent tree that lives has had
    that chance too.
    """

    def __init__(self) -> None:
        self._before: WatchedBeats | None = None

    def landed(self, beats: Iterable[WatchedBeats], *, supervisor_id: str) -> int:
        """So many were acknowledged since the look before."""
        own = next((beat for beat in beats if beat.supervisor_id == supervisor_id), None)
        before, self._before = self._before, own
        if own is None or before is None or before.supervisor_id != own.supervisor_id:
            return 0
        return max(0, own.beat_seq - before.beat_seq)


class Amnesty:
    """Whether a look may be compared with the one before it, or something happened between that excuses any silence."""

    def __init__(self, *, longest_gap_s: float) -> None:
        self.watched_s = 0.0
        self._longest_gap_s = longest_gap_s
        self._looked_at: float | None = None
        self._server: datetime | None = None
        self._disturbances = 0

    def is_due(self, *, asked_at: float, answered_at: float, server: datetime, disturbances: int) -> bool:
        """Whether all windows restart: this observer was away or cut off, or another server answered.

        `watched_s` becomes the time since the look before: 0 if the observer was away or the server is another one.
        """
        first = self._looked_at is None
        gap = 0.0 if self._looked_at is None else asked_at - self._looked_at
        other_server = self._server is not None and server != self._server
        disturbed = disturbances != self._disturbances
        was_away = first or gap > self._longest_gap_s or other_server
        self.watched_s = 0.0 if self._looked_at is None or was_away else answered_at - self._looked_at
        self._looked_at, self._server, self._disturbances = answered_at, server, disturbances
        return not first and (was_away or disturbed)

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
