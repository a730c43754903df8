"""The turns to watch: of all supervisors that observe alike, only three watch the others, so that watching costs O(N) in total."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec

from everbeat.recovering.observer import RecoveryEnvironment, Thresholds
from everbeat.runtime.task_scope import Service
from everbeat.store import workers
from everbeat.store.workers import WatchTurnState

TURN_S: Final = (3.0, 10.0)
"""The shortest and the longest time that a turn lasts without a renewal, in seconds.

Between these, it is the shortest stale threshold. The session lock of a dead holder is released at once, so this time counts only for a
frozen or cut-off holder. Each renewal leaves a dead row while a transaction has an old snapshot, so turns are renewed only every few
seconds.
"""
_RENEWED_AFTER: Final = 0.3
AGAIN_S: Final = 0.8
"""After how many seconds a turn whose holder has no session is taken. A live holder has usually reconnected by then."""
_ASK_S: Final = 1.0
_LONGEST_PACE_S: Final = 10.0
_SUPERVISORS_PER_ASK: Final = 10
"""How many supervisors ask for a free turn in each second, if at least this many exist."""
_MASS_MS: Final = 60_000
PASSED_ON_S: Final = 5.0
"""How long a supervisor that has passed its turn on does not ask for another one, in seconds. After that, it first tries to connect."""


class WatchTurn:
    """A service in every supervisor that takes one of three turns to watch, and renews it.

    Observers that could judge differently, because their settings, their roles or their kinds of connections differ, have turns of their
    own. `on_taken` is called when this supervisor has taken a turn. `prove_deaths` is called while another watcher reports a mass silence
    or a mass loss. Only a supervisor on the machine of a dead tree can prove its death.
    """

    name = "watch_turn"
    interval_s = _ASK_S

    def __init__(
        self,
        environment: RecoveryEnvironment,
        *,
        on_taken: Callable[[], None],
        prove_deaths: Callable[[], Awaitable[object]],
    ) -> None:
        self.episode = 0
        self.turn: str | None = None
        self._environment = environment
        self._observer = environment.observer
        self._clock = environment.clock
        self._on_taken = on_taken
        self._prove_deaths = prove_deaths
        self._settings = msgspec.json.encode(environment.config).decode()
        shortest_s = min(Thresholds.automatic(environment.config).all_ms(), default=math.inf) / 1_000
        self.turn_s = min(TURN_S[1], max(TURN_S[0], shortest_s))
        self._confirmed_at = 0.0
        self._holder: tuple[str, bool] | None = None
        self._losses = 0
        self._pace_s = _ASK_S
        self._mass_ms = 0
        self._has_passed = False
        self._passed_until = 0.0
        self._suspects: Sequence[str] = ()

    @property
    def is_held(self) -> bool:
        """Return whether this supervisor has a turn. A turn that was confirmed too long ago does not count."""
        age_s = self._clock.monotonic() - self._confirmed_at
        return self.turn is not None and age_s < self.turn_s

    @property
    def pace_s(self) -> float:
        """Return the seconds between two passes of work that this supervisor does only in case that all watchers fail."""
        return self._pace_s

    def report_mass(self) -> None:
        """Let all supervisors know that many trees were lost together."""
        self._mass_ms = _MASS_MS

    def confirm(self, *, asked_at: float) -> None:
        """Record that a statement that was sent at `asked_at` has found the turn in place."""
        self._confirmed_at = max(self._confirmed_at, asked_at)

    def lose(self) -> None:
        """Record that another supervisor has the turn."""
        self.turn = None

    async def pass_on(self, *, known: int) -> None:
        """Leave the turn to another supervisor, because this one cannot judge what it observes.

        It keeps the turn if it knows only as many supervisors as there are turns.
        """
        turn = self.turn
        if turn is None or known <= workers.WATCH_TURNS:
            return
        self.lose()
        self._has_passed, self._passed_until = True, self._clock.monotonic() + PASSED_ON_S
        end = workers.end_watch_turn(turn, taken_by=self._observer.supervisor_id)
        await self._environment.run_once(end)

    async def tick(self) -> float | None:
        """Ask for a turn, unless this supervisor has one and has confirmed it lately. Return the seconds until the next request."""
        asked_at = self._clock.monotonic()
        if asked_at < self._passed_until:
            return self._passed_until - asked_at
        if self._has_passed and not await self._observer.can_connect():
            return self._pace_s
        self._has_passed = False
        holder = self._observer.supervisor_id, self._observer.is_pooled
        losses = self._observer.disturbances
        is_new = holder != self._holder or losses != self._losses
        if self.is_held and not is_new and not self._mass_ms and self._is_fresh(asked_at):
            return None
        found = await self._environment.run_once(
            workers.take_watch_turn(
                holder[0],
                kind=f"{self._settings} {holder[1]}",
                turn_ms=round(self.turn_s * 1_000),
                by_lock=not holder[1],
                suspects=self._suspects,
                mass_ms=self._mass_ms,
            )
        )
        self._mass_ms = 0
        if found.is_locked:
            self._losses = losses
        self._record(found, holder, asked_at=asked_at)
        if self.turn is not None:
            return None
        if found.is_mass:
            await self._prove_deaths()
        if found.suspects:
            return AGAIN_S
        return self._pace_s * self._environment.random.uniform(0.9, 1.0)

    def _is_fresh(self, at: float) -> bool:
        return at - self._confirmed_at < _RENEWED_AFTER * self.turn_s

    def _record(self, found: WatchTurnState, holder: tuple[str, bool], *, asked_at: float) -> None:
        self._pace_s = min(_LONGEST_PACE_S, max(_ASK_S, found.supervisors / _SUPERVISORS_PER_ASK))
        continues = found.turn == self.turn and holder == self._holder
        self._suspects = found.suspects
        self.turn, self._holder, self._confirmed_at = found.turn, holder, asked_at
        if found.turn is not None and not continues:
            self.episode += 1
            self._on_taken()


class Watching:
    """A service that works only while its supervisor has a turn to watch.

    Each time that the supervisor takes a turn, the service begins anew: what it observed before is out of date.
    """

    def __init__(self, make: Callable[[], Service], turn: WatchTurn) -> None:
        self._make = make
        self._turn = turn
        self._service = make()
        self._episode = turn.episode

    @property
    def name(self) -> str:
        """Return the name of the service."""
        return self._service.name

    @property
    def interval_s(self) -> float:
        """Return the interval of the service."""
        return self._service.interval_s

    async def tick(self) -> float | None:
        """Do one pass of the service, if the supervisor has a turn."""
        if not self._turn.is_held:
            return None
        if self._episode != self._turn.episode:
            self._episode, self._service = self._turn.episode, self._make()
        return await self._service.tick()
