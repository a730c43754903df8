"""The records of one sample of all trees. The fields are those of `pulse/sample.sql`."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

from msgspec import Struct

from everbeat.domain.recovery.liveness import FAREWELL


class SampledTree(Struct, frozen=True, kw_only=True):
    """A supervisor as a sample found it.

    `held_here`: it took its session lock on this incarnation of the server. `session_held`: it has taken its lock at some time, so its
    session can be watched. `sessions` counts the sessions of the whole tree. `code` is the newest version of the schema that it knows.
    """

    id: str
    hostname: str
    pid: int
    started_at: datetime
    last_beat_at: datetime
    beat_seq: int
    draining: bool
    session_held: bool
    held_here: bool
    locked: bool
    sessions: int
    slot: str | None = None
    ended_at: datetime | None = None
    ended_how: str | None = None
    beat_ms: int | None = None
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None
    quiet_since: datetime | None = None
    processes: int | None = None
    start_problem: str | None = None
    code: int | None = None

    @property
    def is_dead(self) -> bool:
        """Return whether an observer declared the tree dead."""
        return self.ended_at is not None and self.ended_how != FAREWELL


class SampledWorker(Struct, frozen=True, kw_only=True):
    """A worker as a sample found it, with the figures of its last snapshot, if it has one (`snapshot_at`)."""

    id: str
    supervisor_id: str
    pid: int
    started_at: datetime
    claimed: int
    running: int
    beat_seq: int = 0
    last_beat_at: datetime | None = None
    queues: tuple[str, ...] | None = None
    ended_at: datetime | None = None
    ended_how: str | None = None
    ended_cause: str | None = None
    slots: int | None = None
    rss_bytes: int | None = None
    cpu_percent: float | None = None
    loop_lag_ms: float | None = None
    snapshot_at: datetime | None = None

    @property
    def is_dead(self) -> bool:
        """Return whether the worker ended without an orderly exit."""
        return self.ended_at is not None and self.ended_how != FAREWELL


class SampledRecovery(Struct, frozen=True, kw_only=True):
    """A recovery that was recorded since the sample before."""

    id: int
    task_id: UUID
    name: str
    worker_id: str
    was: str
    cause: str
    noticed_by: str
    noticed_at: datetime
    action: str
    supervisor_id: str | None = None
    noticed_after_ms: int | None = None
    recovered_by: str | None = None


class SampledAction(Struct, frozen=True):
    """An action of an operator, as the audit log notes it, without its filters and its note."""

    id: int
    actor: str
    action: str
    target: str | None = None


class StoredBeat(Struct, frozen=True):
    """A heartbeat of the short history. `held` is the number of leases for which it vouched."""

    supervisor_id: str
    seq: int
    sent_at: datetime
    held: int


class PulseSample(Struct, frozen=True, kw_only=True):
    """A sample of all trees at the database's time `at`. `last_recovery` is the highest number of a recovery, or 0.

    `actions` are the latest actions of operators, also some that the sample before has found. `overdue` counts the leases that automatic
    recovery should have recovered long ago, the oldest by `overdue_ms`.
    """

    at: datetime
    is_standby: bool
    trees: tuple[SampledTree, ...]
    workers: tuple[SampledWorker, ...]
    recoveries: tuple[SampledRecovery, ...] = ()
    actions: tuple[SampledAction, ...] = ()
    overdue: int = 0
    overdue_ms: int | None = None
    last_recovery: int = 0
