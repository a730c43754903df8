"""Whether this worker is still believed alive: its supervisor's beats, its own when they fail, and what it may do without.

What lives here: the thresholds of silence and the worker's own beat. What may not: leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self

from msgspec import Struct

from everbeat.config import RecoveryConfig
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import Clock
from everbeat.store.session import Session
from everbeat.store.workers import beat_worker

_LOOKS_PER_INTERVAL: Final = 4
_LONGEST_LOOK_S: Final = 1.0
_LONGEST_REST_S: Final = 10.0
_NEVER_S: Final = 3_600.0


class Silence(Struct, frozen=True, kw_only=True):
    """How long a worker may go without an acknowledged beat, in seconds."""

    beat_every_s: float
    supervisor_silent_s: float
    start_nothing_s: float
    fence_s: float | None

    @classmethod
    def allowed_by(cls, recovery: RecoveryConfig) -> Self:
        """The limits that follow from the settings."""
        beat_every_s = (
            min(recovery.runner_heartbeat_interval_ms, recovery.claimer_heartbeat_interval_ms) / 1_000
        )
        running_s = recovery.running_stale_threshold_ms / 1_000
        shortest_s = min(running_s, recovery.claimed_stale_threshold_ms / 1_000)
        return cls(
            beat_every_s=beat_every_s,
            # A quarter above the interval, so that a beat that is merely on time is no silence.
            supervisor_silent_s=max(running_s / 3, 1.25 * beat_every_s),
            start_nothing_s=shortest_s * 2 / 3,
            fence_s=running_s * 3 / 4 if recovery.self_fence else None,
        )


class Vitality:
    """A service. `on_fence` is called when running code must end, `on_ended` when the database says we were given up."""

    name = "vitality"

    def __init__(
        self,
        session: Session,
        *,
        silence: Silence,
        worker_id: Callable[[], str],
        clock: Clock,
        on_fence: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        self.wake = asyncio.Event()
        self.interval_s = min(silence.beat_every_s / _LOOKS_PER_INTERVAL, _LONGEST_LOOK_S)
        self._session = session
        self._silence = silence
        self._worker_id = worker_id
        self._clock = clock
        self._on_fence = on_fence
        self._on_ended = on_ended
        self._supervisor_beat_at = self._alive_at = clock.monotonic()
        self._tried_at = 0.0
        self._is_fenced = False

    def beaten(self, sent_at: float) -> None:
        """A beat of the supervisor was acknowledged that vouched for this worker.

        What counts is when it was sent: the word of it may have lain unread while this process was frozen or busy.
        """
        self._supervisor_beat_at = max(self._supervisor_beat_at, min(sent_at, self._clock.monotonic()))
        self._is_alive_since(self._supervisor_beat_at)

    @property
    def may_claim(self) -> bool:
        """Not while the supervisor is silent: it would not vouch for what is claimed."""
        return self._clock.monotonic() - self._supervisor_beat_at < self._silence.supervisor_silent_s

    @property
    def may_start(self) -> bool:
        """Not when the leases may soon be taken over."""
        return self._clock.monotonic() - self._alive_at < self._silence.start_nothing_s

    async def tick(self) -> float | None:
        """Beat for ourselves while the supervisor is silent."""
        now = self._clock.monotonic()
        if (rest_s := self._supervisor_beat_at + self._silence.supervisor_silent_s - now) > 0:
            # Any beat until then only makes it later; but a machine may sleep, and this wait with it.
            return min(rest_s, _LONGEST_REST_S)
        if now - self._tried_at < self._silence.beat_every_s:
            return None
        self._tried_at = now
        try:
            is_alive = await self._session.run(beat_worker(self._worker_id()), patience_s=0)
        except DatabaseError:
            return None  # the next look tries again
        if is_alive:
            self._is_alive_since(now)
        else:
            self._on_ended()
        return None

    @property
    def has_fence(self) -> bool:
        """Whether running code is ever to be ended for silence."""
        return self._silence.fence_s is not None

    def fence_when_due(self) -> float | None:
        """Fence if silence has lasted too long; answers in how many seconds it will have, None where it never will."""
        if self._silence.fence_s is None or self._is_fenced:
            return None
        left_s = self._alive_at + self._silence.fence_s - self._clock.monotonic()
        if left_s > 0:
            return left_s
        self._is_fenced = True
        self._on_fence()
        return None

    def _is_alive_since(self, moment: float) -> None:
        self._alive_at = max(self._alive_at, moment)
        limit_s = self._silence.fence_s
        if limit_s is not None and self._clock.monotonic() - self._alive_at < limit_s:
            self._is_fenced = False


class FenceWatch:
    """A service of its own: the beats that fail when a fence is due may hang in a dead connection."""

    name = "fence watch"

    def __init__(self, vitality: Vitality) -> None:
        self.wake = asyncio.Event()
        self.interval_s = vitality.interval_s
        self._vitality = vitality

    async def tick(self) -> float | None:
        """One look; the next one at the very moment in which the fence is due."""
        return self._vitality.fence_when_due() if self._vitality.has_fence else _NEVER_S
