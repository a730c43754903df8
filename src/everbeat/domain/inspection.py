"""What can be seen of tasks, workers and queues: plain records, as the database told them at one moment.

What lives here: the records. What may not: how they are read (`store.inspect`), explained (`explanation`) and shown.
They are structs because a dataclass of this size takes forty times as long to make, in every program at its import.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec

from everbeat.domain.needs import Needs
from everbeat.domain.outcome import TaskError
from everbeat.domain.policy import StoredPolicy
from everbeat.domain.states import TaskState

Role: TypeAlias = Literal["claimer", "runner"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What a running task last reported; `fraction` is 0 to 1, None when it said none."""

    stage: str
    fraction: float | None = None
    message: str = ""


class AttemptInfo(msgspec.Struct, frozen=True):
    """One ended attempt. `outcome` is COMPLETED, FAILED, CANCELLED, RELEASED (handed back), SUSPENDED, CRASHED or LOST."""

    attempt: int
    claim_id: UUID
    fence: int
    worker_id: str
    claimed_at: datetime
    started_at: datetime
    ended_at: datetime
    outcome: str
    will_retry: bool
    error: TaskError | None


class HeartbeatInfo(msgspec.Struct, frozen=True):
    """One proof of life for one task in flight: the claimer holds it, the runner executes it."""

    task_id: UUID
    sender_id: str
    role: Role
    sent_at: datetime
    hostname: str
    pid: int
    supervisor_id: str


class RecoveryInfo(msgspec.Struct, frozen=True):
    """One recovery: who died and why, how it was noticed, what was done, and what became of the task.

    `noticed_at` is when the recovery landed; it was noticed `noticed_after_ms` after the last sign of life, or its exit. `charge` is "crash" or
    "loss" where the death was counted; `hook` is what a recovery hook answered, or "no answer: ..." with what kept it from
    answering; `became` is the state of the task now, None when its record was pruned.
    """

    id: int
    task_id: UUID
    name: str
    queue: str
    attempt: int
    fence: int
    worker_id: str
    supervisor_id: str | None
    hostname: str | None
    pid: int | None
    was: TaskState
    cause: str
    noticed_by: str
    last_beat_at: datetime | None
    noticed_at: datetime
    noticed_after_ms: int | None
    action: str
    next_retry_at: datetime | None
    recovered_by: str | None
    certificate: Mapping[str, Any] | None
    ran_again_at: datetime | None
    charge: str | None = None
    suspect: bool = False
    hook: str | None = None
    ran_again_on: str | None = None
    became: TaskState | None = None


class TaskSummary(msgspec.Struct, frozen=True):
    """One task as a list shows it. All times are the database's; `attempt` counts the attempts that started.

    `serial` is the line it waits in, of which one task runs at a time; `suspect`: it may kill its worker, so it runs alone.
    Of a workflow's task, `workflow_id` and the name of its `node`.
    `parent_id`: the task whose code sent it. A suspended task sleeps until `wake_at`, or `waits_for` an event until then.
    """

    id: UUID
    name: str
    queue: str
    priority: int
    state: TaskState
    key: str | None
    attempt: int
    fence: int
    retry_count: int
    crash_count: int
    loss_count: int
    claimed_by_worker_id: str | None
    sent_at: datetime
    enqueued_at: datetime
    claimed_at: datetime | None
    started_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    cancelled_at: datetime | None
    expired_at: datetime | None
    next_retry_at: datetime | None
    good_until: datetime | None
    cancel_requested_at: datetime | None
    progress: Progress | None
    error: TaskError | None
    progress_at: datetime | None
    serial: str | None
    suspect: bool
    workflow_id: UUID | None
    node: str | None
    parent_id: UUID | None
    waits_for: str | None
    wake_at: datetime | None

    @property
    def claimed(self) -> bool:
        """Whether a worker has claimed the task, and nobody took it back."""
        return self.claimed_at is not None

    @property
    def ended_at(self) -> datetime | None:
        """When the task reached its terminal state; None before."""
        return self.completed_at or self.failed_at or self.cancelled_at or self.expired_at


class TaskInfo(TaskSummary, frozen=True):
    """Everything about one task. `arguments` and `result` are plain JSON values.

    `waiting_because` says what keeps a PENDING task from being claimed; None when it only waits for its turn. `needs`: what the code of a
    worker must understand to take the task; None unless a worker with other code has handed it back.
    """

    arguments: Mapping[str, Any]
    result: Any
    policy: StoredPolicy
    flags: Mapping[str, bool]
    attempts: tuple[AttemptInfo, ...]
    heartbeat: HeartbeatInfo | None
    recoveries: tuple[RecoveryInfo, ...]
    waiting_because: str | None
    needs: Needs | None = None


class WorkerInfo(msgspec.Struct, frozen=True):
    """One worker. `last_heartbeat_at` counts its supervisor's beats for it; `queues` None means all, `tasks` None unknown.

    `is_stale` is None on a standby, where beats arrive with the delay of replication: an old one does not prove a death.
    `session_lost`: PostgreSQL has no session of its tree any more, so the tree is dead or cut off. False also where that is unknown.
    `quiet_since`: since when an operator keeps its tree from claiming.
    """

    worker_id: str
    supervisor_id: str
    hostname: str
    pid: int
    queues: tuple[str, ...] | None
    started_at: datetime
    last_heartbeat_at: datetime
    is_stale: bool | None
    draining: bool
    ended_at: datetime | None
    ended_how: str | None
    ended_cause: str | None
    exit_code: int | None
    signal: int | None
    metadata: Mapping[str, Any]
    claimed: int
    running: int
    session_lost: bool
    quiet_since: datetime | None = None

    @property
    def tasks(self) -> tuple[str, ...] | None:
        """The names of the tasks it knows."""
        names = self.metadata.get("tasks")
        return tuple(map(str, names)) if isinstance(names, list) else None


class SupervisorInfo(msgspec.Struct, frozen=True):
    """One supervisor and the number of its workers that were not ended. `session_held`: it has taken its session lock.

    `is_stale` is None on a standby, as a worker's is. `session_lost` and `quiet_since` are as a worker's are. `processes`: how many worker
    processes it keeps; None for a worker inside another program. `start_problem`: why it cannot start one, since `start_problem_at`.
    """

    supervisor_id: str
    hostname: str
    pid: int
    started_at: datetime
    last_heartbeat_at: datetime
    beat_seq: int
    is_stale: bool | None
    draining: bool
    session_held: bool
    ended_at: datetime | None
    ended_how: str | None
    workers: int
    session_lost: bool
    processes: int | None = None
    start_problem: str | None = None
    start_problem_at: datetime | None = None
    quiet_since: datetime | None = None


class QuietTree(msgspec.Struct, frozen=True):
    """A supervisor that was made quiet or resumed, with the ids of its live workers. `quiet_since` is None for one that claims."""

    supervisor_id: str
    hostname: str
    pid: int
    quiet_since: datetime | None
    workers: tuple[str, ...]


class WorkerStateInfo(msgspec.Struct, frozen=True):
    """A snapshot of a worker: tasks, slots, resident bytes, CPU in percent of one core, loop lag in ms.

    `messages` is None where PostgreSQL alone tells it of tasks; else whether NATS is "up", whether the worker is the "relay" that
    publishes, how many messages it has "published" and "republished", how many are "held", and of the others how they "ended".
    """

    worker_id: str
    at: datetime
    running: int
    claimed: int
    slots: int
    rss_bytes: int
    cpu_percent: float
    loop_lag_ms: float
    messages: Mapping[str, Any] | None = None


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue and its live tasks; `pending` are due. `priority` is None for a queue this app did not declare."""

    name: str
    priority: int | None = None
    pending: int = 0
    scheduled: int = 0
    claimed: int = 0
    running: int = 0
    oldest_due_s: float | None = None


class SweptTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task found under a silent holder, and what was done with it (in a dry run: what would be)."""

    id: UUID
    name: str
    worker_id: str
    was: str
    action: str
    silent_ms: int


UNKNOWN_FATE: Final = "unknown"
"""The action of a dry run on a standby: an old beat there does not prove a death."""


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep found: the dead workers, and what was done with their tasks (in a dry run: what would be).

    `skipped`: nothing was done, because another sweep was going on. `missed`: leases whose holder came back, or that somebody
    else recovered meanwhile; what a recovery hook left is among `tasks` with the action "leave", and not counted. On a standby a dry
    run gives the action "unknown" to the tasks of silent workers: beats arrive there with the delay of replication.
    `sessions_problem`: why the sessions of dead trees could not be ended after the recovery; the supervisors try it again.
    """

    worker_ids: tuple[str, ...]
    recovered_count: int
    tasks: tuple[SweptTask, ...]
    skipped: bool
    missed: int
    dry_run: bool
    sessions_problem: str | None = None
