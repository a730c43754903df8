"""Snapshots of tasks, workers, queues and recoveries, as returned to users."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from everbeat.domain.task.context_backend import FailedTry
from everbeat.domain.task.needs import Needs
from everbeat.domain.task.policy import StoredPolicy
from everbeat.domain.task.states import TaskState
from everbeat.errors import TaskError

BeatRole: TypeAlias = Literal["claimer", "runner"]


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The latest progress that a task reported. `fraction` is between 0 and 1, or None if unknown."""

    stage: str
    fraction: float | None = None
    message: str = ""


class AttemptInfo(msgspec.Struct, frozen=True):
    """A finished attempt of a task. `outcome` is COMPLETED, FAILED, CANCELLED, RELEASED, SUSPENDED, CRASHED or LOST."""

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
    """A heartbeat for a task in flight, sent by the claimer, which holds the task, or by the runner, which executes it."""

    task_id: UUID
    sender_id: str
    role: BeatRole
    sent_at: datetime
    hostname: str
    pid: int
    supervisor_id: str


class RecoveryInfo(msgspec.Struct, frozen=True):
    """The recovery of one task: the dead worker, how its death was noticed, the action taken, and what became of the task.

    `noticed_at` is when the recovery was committed. `noticed_after_ms` is the time in milliseconds from the worker's last sign
    of life, or its exit, until its death was noticed. `charge` is "crash" or "loss" if the death was counted against the task.
    `hook` is the reply of a recovery hook, or "no answer: ..." with the reason. `became` is the task's current state, or None
    if its record was pruned. `became_at` is when the task ended, or None if it has not ended.
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
    became_at: datetime | None = None


class RecoveryPage(list[RecoveryInfo]):
    """A list of recoveries. If it is shorter than the limit because the search stopped early, `continue_before` is not None.

    `examined` is then the number of recovered tasks in `history` that the search examined. To search the tasks that ended
    earlier, pass `continue_before` as `ended_before`.
    """

    def __init__(
        self,
        recoveries: Iterable[RecoveryInfo] = (),
        *,
        examined: int | None = None,
        continue_before: datetime | None = None,
    ) -> None:
        super().__init__(recoveries)
        self.examined = examined
        self.continue_before = continue_before


class TaskSummary(msgspec.Struct, frozen=True):
    """A summary of one task, as shown in lists. All times come from the database's clock. `attempt` counts the attempts that have started.

    Tasks with the same `serial` run one at a time. A `suspect` task might kill its worker, so it runs alone. A workflow's task
    has a `workflow_id` and the name of its `node`. `parent_id` is the id of the task whose code sent this task. A suspended
    task is sleeping until `wake_at`, or is waiting for the event `waits_for` until then. `last_event_at` is when the task was
    last sent, became due, was claimed, started, reported progress or finished. `failed_try` is set while the task is waiting
    between two tries of a durable step. `labels` includes the labels that the task has inherited.
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
    last_event_at: datetime
    failed_try: FailedTry | None
    labels: Mapping[str, str]

    @property
    def claimed(self) -> bool:
        """Return whether a worker holds the task."""
        return self.state in (TaskState.CLAIMED, TaskState.RUNNING)

    @property
    def ended_at(self) -> datetime | None:
        """Return when the task reached a terminal state, or None if it has not reached one."""
        return self.completed_at or self.failed_at or self.cancelled_at or self.expired_at


class TaskPage(list[TaskSummary]):
    """A list of tasks. If it is shorter than the limit because the search stopped early, `continue_before` is not None.

    `examined` is then the number of the newest tasks that the search examined. To search the older tasks, pass `continue_before`
    as `before` together with `order="sent"`. `unindexed` names the filters that no index serves: the search compares them with
    one task after the other.
    """

    def __init__(
        self,
        tasks: Iterable[TaskSummary] = (),
        *,
        examined: int | None = None,
        continue_before: UUID | None = None,
        unindexed: Sequence[str] = (),
    ) -> None:
        super().__init__(tasks)
        self.examined = examined
        self.continue_before = continue_before
        self.unindexed = tuple(unindexed)


HOURS: Final = 24
"""For how many hours the failures of a group are counted by the hour."""


class FailureGroup(msgspec.Struct, frozen=True):
    """The FAILED and EXPIRED tasks with the same name, error code and exception class (`type`).

    `count` is their number, and `expired` how many of them are EXPIRED. The failures happened from `first_at` to `last_at`. `message` is
    the start of the message of the latest failure, whose task is `example_id`. `by_hour` has the number of failures in each of the 24 hours
    before the call, the latest hour last.
    """

    name: str
    code: str
    type: str
    count: int
    expired: int
    first_at: datetime
    last_at: datetime
    example_id: UUID
    message: str
    by_hour: tuple[int, ...] = ()


class FailurePage(list[FailureGroup]):
    """A list of groups of failures. If more tasks failed than were examined, `continue_before` is not None.

    `examined` is then the number of the latest failures that were examined. To group the earlier ones, pass `continue_before` as `before`.
    """

    def __init__(
        self,
        groups: Iterable[FailureGroup] = (),
        *,
        examined: int | None = None,
        continue_before: datetime | None = None,
    ) -> None:
        super().__init__(groups)
        self.examined = examined
        self.continue_before = continue_before


class TaskInfo(TaskSummary, frozen=True):
    """All details of one task. `arguments` and `result` are plain JSON values.

    `waiting_because` says why a PENDING task is not being claimed, or is None if the task is only waiting its turn. `needs` is
    what a worker's code must support to run the task. `needs` is None unless a worker with different code has released the
    task. `schedule` is the schedule that sent the task, and `tick` the moment for which it was sent. `batch_id` is the batch to which
    the task belongs.
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
    schedule: str | None = None
    tick: datetime | None = None
    batch_id: UUID | None = None


class WorkerInfo(msgspec.Struct, frozen=True):
    """A snapshot of one worker. `last_heartbeat_at` includes the heartbeats that the supervisor sends for the worker.

    `queues` is None for all queues; `tasks` is None if unknown. `is_stale` is None on a standby, where replication delays
    heartbeats, so an old heartbeat does not prove that the worker is dead. `session_lost` means that the worker's tree has no
    session in PostgreSQL, so the worker is dead or cut off. `session_lost` is also False if the state of the session is
    unknown. `quiet_since` is when an operator quieted the tree.
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
        """Return the names of the task functions that the worker knows, or None if they are unknown."""
        names = self.metadata.get("tasks")
        return tuple(map(str, names)) if isinstance(names, list) else None


class SupervisorInfo(msgspec.Struct, frozen=True):
    """A snapshot of one supervisor. `workers` is the number of the supervisor's workers that have not ended.

    `session_held` means that the supervisor holds its session lock. `is_stale`, `session_lost` and `quiet_since` are defined as
    in `WorkerInfo`. `processes` is the intended number of worker processes, or None for a worker inside another program.
    `start_problem` is why the supervisor has been unable to start a worker process since `start_problem_at`. `slot` is its name if it was
    started with one.
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
    slot: str | None = None


class QuietTree(msgspec.Struct, frozen=True):
    """A supervisor that was quieted or resumed, with the ids of its live workers. `quiet_since` is None while the workers claim tasks."""

    supervisor_id: str
    hostname: str
    pid: int
    quiet_since: datetime | None
    workers: tuple[str, ...]


class WorkerStateInfo(msgspec.Struct, frozen=True):
    """A snapshot of a worker: its tasks, slots, resident memory in bytes, CPU use in percent of one core, and loop lag in ms.

    `messages` is None without NATS. Otherwise "up" says whether NATS is connected, and "relay" whether the worker publishes the
    messages. The entries "published", "republished" and "held" are message counts. The entry "ended" counts the other messages
    by how they were handled. `pid` is None if only snapshots of the worker remain.
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
    pid: int | None = None


class QueueInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A queue and its task counts. `pending` counts only tasks that are due. `priority` is None if the app does not declare the queue.

    Counting stops at 10,000 tasks of each state. `at_least` names the counts that can be too low, for example `("pending",)`.
    """

    name: str
    priority: int | None = None
    pending: int = 0
    scheduled: int = 0
    claimed: int = 0
    running: int = 0
    oldest_due_s: float | None = None
    at_least: tuple[str, ...] = ()


def with_empty_queues(
    counted: Iterable[QueueInfo], known: Iterable[str], *, declared: Mapping[str, int]
) -> list[QueueInfo]:
    """Return the queues that were counted, and the declared and known ones without live tasks, by priority and name.

    `declared` has the priorities of the app's queues.
    """
    by_name = {name: QueueInfo(name=name) for name in (*declared, *known)}
    by_name |= {queue.name: queue for queue in counted}
    listed = [replace(queue, priority=declared.get(queue.name)) for queue in by_name.values()]
    return sorted(listed, key=lambda queue: (100 if queue.priority is None else queue.priority, queue.name))


class SweptTask(msgspec.Struct, frozen=True, kw_only=True):
    """A task whose holder is silent, and the action that a sweep took or, in a dry run, would take."""

    id: UUID
    name: str
    worker_id: str
    was: str
    action: str
    silent_ms: int


UNKNOWN_FATE: Final = "unknown"
"""The action that a dry run reports on a standby, where an old heartbeat does not prove a death."""


class SweepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep: the dead workers, and the actions that the sweep took on their tasks or, in a dry run, would take.

    `skipped` means that another sweep was in progress, so nothing was done. `missed` counts leases that another process
    recovered first, or whose holder came back. Tasks that a recovery hook skipped have the action "leave" and are not counted.
    On a standby, where replication delays heartbeats, a dry run reports the action "unknown" for the tasks of silent workers.
    `sessions_problem` is why the sessions of dead trees could not be terminated. The supervisors will try again.
    """

    worker_ids: tuple[str, ...]
    recovered_count: int
    tasks: tuple[SweptTask, ...]
    skipped: bool
    missed: int
    dry_run: bool
    sessions_problem: str | None = None


class PruneResult(Struct, frozen=True):
    """The number of rows that pruning deleted from each table or, in a dry run, would delete.

    `results` counts the results that were removed from completed tasks whose `keep_result_for` had passed.
    `history_parts` counts the partitions of `history` that were dropped as a whole. Of each one, up to 10,000 tasks and their
    records are counted in `tasks`, `attempts`, `recoveries`, `steps` and `signals`. `at_least` names the counts that can be too
    low because a partition contained more, for example `("tasks", "attempts")`.
    """

    tasks: int = 0
    attempts: int = 0
    recoveries: int = 0
    steps: int = 0
    signals: int = 0
    beats: int = 0
    worker_states: int = 0
    workers: int = 0
    supervisors: int = 0
    workflows: int = 0
    nodes: int = 0
    edges: int = 0
    ticks: int = 0
    schedule_versions: int = 0
    results: int = 0
    history_parts: int = 0
    at_least: tuple[str, ...] = ()

    def by_table(self) -> dict[str, int]:
        """Return the number of rows by table name."""
        return {table: number for table, number in asdict(self).items() if table != "at_least"}

    @property
    def total(self) -> int:
        """Return the total number of rows."""
        return sum(self.by_table().values())


PauseKind: TypeAlias = Literal["task", "queue", "all"]


class Pause(msgspec.Struct, frozen=True):
    """A paused task function or queue, or everything (kind "all", name "*"). Workers do not claim its tasks.

    If the brake paused the task function automatically, `crashes` is the number of crashed tasks that triggered the pause.
    `already_paused` means that the call changed nothing: an earlier pause exists and keeps its own reason.
    """

    kind: PauseKind
    name: str
    paused_at: datetime
    paused_by: str
    reason: str | None
    crashes: int | None
    already_paused: bool = False


class CancelVerdict(StrEnum):
    """The effect of a cancellation."""

    CANCELLED = "CANCELLED"
    """The task had not started and never will."""
    REQUESTED = "REQUESTED"
    """The task is running, and its worker has been asked to stop it."""
    ALREADY_ENDED = "ALREADY_ENDED"
    """The task had already finished and does not change."""


class CancelResult(Struct, frozen=True):
    """The effect of a cancellation, and the current state of the task."""

    verdict: CancelVerdict
    state: TaskState
