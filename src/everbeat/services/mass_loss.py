"""Supervisors that lost their sessions together: who they are, and when those that stayed away count as dead.

PostgreSQL keeps the session of a silent network for hours (`store.own_settings.PATIENT_KEEPALIVES`), so the lock of a supervisor that beat
shortly before was freed because its socket was closed: the process ended, or something between closed the connection. A living
supervisor connects again within about a second once its line is back. One that stays away for the whole wait, while others are
observed without a disturbance, counts as dead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime

from msgspec import Struct


class Lost(Struct):
    """A session that is gone: since when, by the observer's clock, when it was last seen held, and which session it was."""

    since: float
    held_until: float
    session_at: datetime


class _Away(Struct):
    lost: Lost
    alive_at: float


class MassLoss:
    """The supervisors of one mass loss. `wait_s`: after this long without a sign of life they count as dead; None: never."""

    def __init__(self, *, wait_s: float | None) -> None:
        self.wait_s = wait_s
        self._away: dict[str, _Away] = {}
        self._returned: set[str] = set()
        self._not_before = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._away

    def __bool__(self) -> bool:
        return bool(self._away)

    @property
    def lost(self) -> Mapping[str, Lost]:
        """What each of those that are away lost."""
        return {name: away.lost for name, away in self._away.items()}

    def has_returned(self, name: str) -> bool:
        """Whether `name` was away and gave a sign of life while others are still away."""
        return name in self._returned

    def join(self, lost: Mapping[str, Lost]) -> None:
        """These were lost together with the others."""
        self._away |= {name: _Away(each, each.since) for name, each in lost.items()}

    def keep(self, names: Collection[str]) -> None:
        """Forget all but these. The mass loss is over when none of them is away any more."""
        self._away = {name: away for name, away in self._away.items() if name in names}
        if not self._away:
            self._returned.clear()

    def see(self, name: str, session_at: datetime, *, is_held: bool, has_sessions: bool, at: float) -> None:
        """Take notice of a look at `name`: it is back if it holds its lock, or has held it again meanwhile.

        Any session of its tree is a sign of life. The first sign of each starts the wait of all others anew: the line may be
        coming back. Later ones do not, so that one that comes and goes cannot put the others off for ever.
        """
        away = self._away.get(name)
        if away is None:
            return
        is_back = is_held or session_at != away.lost.session_at
        if not (is_back or has_sessions):
            return
        if name not in self._returned:
            self._returned.add(name)
            self._not_before = at
        away.alive_at = at
        if is_back:
            del self._away[name]

    def disturbed(self, until: float) -> None:
        """The observer or the server was away: what it did not see before `until` proves nothing."""
        self._not_before = max(self._not_before, until)

    def is_over(self, name: str, *, at: float) -> bool:
        """Whether `name` stayed away for the whole wait."""
        away = self._away.get(name)
        if away is None or self.wait_s is None:
            return False
        return at - max(away.alive_at, self._not_before) >= self.wait_s

    def next_in(self, at: float) -> float | None:
        """Seconds until the wait of one of them is over; None if nothing is waited for."""
        if self.wait_s is None or not self._away:
            return None
        first = min(away.alive_at for away in self._away.values())
        return max(first, self._not_before) + self.wait_s - at
