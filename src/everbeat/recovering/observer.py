"""The environment of recoverers and observers. An observer measures silence on its own clock, and only while it is watching."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from random import Random
from typing import Final, Protocol, Self, TypeAlias, TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from everbeat.config import RecoveryConfig
from everbeat.domain.recovery.hooks import HookRunner, NoHooks
from everbeat.domain.recovery.liveness import longer_silence
from everbeat.domain.series import RateCounter
from everbeat.domain.task.states import TaskState
from everbeat.recovering.orders import flags_of
from everbeat.runtime.clock import Clock
from everbeat.runtime.events import EventBus
from everbeat.store import workers
from everbeat.store.leases import Lease
from everbeat.store.statement import Statement
from everbeat.store.workers import WatchedBeats

T = TypeVar("T")

ONE_TRY: Final = 0.0
"""The value of `patience_s` for a statement that must not be retried."""
CALM_S: Final = 10.0
"""For this many seconds after the observer has reconnected, a missing session proves nothing.

The cause might have cut off other supervisors too. An exception is a session that the observer has seen held since it reconnected.
"""
_SERVED_WEIGHT: Final = 2
"""How many seconds of silence count as one second of undisturbed silence, if the database served the observer's heartbeats meanwhile."""


class Statements(Protocol):
    """An interface that runs statements, and retries them after a lost connection.

    `patience_s` limits the retries of a statement in seconds. `None` means no limit, and 0 means a single try.
    """

    async def run(self, statement: Statement[T], *, patience_s: float | None = None) -> T:
        """Run a statement and return its result. Raises DatabaseError if it fails."""
        ...


class Observer(Protocol):
    """The interface of a process that recovers leases. A supervisor also judges the silence of other supervisors."""

    @property
    def supervisor_id(self) -> str:
        """Return the supervisor's current id. A supervisor that was declared dead and came back has a new id."""
        ...

    @property
    def is_pooled(self) -> bool:
        """Return whether connections pass through a transaction pooler. A missing session then proves nothing."""
        ...

    @property
    def disturbances(self) -> int:
        """Return the number of the observer's own failed heartbeats plus the number of its lost sessions."""
        ...

    async def can_connect(self) -> bool:
        """Return whether the server currently accepts a new connection."""
        ...

    @property
    def reconnected_at(self) -> float | None:
        """Return when a lost session was last reopened, on the observer's monotonic clock, or None if no session was ever lost."""
        ...


class NoObserver(Struct, frozen=True):
    """A process that recovers leases but does not judge silence: a worker, or a program in which an operator runs a sweep."""

    supervisor_id: str
    is_pooled: bool = False
    disturbances: int = 0
    reconnected_at: float | None = None

    async def can_connect(self) -> bool:
        """Return True. The result is never used, because the process does not judge silence."""
        return True


class RecoveryEnvironment(Struct, frozen=True, kw_only=True):
    """The dependencies that the recoverers of a process share with the services that detect deaths."""

    statements: Statements
    config: RecoveryConfig
    channel: str
    observer: Observer
    events: EventBus
    clock: Clock
    random: Random
    hooks: HookRunner = NoHooks()
    rates: RateCounter = field(default_factory=RateCounter)
    """The counts of recovered attempts and expired tasks. A supervisor or worker writes them; in other programs, they are dropped."""

    async def run_once(self, statement: Statement[T]) -> T:
        """Run a statement without retries and return its result. Raises DatabaseError if it fails."""
        return await self.statements.run(statement, patience_s=ONE_TRY)

    async def take_turn(self, name: str, *, interval_s: float) -> bool:
        """Take the cluster-wide turn for one pass of a service.

        Return False if another supervisor has taken the turn within the last `interval_s` seconds.
        """
        interval_ms = round(interval_s * 1_000)
        return await self.run_once(
            workers.take_turn(name, interval_ms=interval_ms, taken_by=self.observer.supervisor_id)
        )


LeaseQuery: TypeAlias = Callable[..., Statement[list[Lease]]]
"""A function that returns a statement that reads one page of leases, oldest first.

Its keyword arguments are `limit` and `after`, which is the last lease of the previous page or None.
"""


async def pages(
    statements: Statements, query: LeaseQuery, *, size: int, patience_s: float | None = None
) -> AsyncIterator[list[Lease]]:
    """Yield the leases of a query in pages of up to `size` leases."""
    last: Lease | None = None
    while found := await statements.run(query(limit=size, after=last), patience_s=patience_s):
        yield found
        if len(found) < size:
            return
        last = found[-1]


@contextmanager
def collected(problems: list[Exception]) -> Iterator[None]:
    """Append an error that the block raises to `problems`, so that the caller can finish other work before it raises the error."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 - the caller raises it
        problems.append(problem)


class Thresholds(Struct, frozen=True, kw_only=True):
    """The silence after which a lease is stale, in milliseconds. `None` means that leases in this state are left alone.

    If `exact` is true, the thresholds that trees have registered are ignored.
    """

    claimed_ms: int | None
    running_ms: int | None
    resilient_flags: Collection[str]
    multiplier: int
    exact: bool = False

    @classmethod
    def automatic(cls, config: RecoveryConfig) -> Self:
        """Return the thresholds for automatic recovery. They respect the settings that switch automatic recovery off."""
        return cls(
            claimed_ms=config.claimed_stale_threshold_ms if config.auto_requeue_stale_claimed else None,
            running_ms=config.running_stale_threshold_ms if config.auto_fail_stale_running else None,
            resilient_flags=config.resilient_task_flags,
            multiplier=config.resilient_sweep_threshold_multiplier,
        )

    @classmethod
    def manual(cls, config: RecoveryConfig, *, threshold_ms: int | None = None) -> Self:
        """Return the thresholds for an operator's sweep, which applies even if automatic recovery is switched off.

        If `threshold_ms` is None, the configured thresholds apply.
        """
        return cls(
            claimed_ms=config.claimed_stale_threshold_ms if threshold_ms is None else threshold_ms,
            running_ms=config.running_stale_threshold_ms if threshold_ms is None else threshold_ms,
            resilient_flags=config.resilient_task_flags,
            multiplier=config.resilient_sweep_threshold_multiplier,
            exact=threshold_ms is not None,
        )

    def judging(self, tree: Lease | WatchedBeats) -> Self:
        """Return the thresholds for one tree: the longer of these thresholds and those that the tree has registered."""
        if self.exact:
            return self
        return replace(
            self,
            claimed_ms=longer_silence(self.claimed_ms, tree.claimed_stale_ms),
            running_ms=longer_silence(self.running_ms, tree.running_stale_ms),
        )

    def of(self, lease: Lease) -> int | None:
        """Return the threshold for one lease in milliseconds, or None if the lease is left alone."""
        own = self.judging(lease)
        plain = own.running_ms if lease.state is TaskState.RUNNING else own.claimed_ms
        if plain is None or not self._is_resilient(lease):
            return plain
        return plain * self.multiplier

    def all_ms(self) -> list[int]:
        """Return all thresholds that a lease can have, in milliseconds, shortest first. Return an empty list if all leases are left alone."""
        plain = {each for each in (self.claimed_ms, self.running_ms) if each is not None}
        return sorted(plain | {each * self.multiplier for each in plain})

    @property
    def longest_plain_ms(self) -> int:
        """Return the threshold after which a silent supervisor without leases is declared dead, in milliseconds."""
        return max(self.claimed_ms or 0, self.running_ms or 0)

    def is_stale(self, lease: Lease) -> bool:
        """Return whether a lease has been silent for at least its threshold, by the database's clock."""
        threshold_ms = self.of(lease)
        return threshold_ms is not None and lease.silent_ms >= threshold_ms

    def _is_resilient(self, lease: Lease) -> bool:
        flags = flags_of(lease)
        return any(flags.get(name, False) for name in self.resilient_flags)


class _Window(Struct):
    sequence: int
    since: float
    served_from_s: float
    watched_from_s: float
    checks: int = 1


class Windows:
    """Measures how long each heartbeat sequence number has been unchanged.

    Any change is a sign of life, even to a lower number, because a failover can lose heartbeats. There are two measures, and the longer
    one counts. The first is the undisturbed time since the number changed. The second is half of the time in which the database served
    the observer's heartbeats. Disturbances do not reset the second measure, because they could otherwise postpone judgements forever.
    """

    def __init__(self) -> None:
        self._windows: dict[str, _Window] = {}
        self._served_s = 0.0
        self._watched_s = 0.0

    def pass_by(self, *, watched_s: float, served_s: float) -> None:
        """Add the time since the observer's previous check.

        `watched_s` is for how many seconds the observer was watching. `served_s` is for how many seconds the database served its
        heartbeats.
        """
        self._watched_s += watched_s
        self._served_s += served_s

    def see(self, key: str, sequence: int, *, at: float) -> None:
        """Record that `key` had the sequence number `sequence` at the time `at`."""
        window = self._windows.get(key)
        if window is None or window.sequence != sequence:
            self._windows[key] = _Window(sequence, at, self._served_s, self._watched_s)
        else:
            window.checks += 1

    def stands_s(self, key: str, *, at: float) -> float:
        """Return how many seconds `key` has been unchanged, by the longer of the two measures. Return 0 if it was never seen."""
        window = self._windows.get(key)
        if window is None:
            return 0.0
        return max(at - window.since, (self._served_s - window.served_from_s) / _SERVED_WEIGHT)

    def watched_s(self, key: str) -> float:
        """Return how many seconds `key` has been unchanged while the observer was watching, including disturbed time."""
        window = self._windows.get(key)
        return 0.0 if window is None else self._watched_s - window.watched_from_s

    def next_in(self, key: str, threshold_s: float, *, at: float) -> float:
        """Return the seconds until `key` will have been unchanged for `threshold_s` seconds, if no disturbance occurs."""
        window = self._windows.get(key)
        return threshold_s if window is None else threshold_s - (at - window.since)

    def is_suspect(self, key: str) -> bool:
        """Return whether `key` was unchanged between two checks."""
        window = self._windows.get(key)
        return window is not None and window.checks > 1

    def excuse(self, *, at: float) -> None:
        """Restart all windows at `at`, because the observer was disturbed. The served time is kept."""
        for window in self._windows.values():
            window.since, window.checks = at, 0

    def forget_some(self, keys: Collection[str]) -> None:
        """Forget these keys. They cannot be judged until a whole window has passed after the next check."""
        for key in keys:
            self._windows.pop(key, None)

    def forget(self) -> None:
        """Forget all keys. They cannot be judged until a whole window has passed after the next check."""
        self._windows.clear()

    def keep(self, keys: Collection[str]) -> None:
        """Forget all keys that are not in `keys`."""
        for gone in self._windows.keys() - set(keys):
            del self._windows[gone]


class OwnBeats:
    """Counts how many of its own heartbeats an observer finds in the database at each check.

    Each of these heartbeats shows that the database was serving supervisors. A silent tree that is alive had the same chance to send
    a heartbeat.
    """

    def __init__(self) -> None:
        self._before: WatchedBeats | None = None

    def landed(self, beats: Iterable[WatchedBeats], *, supervisor_id: str) -> int:
        """Return how many of the observer's own heartbeats the database has stored since the previous check."""
        own = next((beat for beat in beats if beat.supervisor_id == supervisor_id), None)
        before, self._before = self._before, own
        if own is None or before is None or before.supervisor_id != own.supervisor_id:
            return 0
        return max(0, own.beat_seq - before.beat_seq)


class Amnesty:
    """Decides whether an event since the previous check, such as an outage, excuses the silence of all trees."""

    def __init__(self, *, longest_gap_s: float) -> None:
        self.watched_s = 0.0
        self._longest_gap_s = longest_gap_s
        self._looked_at: float | None = None
        self._server: datetime | None = None
        self._disturbances = 0

    def is_due(self, *, asked_at: float, answered_at: float, server: datetime, disturbances: int) -> bool:
        """Return whether all windows must restart, because the observer was suspended or cut off, or a different server replied.

        Set `watched_s` to the seconds since the previous check, or to 0 if the observer was suspended or the server has changed.
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
        """Return whether the observer has been disturbed since the last check. Decisions based on that check must then be dropped."""
        return disturbances != self._disturbances


class Calm:
    """Decides whether a missing session might belong to a living tree that is about to reconnect.

    An observer that was cut off itself counts from its own reconnect. An observer that has just started learns from the server that a
    crash closed all sessions, and counts from its own first check. By then, the server cannot have accepted connections for long.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._began_at: float | None = None

    def record(self, at: float) -> None:
        """Record that the server replied to a check at the time `at`."""
        if self._began_at is None:
            self._began_at = at

    def covers(self, *, lost_in_crash: bool, at: float) -> bool:
        """Return whether a missing session proves nothing yet.

        `lost_in_crash` is whether the server has crashed since the session was opened.
        """
        moments = (self._observer.reconnected_at, self._began_at if lost_in_crash else None)
        return any(since is not None and at - since < CALM_S for since in moments)
