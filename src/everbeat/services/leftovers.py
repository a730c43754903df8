"""The sessions that keep locks on the server without use: those of dead trees, and those whose process does not read an answer.

Frozen processes keep their sessions, with the locks of their statements. Those of a dead tree are ended after the death was recorded,
by any of the ways to notice it. PostgreSQL keeps the transaction of a statement open until its answer is sent, and none of its timeouts
ends a session that waits for its client to read. So a session that is seen in that state several times in a row is ended.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import datetime
from typing import Final

from everbeat.config import RecoveryConfig
from everbeat.runtime.events import Event, EventBus
from everbeat.services.observer import Statements
from everbeat.store import sweeping
from everbeat.store.sweeping import RemainingSession

_LONGEST_INTERVAL_S: Final = 5.0
_ONE_TRY: Final = 0.0
LOOK_AGAIN_S: Final = 1.0
LOOKS: Final = 6
"""So often, one second apart, an answer must be seen unread. With the interval before the first look, a session ends within 11 s."""


class SessionsEnded(Event, frozen=True, kw_only=True):
    """Sessions of dead trees were ended; `sessions` are their application names."""

    room = "services"
    level = logging.WARNING
    sessions: tuple[str, ...]


class AnswersUnread(Event, frozen=True, kw_only=True):
    """Sessions were ended because their processes did not read an answer. Those connect again and repeat the statement."""

    room = "services"
    level = logging.WARNING
    sessions: tuple[str, ...]
    fix: str


class SessionsLeft(Event, frozen=True, kw_only=True):
    """Sessions of dead trees, or with unread answers, that this role must not end. They keep their connections and locks."""

    room = "services"
    level = logging.WARNING
    sessions: tuple[str, ...]
    roles: tuple[str, ...]
    fix: str


class UnreadAnswers:
    """In how many looks in a row each session was seen with the same unread answer."""

    def __init__(self) -> None:
        self._looks: dict[tuple[int, datetime | None], int] = {}

    @property
    def has_suspects(self) -> bool:
        """Whether more looks must show if an answer is read."""
        return any(looks < LOOKS for looks in self._looks.values())

    def see(self, found: Iterable[RemainingSession]) -> list[RemainingSession]:
        """One look found these; returns those that were found often enough."""
        unread = [each for each in found if not each.is_left]
        self._looks = {
            (each.pid, each.since): self._looks.get((each.pid, each.since), 0) + 1 for each in unread
        }
        return [each for each in unread if self._looks[each.pid, each.since] >= LOOKS]


class Leftovers:
    """A service of every supervisor. Behind a transaction pooler, sessions are not a tree's own, and the statements do nothing."""

    name = "leftovers"

    def __init__(self, statements: Statements, config: RecoveryConfig, *, events: EventBus) -> None:
        self.interval_s = min(config.check_interval_ms / 1_000, _LONGEST_INTERVAL_S)
        self._statements = statements
        self._events = events
        self._unread = UnreadAnswers()
        self._told: set[tuple[int, str]] = set()
        self._ended: set[tuple[int, str]] = set()

    async def tick(self) -> float | None:
        """End sessions that keep locks without use, and report what cannot be ended, once for each session. Soon again if there are suspects."""
        found = await self._statements.run(sweeping.remaining_sessions(), patience_s=_ONE_TRY)
        useless = [each for each in found if each.is_left] + self._unread.see(found)
        await self._end([each for each in useless if each.may_end])
        left = {(each.pid, each.session): each.role for each in useless if not each.may_end}
        if new := sorted(left.keys() - self._told):
            roles = tuple(sorted({left[key] for key in new}))
            fix = (
                "let all workers connect as one role that can execute pg_terminate_backend,"
                " or grant pg_signal_backend and pg_read_all_stats to this one"
            )
            self._events.emit(SessionsLeft(sessions=tuple(name for _, name in new), roles=roles, fix=fix))
        self._told = set(left)
        return LOOK_AGAIN_S if self._unread.has_suspects else None

    async def _end(self, doomed: list[RemainingSession]) -> None:
        pids: frozenset[int] = frozenset()
        if doomed:
            pids = await self._statements.run(sweeping.end_sessions(doomed), patience_s=_ONE_TRY)
        ended = {(each.pid, each.session): each.is_left for each in doomed if each.pid in pids}
        new = sorted(ended.keys() - self._ended)  # a backend takes a moment to end
        if dead := tuple(name for pid, name in new if ended[pid, name]):
            self._events.emit(SessionsEnded(sessions=dead))
        if unread := tuple(name for pid, name in new if not ended[pid, name]):
            fix = "see whether these processes are frozen, or whether async code blocks their loops"
            self._events.emit(AnswersUnread(sessions=unread, fix=fix))
        self._ended = set(ended)
