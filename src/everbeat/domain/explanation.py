"""Why a task is not running, or why it was run again: reasons with a code, for people and for programs.

What lives here: the codes, the records, and the facts that reasons are found in. What may not: how reasons are found
(`waiting`, `holding`, `second_runs`), how facts are read and how reasons are shown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

import msgspec

from everbeat.domain.inspection import RecoveryInfo
from everbeat.domain.needs import Misfit, Needs, Registered
from everbeat.domain.pauses import Pause
from everbeat.domain.states import TaskState
from everbeat.domain.workflow_info import WorkflowState


class ReasonCode(StrEnum):
    """What a reason is about; stable for programs."""

    NO_WORKER = "NO_WORKER"
    WORKER_NOT_STARTED = "WORKER_NOT_STARTED"
    LIVENESS_UNKNOWN = "LIVENESS_UNKNOWN"
    WORKERS_QUIET = "WORKERS_QUIET"
    QUEUE_NOT_SERVED = "QUEUE_NOT_SERVED"
    NAME_UNKNOWN = "NAME_UNKNOWN"
    NEEDS_OTHER_CODE = "NEEDS_OTHER_CODE"
    SCHEDULED = "SCHEDULED"
    SLEEPING = "SLEEPING"
    WAITING_FOR_EVENT = "WAITING_FOR_EVENT"
    RETRY_DUE_LATER = "RETRY_DUE_LATER"
    RECOVERY_DELAYED = "RECOVERY_DELAYED"
    TASK_PAUSED = "TASK_PAUSED"
    QUEUE_PAUSED = "QUEUE_PAUSED"
    SERIAL_LINE = "SERIAL_LINE"
    SUSPECT = "SUSPECT"
    SLOTS_BUSY = "SLOTS_BUSY"
    IN_LINE = "IN_LINE"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    DEADLINE_TOO_EARLY = "DEADLINE_TOO_EARLY"
    DEADLINE_NEAR = "DEADLINE_NEAR"
    CLAIMED = "CLAIMED"
    RUNNING = "RUNNING"
    PROGRESS_STANDS = "PROGRESS_STANDS"
    CANCEL_REQUESTED = "CANCEL_REQUESTED"
    HOLDER_UNRESPONSIVE = "HOLDER_UNRESPONSIVE"
    HOLDER_WITHOUT_SESSION = "HOLDER_WITHOUT_SESSION"
    HOLDER_SILENT = "HOLDER_SILENT"
    HOLDER_ENDED = "HOLDER_ENDED"
    HOLDER_UNKNOWN = "HOLDER_UNKNOWN"
    RECOVERY_OFF = "RECOVERY_OFF"
    HOOK_SKIPPED = "HOOK_SKIPPED"
    NOBODY_SWEEPS = "NOBODY_SWEEPS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    RETRIED = "RETRIED"
    RECOVERED = "RECOVERED"
    HANDED_BACK = "HANDED_BACK"
    SUSPENDED = "SUSPENDED"
    RETRIED_BY_OPERATOR = "RETRIED_BY_OPERATOR"
    WORKFLOW_PAUSED = "WORKFLOW_PAUSED"
    WORKFLOW_CANCELLING = "WORKFLOW_CANCELLING"
    NOT_ADVANCED = "NOT_ADVANCED"
    STUCK = "STUCK"
    WAITS_FOR_NODES = "WAITS_FOR_NODES"
    LOCKED = "LOCKED"
    BAD_ROW = "BAD_ROW"
    DATABASE_READ_ONLY = "DATABASE_READ_ONLY"


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason: since when, until when if that is known, what stands in the way, and the command that helps.

    `blocked_by` is the id of a task, workflow or worker, or the name of what is paused; times are the database's. `node`: of a workflow's
    reasons, the name of the node it is about.
    """

    code: ReasonCode
    text: str
    since: datetime | None = None
    until: datetime | None = None
    blocked_by: str | None = None
    command: str | None = None
    node: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """What keeps a task from running, what it does or how it ended (`reasons`), and why it ran again (`second_runs`).

    `at` is the database's time of the look; `second_runs` has one reason for each time it was taken up again, oldest first. Of a
    workflow's task: the workflow, and the name of the node.
    """

    task_id: UUID
    name: str
    queue: str
    state: TaskState
    at: datetime
    reasons: tuple[Reason, ...]
    second_runs: tuple[Reason, ...]
    workflow_id: UUID | None = None
    workflow: str | None = None
    node: str | None = None


class WorkflowExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a workflow has not ended, or how it ended: reasons about it as a whole, then about open nodes, the deepest causes first.

    Reasons about nodes have the `node` and, of its task, the code that the task's own explanation has; nodes that are alike share one.
    `left_out`: how many open nodes are not told of. `at` is the database's time of the look.
    """

    workflow_id: UUID
    name: str
    state: WorkflowState
    at: datetime
    reasons: tuple[Reason, ...]
    left_out: int


class FailingStart(msgspec.Struct, frozen=True):
    """A live supervisor that cannot start a worker process, why, and since when. It has `workers` of the `processes` that it keeps."""

    supervisor_id: str
    pid: int
    hostname: str
    problem: str
    since: datetime | None
    processes: int | None
    workers: int


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """What a PENDING task waits for. Counts of tasks stop at 1,001.

    Workers that are `alive`, `serving` its queue, `knowing` its name too, and `fitting` its arguments too; `slots` of the last and how many
    code is `running` in, None where a worker has not told yet; `ahead` in its queue, `before` it in its serial line, the first of
    those; suspects that run or are held elsewhere (`alone`); `lagging` of the `fitting`, with an event loop that is late
    by more than a second. On a standby (`is_standby`) beats arrive late, so no worker is known to be dead. `lost` have beaten lately, but
    PostgreSQL has no session of their trees any more; they are not `alive`. `failing_starts` is read only if none are `fitting`.
    `quiet` of the `fitting`, the last since `quiet_since`: an operator keeps their trees from claiming. The `knowing` have `registered`
    their parameters; the `misfits` among them cannot run the task, because of what it `needs`.
    """

    alive: int
    serving: int
    knowing: int
    slots: int | None = None
    running: int | None = None
    last_beat_at: datetime | None = None
    ahead: int = 0
    before: int = 0
    first_id: UUID | None = None
    first_state: TaskState | None = None
    first_name: str | None = None
    first_due_at: datetime | None = None
    alone: int = 0
    lagging: int = 0
    task_pause: Pause | None = None
    queue_pause: Pause | None = None
    known_tasks: tuple[str, ...] = ()
    known_queues: tuple[str, ...] = ()
    is_standby: bool = False
    lost: int = 0
    failing_starts: tuple[FailingStart, ...] = ()
    quiet: int = 0
    quiet_since: datetime | None = None
    fitting: int = 0
    registered: tuple[Registered, ...] = ()
    needs: Needs | None = None
    misfits: tuple[Misfit, ...] = ()


class Holding(msgspec.Struct, frozen=True):
    """The lease of a task: its holder, the holder's last sign of life, its other running tasks, and how many could recover it.

    `left_at`: when a recovery hook first said that this holder keeps it. `is_standby`: the beats may be older than they are.
    `session_lost`: PostgreSQL has no session of the holder's tree any more. `lag_ms`: how late its event loop was, `lag_at` that moment.
    The last three are what the holder's tree wrote of its beats.
    """

    worker_id: str
    supervisor_id: str | None
    hostname: str | None
    pid: int | None
    claimed_at: datetime
    started_at: datetime | None
    last_beat_at: datetime
    silent_ms: int
    ended_at: datetime | None
    ended_how: str | None
    ended_cause: str | None
    cancel_requested: bool
    alone: bool
    suspect: bool
    flags: Mapping[str, Any]
    neighbours: tuple[UUID, ...]
    observers: int
    left_at: datetime | None
    is_standby: bool = False
    session_lost: bool = False
    lag_ms: float | None = None
    lag_at: datetime | None = None
    claimed_stale_ms: int | None = None
    running_stale_ms: int | None = None
    beat_ms: int | None = None


class SilenceRules(msgspec.Struct, frozen=True, kw_only=True):
    """From which silence a lease counts as dead, as the asking app's configuration says; None: never by itself."""

    claimed_ms: int | None
    running_ms: int | None
    beat_interval_ms: int
    check_interval_ms: int
    multiplier: int
    resilient_flags: Collection[str]

    def threshold_ms(self, holding: Holding) -> int | None:
        """The threshold of a lease, the longer of these rules' and its tree's; None when its state is not recovered by itself."""
        is_running = holding.started_at is not None
        plain = self.running_ms if is_running else self.claimed_ms
        if plain is None:
            return None
        plain = max(plain, (holding.running_stale_ms if is_running else holding.claimed_stale_ms) or 0)
        return plain * (
            self.multiplier if any(holding.flags.get(name) for name in self.resilient_flags) else 1
        )

    def is_silent(self, holding: Holding) -> bool:
        """Whether the holder has missed a beat by the longer of these rules' interval and its tree's."""
        return holding.silent_ms > 2 * max(self.beat_interval_ms, holding.beat_ms or 0)


def unknown_liveness(what: str, *, last_beat_at: datetime | None, blocked_by: str | None = None) -> Reason:
    """The reason on a standby, where `what` cannot be told."""
    return Reason(
        code=ReasonCode.LIVENESS_UNKNOWN,
        text=f"{what} is unknown here: this server is a standby, and beats reach it with the delay of replication",
        since=last_beat_at,
        blocked_by=blocked_by,
        command="everbeat workers --url URL-OF-THE-PRIMARY",
    )


def fate(recovery: RecoveryInfo, *, what: str = "it") -> str:
    """What happened to the holder whose task was recovered; `what` it held."""
    match recovery.noticed_by, recovery.was:
        case "progress", _:
            return f"its code stood still on worker {recovery.worker_id}: {recovery.cause}"
        case "operator", _:
            return f"worker {recovery.worker_id}, which held {what}, was released by an operator: {recovery.cause}"
        case _, TaskState.RUNNING:
            return f"worker {recovery.worker_id}, which ran {what}, died: {recovery.cause}"
        case _:
            return f"worker {recovery.worker_id}, which had claimed {what}, died before its code started: {recovery.cause}"


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """A number with its noun; what was counted to 1,001 is more than 1,000."""
    shown = "more than 1,000" if number > 1_000 else "no" if number == 0 else str(number)
    return f"{shown} {noun if number == 1 else plural or f'{noun}s'}"
