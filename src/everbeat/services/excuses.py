"""Whose silence is excused while the server refuses new connections, and for how long.

A living tree that has lost the connection of its beats cannot be heard then. A tree whose connection of its beats is open is silent for
another reason, such as a freeze, even if it is itself what holds the connections.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Observer, Statements
from everbeat.store import workers
from everbeat.store.workers import WatchedBeats, WatchedSession

_ONE_TRY: Final = 0.0


class SilenceExcused(Event, frozen=True, kw_only=True):
    """The server refuses new connections, so these trees might live without one. Their silence is not judged meanwhile.

    `at_most_s`: for this long at most, because it is not known whether they need a connection; None: until one is to be had.
    """

    room = "services"
    level = logging.WARNING
    supervisor_ids: tuple[str, ...]
    at_most_s: float | None
    fix: str


class _Excuse(Struct, frozen=True):
    """Since when a tree is excused, and which beats it had sent by then."""

    since: float
    beats: tuple[object, ...]


class Excuses:
    """The excused trees of one observer. `longest_s` bounds the excuse of those of which it is unknown whether they are connected."""

    def __init__(
        self, statements: Statements, *, observer: Observer, events: EventBus, longest_s: float, command: str
    ) -> None:
        self._statements = statements
        self._observer = observer
        self._events = events
        self._longest_s = longest_s
        self._fix = f"free connections, or raise max_connections; for trees that you know dead: {command}"
        self._is_refused = False
        self._excused: dict[str, _Excuse] = {}

    async def look(self, others: Sequence[WatchedBeats], *, is_silent: bool, at: float) -> set[str]:
        """Return which of the others are excused now. A connection is tried only if one is silent or the last try was refused."""
        self._is_refused = (is_silent or self._is_refused) and not await self._observer.can_connect()
        if not self._is_refused:
            self._excused.clear()
            return set()
        found = await self._statements.run(workers.watch_sessions(), patience_s=_ONE_TRY)
        sessions = {each.supervisor_id: each for each in found}
        before, self._excused = self._excused, {}
        for beat in others:
            if not self._is_connected(sessions.get(beat.supervisor_id)):
                self._excused[beat.supervisor_id] = _excuse_of(beat, before, at=at)
        without = {name for name in self._excused if self._has_none(sessions.get(name))}
        self._tell(without - before.keys(), at_most_s=None)
        self._tell(self._excused.keys() - without - before.keys(), at_most_s=self._longest_s)
        return {
            name
            for name, excuse in self._excused.items()
            if name in without or at - excuse.since < self._longest_s
        }

    def _is_connected(self, session: WatchedSession | None) -> bool:
        return session is not None and session.beats_here and not self._observer.is_pooled

    def _has_none(self, session: WatchedSession | None) -> bool:
        """Whether nothing of a tree is connected. Behind a transaction pooler the server cannot tell."""
        if session is None or self._observer.is_pooled or not session.session_held:
            return False
        return not session.locked and not session.sessions

    def _tell(self, names: set[str], *, at_most_s: float | None) -> None:
        if names:
            self._events.emit(
                SilenceExcused(supervisor_ids=tuple(sorted(names)), at_most_s=at_most_s, fix=self._fix)
            )


def _excuse_of(beat: WatchedBeats, before: Mapping[str, _Excuse], *, at: float) -> _Excuse:
    """The excuse of a tree; one that beat since the last look is excused anew."""
    beats = (beat.beat_seq, *sorted(beat.worker_seqs.items()))
    known = before.get(beat.supervisor_id)
    return known if known is not None and known.beats == beats else _Excuse(at, beats)
