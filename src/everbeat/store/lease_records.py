"""Leases as read: what a claim took, what the dead held, what is done about them. Values only; statements are in `store.leases`."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.domain.states import TaskState

RecoveryAction: TypeAlias = Literal["requeue", "retry", "reschedule", "fail", "cancel"]


class Claimed(Struct, frozen=True):
    """A task this worker just claimed; `args`, `policy` and `checkpoint` are JSON text. `attempt` counts the attempts that began.

    `suspect`: it may kill its process, so it runs alone in one. `started_at`: its attempt has begun with the claim.
    `in_line`: it is one of a serial line. `workflow_id`: it is a node's. `is_cut`: its claim would have brought more, had that not been
    too large together; `looked_s`: how long that claim looked for tasks, where it was long. Both are None for what a repeated claim answers.
    `is_marked`: it says what the code of a worker must understand before it can lease it.
    """

    id: UUID
    claim_id: UUID
    fence: int
    name: str
    queue: str
    priority: int
    args: str
    attempt: int
    retry_count: int
    crash_count: int
    loss_count: int
    policy: str | None
    enqueued_at: datetime
    good_until: datetime | None
    suspect: bool = False
    checkpoint: str | None = None
    started_at: datetime | None = None
    in_line: bool = False
    workflow_id: UUID | None = None
    is_marked: bool = False
    looked_s: float | None = None
    is_cut: bool | None = None


class MarkedGroup(Struct, frozen=True):
    """Marked tasks of one name in one queue and priority that need the same; `needs` is JSON text.

    Without a queue and priority: marked tasks of serial lines, wherever those are.
    """

    needs_id: UUID
    queue: str | None
    priority: int | None
    name: str
    needs: str


class Lease(Struct, frozen=True):
    """A lease somebody else held, as the reaper reads it. An orphan's worker is not registered: what is known of it is None.

    `claimed_stale_ms` and `running_stale_ms`: from which silence its holder's tree wrote that leases are stale.
    """

    id: UUID
    claim_id: UUID
    state: TaskState
    name: str
    worker_id: str
    supervisor_id: str | None
    hostname: str | None
    pid: int | None
    claimed_at: datetime
    started_at: datetime | None
    last_beat_at: datetime
    policy: str | None
    flags: str | None
    retry_count: int
    crash_count: int
    loss_count: int
    cancel_requested: bool
    attempt: int
    fence: int
    worker_seq: int | None
    ended_how: str | None
    ended_cause: str | None
    ended_at: datetime | None
    silent_ms: int
    supervisor_seq: int | None
    exit_code: int | None
    signal: int | None
    queue: str
    alone: bool
    suspect: bool
    progress_at: datetime | None
    progress: str | None
    serial: str | None
    last_rss_bytes: int | None
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None

    @property
    def is_orphan(self) -> bool:
        """Whether nobody knows its worker."""
        return self.supervisor_id is None


class RecoveryOrder(Struct, frozen=True, kw_only=True):
    """One decided recovery. `outcome` is CRASHED, LOST or FAILED (uncharged) for code that ran, None for a lease that never started.

    The time of the next run is `run_at`, or `retry_in_ms` from the database's now; neither leaves the task's place in its queue.
    `retry_count` replaces the task's in a "reschedule"; None counts as usual. `hook`: what a recovery hook answered.
    """

    id: UUID
    claim_id: UUID
    state: TaskState
    action: RecoveryAction
    retry_in_ms: int | None
    outcome: Literal["CRASHED", "LOST", "FAILED"] | None
    error: bytes | None
    cause: str
    last_beat_at: datetime | None
    noticed_after_ms: int | None
    worker_seq: int | None = None
    run_at: datetime | None = None
    retry_count: int | None = None
    suspect: bool = False
    hook: str | None = None


class Recovered(Struct, frozen=True):
    """A recovery that landed; the counts are those of the task afterwards."""

    id: UUID
    name: str
    was: TaskState
    action: RecoveryAction
    state: TaskState
    worker_id: str
    cause: str
    noticed_after_ms: int | None
    outcome: Literal["CRASHED", "LOST", "FAILED"] | None
    hook: str | None
    retry_count: int
    crash_count: int
    loss_count: int
    attempt: int
