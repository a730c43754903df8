"""Tracks whether this worker is considered alive and can reach the database, fences it if not, and reports to the supervisor."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, Self

from msgspec import Struct

from everbeat.config import RecoveryConfig
from everbeat.domain.series import EventCounts
from everbeat.errors import DatabaseError
from everbeat.protocol import REPORT_EVERY_S, Held, Tick
from everbeat.runtime.identity import cpu_seconds
from everbeat.runtime.main_loop import LoopWatch
from everbeat.store.leases import check_leases
from everbeat.store.session import Session
from everbeat.store.workers import beat_worker
from everbeat.worker.attempt import CODE_RUNS, UNSETTLED, ExecutorName, Stage
from everbeat.worker.environment import Messenger, WorkerEnvironment
from everbeat.worker.executors.executor import Executor
from everbeat.worker.leases import LeaseTable
from everbeat.worker.lifecycle import AttemptLifecycle
from everbeat.worker.messages import DeclaredDead, FenceDue

_CHECKS_PER_INTERVAL: Final = 4
_LONGEST_CHECK_S: Final = 1.0
_LONGEST_REST_S: Final = 10.0
_NEVER_S: Final = 3_600.0


class SilenceLimits(Struct, frozen=True, kw_only=True):
    """How long a worker can go without an acknowledged heartbeat, in seconds."""

    beat_every_s: float
    supervisor_silent_s: float
    start_nothing_s: float
    fence_s: float | None

    @classmethod
    def allowed_by(cls, recovery: RecoveryConfig) -> Self:
        """Return the limits derived from the recovery settings."""
        beat_every_s = (
            min(recovery.runner_heartbeat_interval_ms, recovery.claimer_heartbeat_interval_ms) / 1_000
        )
        running_s = recovery.running_stale_threshold_ms / 1_000
        shortest_s = min(running_s, recovery.claimed_stale_threshold_ms / 1_000)
        return cls(
            beat_every_s=beat_every_s,
            # Add a quarter to the interval, so that a heartbeat that arrives just in time does not count as silence.
            supervisor_silent_s=max(running_s / 3, 1.25 * beat_every_s),
            start_nothing_s=shortest_s * 2 / 3,
            fence_s=running_s * 3 / 4 if recovery.self_fence else None,
        )


class Liveness:
    """A service that sends this worker's heartbeats while its supervisor is silent, and decides whether it may claim and start tasks."""

    name = "liveness"

    def __init__(self, environment: WorkerEnvironment) -> None:
        self.wake = asyncio.Event()
        silence = SilenceLimits.allowed_by(environment.plan.recovery)
        self.interval_s = min(silence.beat_every_s / _CHECKS_PER_INTERVAL, _LONGEST_CHECK_S)
        self._session = (
            environment.claim_session
        )  # idle while the supervisor is silent, because nothing is claimed then
        self._identity = environment.identity
        self._clock = environment.clock
        self._send = environment.send
        self._silence = silence
        self._supervisor_beat_at = self._alive_at = self._clock.monotonic()
        self._tried_at = 0.0
        self._is_fenced = False

    def beaten(self, sent_at: float) -> None:
        """Record that the database acknowledged a heartbeat that the supervisor sent for this worker at `sent_at`.

        The time of sending counts, because this process might have been frozen or busy when the message arrived.
        """
        self._supervisor_beat_at = max(self._supervisor_beat_at, min(sent_at, self._clock.monotonic()))
        self._is_alive_since(self._supervisor_beat_at)

    @property
    def may_claim(self) -> bool:
        """Return whether tasks can be claimed. They cannot while the supervisor is silent, because nothing would renew their leases."""
        return self._clock.monotonic() - self._supervisor_beat_at < self._silence.supervisor_silent_s

    @property
    def may_start(self) -> bool:
        """Return whether code can start. It cannot if other workers might soon recover this worker's leases."""
        return self._clock.monotonic() - self._alive_at < self._silence.start_nothing_s

    async def tick(self) -> float | None:
        """Send a heartbeat for this worker while the supervisor is silent."""
        now = self._clock.monotonic()
        if (rest_s := self._supervisor_beat_at + self._silence.supervisor_silent_s - now) > 0:
            # A heartbeat before then only postpones the next tick. The limit is for a machine in standby, during which
            # this wait makes no progress.
            return min(rest_s, _LONGEST_REST_S)
        if now - self._tried_at < self._silence.beat_every_s:
            return None
        self._tried_at = now
        try:
            is_alive = await self._session.run(beat_worker(self._identity.worker_id), patience_s=0)
        except DatabaseError:
            return None  # the next tick sends another heartbeat
        if is_alive:
            self._is_alive_since(now)
        else:
            self._send(DeclaredDead())
        return None

    @property
    def has_fence(self) -> bool:
        """Return whether this worker stops running code if no heartbeat is acknowledged for too long."""
        return self._silence.fence_s is not None

    def fence_when_due(self) -> float | None:
        """Send `FenceDue` if no heartbeat has been acknowledged for too long.

        Return the number of seconds until the fence is due, or None if fencing is disabled or `FenceDue` has been sent.
        """
        if self._silence.fence_s is None or self._is_fenced:
            return None
        left_s = self._alive_at + self._silence.fence_s - self._clock.monotonic()
        if left_s > 0:
            return left_s
        self._is_fenced = True
        self._send(FenceDue())
        return None

    def _is_alive_since(self, moment: float) -> None:
        self._alive_at = max(self._alive_at, moment)
        limit_s = self._silence.fence_s
        if limit_s is not None and self._clock.monotonic() - self._alive_at < limit_s:
            self._is_fenced = False


class FenceWatch:
    """A service that fences the worker in time. It is separate because a heartbeat might hang on a dead connection."""

    name = "fence watch"

    def __init__(self, liveness: Liveness) -> None:
        self.wake = asyncio.Event()
        self.interval_s = liveness.interval_s
        self._liveness = liveness

    async def tick(self) -> float | None:
        """Fence the worker if the fence is due. Return the number of seconds until it is due, or None for the usual interval."""
        return self._liveness.fence_when_due() if self._liveness.has_fence else _NEVER_S


_ASKS_PER_THRESHOLD: Final = 4
_LONGEST_PROBE_S: Final = 15.0
_ONE_TRY: Final = 0.0


class DatabaseProbe:
    """A service that checks whether this worker can reach the database while outcomes are waiting to be written.

    It runs each check on a new session, because a broken session proves nothing about the database. A check can take as long as the
    stale threshold, because a worker must not be killed merely because the database is slow or remote.
    """

    name = "database probe"

    def __init__(self, environment: WorkerEnvironment, *, table: LeaseTable) -> None:
        self.wake = asyncio.Event()
        self._environment = environment
        self._clock = environment.clock
        self._table = table
        threshold_s = environment.plan.recovery.running_stale_threshold_ms / 1_000
        self.interval_s = min(threshold_s / _ASKS_PER_THRESHOLD, _LONGEST_PROBE_S)
        self._patience_s = max(threshold_s, self.interval_s)
        self._seen_answers = self._answers
        self._answered_at = self._looked_at = self._clock.monotonic()
        self._unanswered_s = 0.0

    def cut_off_s(self) -> float:
        """Return for how many seconds an outcome has been waiting without any reply from the database, or 0 if none is waiting.

        Time in which the worker sent no statement, because the process was frozen or its loop was blocked, does not count.
        """
        since = self._oldest()
        waited_s = 0.0 if since is None else self._clock.monotonic() - max(since, self._answered_at)
        return min(waited_s, self._unanswered_s)

    async def tick(self) -> float | None:
        """Run a statement on a new session, if an outcome has been waiting for at least `interval_s` seconds."""
        since, now = self._oldest(), self._clock.monotonic()
        looked_at, self._looked_at = self._looked_at, now
        if since is None or now - since < self.interval_s:
            self._unanswered_s = 0.0
            return None
        if self._answers != self._seen_answers:  # the database replied to another statement of this worker
            self._seen_answers = self._answers
            self._answered_at, self._unanswered_s = now, 0.0
            return None
        environment = self._environment
        session = Session(
            environment.plan.target, environment.identity.session_name, reply_timeout_s=self._patience_s
        )
        try:
            await session.run(check_leases([]), patience_s=_ONE_TRY)
            self._answered_at = self._clock.monotonic()
            self._unanswered_s = 0.0
        except (DatabaseError, OSError):
            self._unanswered_s += min(self._clock.monotonic() - looked_at, self._patience_s + self.interval_s)
        finally:
            await session.drop()
        self._looked_at = self._clock.monotonic()
        return None

    @property
    def _answers(self) -> int:
        """Return how many replies the worker's other sessions have received from the database."""
        return self._environment.claim_session.answers + self._environment.session.answers

    def _oldest(self) -> float | None:
        return min((attempt.settling_since for attempt in self._table.at(*UNSETTLED)), default=None)


MOST_NAMES: Final = 20


class Reporter:
    """A service that reports the worker's leases and state to the supervisor."""

    name = "reporter"
    interval_s = REPORT_EVERY_S

    def __init__(
        self,
        environment: WorkerEnvironment,
        *,
        table: LeaseTable,
        executors: Mapping[ExecutorName, Executor],
        lifecycle: AttemptLifecycle,
        probe: DatabaseProbe,
        loop_watch: LoopWatch,
        messenger: Messenger,
    ) -> None:
        self.wake = lifecycle.leftover_added
        self._link = environment.link
        self._clock = environment.clock
        self._table = table
        self._executors = executors
        self._lifecycle = lifecycle
        self._probe = probe
        self._loop_watch = loop_watch
        self._messenger = messenger
        self._rates = environment.rates
        self._sent = environment.plan.sent
        self._looked_at = self._clock.monotonic()
        self._cpu_s = cpu_seconds() or 0.0

    async def tick(self) -> float | None:
        """Report the worker's leases and state."""
        self.report_held()
        self.report_state()
        return None

    def report_state(self) -> None:
        """Report the worker's state and the counts since the last report."""
        self._link.tell(self._check())

    def report_held(self) -> None:
        """Report the leases that were added and removed since the last report."""
        added, removed = self._table.changes()
        if added or removed:
            self._link.tell(Held(added, removed))

    def _check(self) -> Tick:
        now, cpu_s = self._clock.monotonic(), cpu_seconds() or 0.0
        elapsed_s, used_s = max(now - self._looked_at, 0.001), cpu_s - self._cpu_s
        self._looked_at, self._cpu_s = now, cpu_s
        running = self._table.at(*CODE_RUNS)
        names = sorted({attempt.task.name for attempt in running})
        return Tick(
            running=len(running),
            claimed=len(self._table.at(Stage.CLAIMED, Stage.STARTING)),
            slots=sum(each.slots for name, each in self._executors.items() if name != "solo"),
            cpu_percent=100.0 * used_s / elapsed_s,
            loop_lag_ms=self._loop_watch.lag_s() * 1_000,
            names=names[:MOST_NAMES],
            cut_off_s=self._probe.cut_off_s(),
            leftover=len(self._lifecycle.leftover),
            messages=self._messenger.state(),
            rates=self._rates.take(),
            events=self._take_events(),
        )

    def _take_events(self) -> EventCounts | None:
        events = self._rates.take_events()
        events.sent = self._sent.take()
        return events or None
