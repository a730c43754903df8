"""The checks of `everbeat doctor`, their verdicts, and the facts on which they are based."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from typing import Final
from uuid import UUID

import msgspec

from everbeat.domain.settings.units import spelled_duration


class CheckVerdict(StrEnum):
    """The result of a check. FAIL means that everbeat cannot keep one of its guarantees."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class CheckCode(StrEnum):
    """The subject of a check. The values are stable, so programs can rely on them."""

    DATABASE = "DATABASE"
    SCHEMA = "SCHEMA"
    RIGHTS = "RIGHTS"
    UPGRADE = "UPGRADE"
    POOLER = "POOLER"
    LISTEN = "LISTEN"
    NOTIFY_QUEUE = "NOTIFY_QUEUE"
    NATS = "NATS"
    CLOCK = "CLOCK"
    CONNECTIONS = "CONNECTIONS"
    TRANSACTIONS = "TRANSACTIONS"
    LOCKS = "LOCKS"
    DEAD_ROWS = "DEAD_ROWS"
    WORKERS = "WORKERS"
    STARTS = "STARTS"
    UNRESPONSIVE = "UNRESPONSIVE"
    TREES = "TREES"
    BEATS = "BEATS"
    SWEEPER = "SWEEPER"
    NAMES = "NAMES"
    NEEDS = "NEEDS"
    QUEUES = "QUEUES"
    PAUSES = "PAUSES"
    SCHEDULES = "SCHEDULES"
    LIMITS = "LIMITS"
    BATCHES = "BATCHES"
    BULK_ACTIONS = "BULK_ACTIONS"
    SUSPECTS = "SUSPECTS"
    FAILURES = "FAILURES"
    HANDLERS = "HANDLERS"
    RETENTION = "RETENTION"
    STUCK = "STUCK"
    BAD_ROWS = "BAD_ROWS"

    def ok(self, text: str, fix: str | None = None) -> Check:
        """Return a passed check with this code."""
        return Check(self, CheckVerdict.OK, text, fix)

    def warn(self, text: str, fix: str | None = None) -> Check:
        """Return a check with this code and a problem that everbeat tolerates."""
        return Check(self, CheckVerdict.WARN, text, fix)

    def fail(self, text: str, fix: str | None = None) -> Check:
        """Return a check with this code and a problem that breaks a guarantee of everbeat."""
        return Check(self, CheckVerdict.FAIL, text, fix)


class Check(msgspec.Struct, frozen=True):
    """The result of one check: its verdict, the finding, and the command or setting that helps."""

    code: CheckCode
    verdict: CheckVerdict
    text: str
    fix: str | None = None


class Standing(msgspec.Struct, frozen=True):
    """Whether the server is a standby, and the age in seconds of the last replayed commit (None if no commit was replayed)."""

    is_standby: bool
    replayed_s: float | None


class Right(msgspec.Struct, frozen=True):
    """The privileges that the role lacks on a table. `tables` is the number of tables in the schema."""

    table: str | None
    missing: tuple[str, ...]
    tables: int


class Clocks(msgspec.Struct, frozen=True):
    """The database's current time, the supervisors whose last heartbeat lies ahead of that time, and the largest difference in seconds."""

    now: datetime
    ahead: tuple[str, ...]
    ahead_s: float


class Connections(msgspec.Struct, frozen=True):
    """The number of client connections, the maximum number, and how many of the open connections belong to everbeat."""

    used: int
    most: int
    ours: int


class LongTransaction(msgspec.Struct, frozen=True):
    """A transaction that prevents the removal of dead rows. `pid` is None for a prepared transaction."""

    pid: int | None
    who: str
    age_s: float


class LongTransactions(msgspec.Struct, frozen=True):
    """The oldest transactions. `hides` means that the current role cannot see the age of some other transactions."""

    found: tuple[LongTransaction, ...]
    hides: bool


class QueueHolder(msgspec.Struct, frozen=True):
    """A session that might be keeping notifications in the queue. `age_s` is None if the current role cannot see the age."""

    pid: int
    who: str
    age_s: float | None


class NotifyQueue(msgspec.Struct, frozen=True):
    """The used fraction of PostgreSQL's notification queue, and the sessions that might be blocking the queue.

    `is_named` means that PostgreSQL named the holder. Otherwise `holders` are the sessions with the oldest transactions.
    """

    used: float
    holders: tuple[QueueHolder, ...] = ()
    is_named: bool = False


class Rows(msgspec.Struct, frozen=True):
    """The number of live and dead rows in the tasks table, from the server's statistics."""

    live: int
    dead: int
    vacuumed_at: datetime | None


class Gaps(msgspec.Struct, frozen=True):
    """The intervals between the recorded heartbeats of supervisors, in seconds, excluding outages.

    During an outage, no supervisor sends heartbeats. `outages` is the number of outages, `outage_s` the length of the longest
    outage, and `outage_at` the end of the last outage. `alone_s` is the longest outage in which only one supervisor was
    running.
    """

    count: int
    median_s: float | None
    p99_s: float | None
    longest_s: float | None
    supervisor_id: str | None
    ended_at: datetime | None
    outages: int
    outage_s: float | None
    outage_at: datetime | None
    alone_s: float | None


class Unswept(msgspec.Struct, frozen=True):
    """The number of leases that are overdue for recovery, and details of the most overdue lease.

    `silent` counts the leases of silent workers, and `ended` those of workers that have exited. `abandoned` counts the leases
    of trees that have lost their PostgreSQL session while no other tree is alive.
    """

    silent: int
    ended: int
    task_id: UUID | None
    overdue_ms: int | None
    abandoned: int


class Unserved(msgspec.Struct, frozen=True):
    """PENDING tasks with the same name and queue that no live worker can claim. `served` means that a worker serves the queue."""

    queue: str
    name: str
    waiting: int
    served: bool


class Crew(msgspec.Struct, frozen=True):
    """The number of live supervisors and workers, and whether any task is PENDING, CLAIMED or RUNNING.

    `lost` counts trees that have not ended but have lost their PostgreSQL session; they do not count as live. `quiet` names the
    live supervisors that an operator has quieted.
    """

    supervisors: int
    workers: int
    last_beat_at: datetime | None
    has_work: bool
    lost: int
    quiet: Sequence[str] = ()


class Unresponsive(msgspec.Struct, frozen=True):
    """A worker whose supervisor sends heartbeats, but whose process had not responded for `lag_s` seconds at the last snapshot."""

    worker_id: str
    pid: int
    hostname: str
    lag_s: float
    snapshot_s: float
    held: int


class SilentTrees(msgspec.Struct, frozen=True):
    """The number of supervisors that have not ended, how many of them are silent, and how many tasks the silent supervisors hold.

    `lost` names the supervisors without a PostgreSQL session, which hold `held_by_lost` tasks. `living` counts the supervisors
    with a session and recent heartbeats.
    """

    known: int
    silent: int
    held: int
    living: int
    lost: tuple[str, ...]
    held_by_lost: int


class Suspects(msgspec.Struct, frozen=True):
    """The number of tasks that might kill their worker, and the id and name of one such task."""

    count: int
    task_id: UUID | None
    name: str | None


class BadRow(msgspec.Struct, frozen=True):
    """A row with a value that everbeat never writes and cannot use: the table, the key, the column, and the start of the value."""

    table: str
    id: str
    column: str
    value: str | None


class Oldest(msgspec.Struct, frozen=True):
    """The age in hours of the oldest record under each retention setting, or None if there is no such record."""

    terminal_hours: float | None
    beat_hours: float | None
    state_hours: float | None


SWEEP: Final = "everbeat sweep"
_DEFAULT_SCHEMA: Final = "everbeat"
_LEAST_MS: Final = 60_000
"""The lowest threshold in milliseconds that `everbeat sweep` accepts without an app: two default heartbeat intervals."""


def sweep_command(*, beat_interval_ms: int, schema: str) -> str:
    """Return the command that recovers the tasks of silent trees at once."""
    threshold = spelled_duration(max(2 * beat_interval_ms, _LEAST_MS) / 1_000)
    return f"{SWEEP} --threshold {threshold}" + ("" if schema == _DEFAULT_SCHEMA else f" --schema {schema}")
