"""What an examination of the database and the workers found: checks with a verdict, and the facts they are judged by.

What lives here: the records. What may not: the judgements (`server_checks`, `work_checks`, `nats_checks`), and how facts are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from enum import StrEnum
from uuid import UUID

import msgspec


class Verdict(StrEnum):
    """How a check ended; FAIL is what keeps everbeat from doing what it promises."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class CheckCode(StrEnum):
    """What is examined; stable for programs."""

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
    SUSPECTS = "SUSPECTS"
    FAILURES = "FAILURES"
    RETENTION = "RETENTION"
    STUCK = "STUCK"
    BAD_ROWS = "BAD_ROWS"


class Check(msgspec.Struct, frozen=True):
    """One check: what was found, and the command or setting that helps."""

    code: CheckCode
    verdict: Verdict
    text: str
    fix: str | None = None


class Standing(msgspec.Struct, frozen=True):
    """Whether the server is a standby, and the age in seconds of the last commit that it has replayed; None where it has none."""

    is_standby: bool
    replayed_s: float | None


class Right(msgspec.Struct, frozen=True):
    """What the role must not do with a table of the schema. `tables` is how many tables the schema has."""

    table: str | None
    missing: tuple[str, ...]
    tables: int


class Clocks(msgspec.Struct, frozen=True):
    """The database's clock, the supervisors whose last beat lies ahead of it, and how far."""

    now: datetime
    ahead: tuple[str, ...]
    ahead_s: float


class Connections(msgspec.Struct, frozen=True):
    """Connections of clients: how many there are, how many may be, and how many of them are everbeat's."""

    used: int
    most: int
    ours: int


class LongTransaction(msgspec.Struct, frozen=True):
    """A transaction that keeps dead rows from being removed; `pid` is None for a prepared one."""

    pid: int | None
    who: str
    age_s: float


class LongTransactions(msgspec.Struct, frozen=True):
    """The oldest transactions; `hides`: others have transactions whose age the asking role cannot see."""

    found: tuple[LongTransaction, ...]
    hides: bool


class QueueHolder(msgspec.Struct, frozen=True):
    """A session that may keep notifications in the queue; the age of its transaction or its state is None where this role cannot see it."""

    pid: int
    who: str
    age_s: float | None


class NotifyQueue(msgspec.Struct, frozen=True):
    """The used share of PostgreSQL's queue of notifications. `is_named`: PostgreSQL names the one holder; else these have the oldest transactions."""

    used: float
    holders: tuple[QueueHolder, ...] = ()
    is_named: bool = False


class Rows(msgspec.Struct, frozen=True):
    """The rows of the table of tasks, as the server's statistics have them."""

    live: int
    dead: int
    vacuumed_at: datetime | None


class Gaps(msgspec.Struct, frozen=True):
    """The time between the beats of supervisors in the history that is kept, in seconds, without the outages.

    In an outage no supervisor beat: how many there were, the longest, and the end of the last one. `alone_s`: the longest one in
    which only one supervisor was silent, because no other one ran.
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
    """Leases that should have been recovered long ago: silent too long, of an ended worker, the longest overdue.

    `abandoned`: leases of trees that have no session in PostgreSQL, while no other tree lives.
    """

    silent: int
    ended: int
    task_id: UUID | None
    overdue_ms: int | None
    abandoned: int


class Unserved(msgspec.Struct, frozen=True):
    """PENDING tasks of one name in one queue that no live worker takes; `served`: some worker serves the queue."""

    queue: str
    name: str
    waiting: int
    served: bool


class Crew(msgspec.Struct, frozen=True):
    """Live supervisors and workers, and whether any task is PENDING, CLAIMED or RUNNING.

    `lost`: how many trees were not ended and have no session in PostgreSQL any more; those are not live.
    `quiet` names the live supervisors that an operator keeps from claiming.
    """

    supervisors: int
    workers: int
    last_beat_at: datetime | None
    has_work: bool
    lost: int
    quiet: Sequence[str] = ()


class Unresponsive(msgspec.Struct, frozen=True):
    """A worker for which its supervisor beats, and whose process had not responded to it for `lag_s` at its last snapshot."""

    worker_id: str
    pid: int
    hostname: str
    lag_s: float
    snapshot_s: float
    held: int


class SilentTrees(msgspec.Struct, frozen=True):
    """Supervisors that were not ended, those of them that are silent with their whole tree, and the tasks that the silent ones hold.

    `lost` names those that have no session in PostgreSQL any more, which hold `held_by_lost` tasks; `living` are not, and beat lately.
    """

    known: int
    silent: int
    held: int
    living: int
    lost: tuple[str, ...]
    held_by_lost: int


class Suspects(msgspec.Struct, frozen=True):
    """Tasks that may kill their worker, and one of them."""

    count: int
    task_id: UUID | None
    name: str | None


class BadRow(msgspec.Struct, frozen=True):
    """A row with a value that everbeat never writes and cannot use: its table and key, the column, the start of the value."""

    table: str
    id: str
    column: str
    value: str | None


class Oldest(msgspec.Struct, frozen=True):
    """Hours since the oldest record that retention should have taken away was made; None where there is none."""

    terminal_hours: float | None
    beat_hours: float | None
    state_hours: float | None
