"""The reasons that `everbeat explain` gives, the facts behind them, and the advice that follows an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

import msgspec
from msgspec import Struct

from everbeat.domain.inspection import Pause, RecoveryInfo
from everbeat.domain.task.context_backend import FailedTry
from everbeat.domain.task.needs import Needs, Registered, UnfitWorkers
from everbeat.domain.task.questions import OpenQuestion
from everbeat.domain.task.states import TaskState
from everbeat.domain.workflow.states import WorkflowState
from everbeat.errors import (
    ARGUMENTS_INVALID,
    EVENT_TIMEOUT,
    MIDDLEWARE_FAILED,
    NON_DETERMINISTIC,
    RATE_LIMITED,
    RESULT_NOT_AVAILABLE,
    RESULT_UNSERIALISABLE,
    RETRY_LATER,
    RETRY_LATER_EXHAUSTED,
    TASK_CANCELLED,
    TASK_EXPIRED,
    TASK_STALLED,
    TASK_TIMEOUT,
    UNHANDLED_EXCEPTION,
    UNKNOWN_LIMIT,
    WORKER_CRASHED,
    WORKER_STOPPED,
)
from everbeat.errors.wording import amount


class ReasonCode(StrEnum):
    """The subject of a reason. The values are stable, so programs can rely on them."""

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
    WAITING_FOR_ANSWER = "WAITING_FOR_ANSWER"
    WAITING_FOR_CHILDREN = "WAITING_FOR_CHILDREN"
    RETRY_DUE_LATER = "RETRY_DUE_LATER"
    POSTPONED = "POSTPONED"
    STEP_RETRY_DUE_LATER = "STEP_RETRY_DUE_LATER"
    RECOVERY_DELAYED = "RECOVERY_DELAYED"
    ALL_PAUSED = "ALL_PAUSED"
    TASK_PAUSED = "TASK_PAUSED"
    QUEUE_PAUSED = "QUEUE_PAUSED"
    SERIAL_LINE = "SERIAL_LINE"
    LIMIT_PAUSED = "LIMIT_PAUSED"
    LIMIT_REACHED = "LIMIT_REACHED"
    RATE_REACHED = "RATE_REACHED"
    RATE_LIMITED = "RATE_LIMITED"
    FAIRNESS_TURN = "FAIRNESS_TURN"
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
    SCHEDULE_PAUSED = "SCHEDULE_PAUSED"
    SCHEDULE_RETIRED = "SCHEDULE_RETIRED"
    SCHEDULE_ENDED = "SCHEDULE_ENDED"
    TICKS_LATE = "TICKS_LATE"
    TICK_SKIPPED = "TICK_SKIPPED"
    TICK_MISSED = "TICK_MISSED"
    LOCKED = "LOCKED"
    BAD_ROW = "BAD_ROW"
    DATABASE_READ_ONLY = "DATABASE_READ_ONLY"


class Reason(msgspec.Struct, frozen=True, kw_only=True):
    """One reason, with its start and end if known, the obstacle, and the command that helps.

    `blocked_by` is the id of a task, workflow or worker, or a name, such as that of a paused queue. Times come from the
    database. `node` is the name of the workflow node that the reason is about.
    """

    code: ReasonCode
    text: str
    since: datetime | None = None
    until: datetime | None = None
    blocked_by: str | None = None
    command: str | None = None
    node: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why a task is not running, what it is doing, or how it finished (`reasons`), and how its earlier attempts ended.

    `second_runs` has one reason for each time that the task ran again or will run again, oldest first. `at` is the database's
    time. For a workflow's task, `workflow` and `node` are the names of the workflow and the node.
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
    labels: Mapping[str, str] = {}


class WorkflowExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """The reasons why a workflow has not finished, or how it finished.

    Reasons about the whole workflow come first, followed by reasons about open nodes, with root causes first. A reason about a
    node has the code from the explanation of its task. Similar nodes share one reason. `left_out` is the number of open nodes
    without a reason. `at` is the database's time.
    """

    workflow_id: UUID
    name: str
    state: WorkflowState
    at: datetime
    reasons: tuple[Reason, ...]
    left_out: int
    labels: Mapping[str, str] = {}


class FailingStart(msgspec.Struct, frozen=True):
    """A live supervisor that cannot start a worker process. `workers` is its number of worker processes, and `processes` the intended number."""

    supervisor_id: str
    pid: int
    hostname: str
    problem: str
    since: datetime | None
    processes: int | None
    workers: int


class RestartingSupervisor(msgspec.Struct, frozen=True):
    """A live supervisor that is about to start worker processes."""

    supervisor_id: str
    pid: int
    hostname: str


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about a PENDING task. Task counts stop at 1,001.

    Workers: `alive` is the number of live workers, and `serving` how many of them serve the queue. `knowing` is how many of
    those know the name, and `fitting` how many of those accept the arguments. The fitting workers have `slots`, of which
    `running` are busy; both are None if a worker has not reported them. An operator has quieted `quiet` of these workers, the
    last one at `quiet_since`. The event loops of `lagging` workers are more than a second late. `registered` has the parameters
    that the knowing workers registered. The code of the `unfit_workers` lacks something that the task `needs`.

    `lost` workers have recent heartbeats, but their trees have no PostgreSQL session, so they do not count as alive. On a
    standby (`is_standby`) heartbeats arrive late, so no worker is known to be dead. `restarting` supervisors are about to start
    workers. `restarting` and `failing_starts` are read only if no worker fits. `last_able_at` is when a worker that serves the
    queue and knows the name was last seen.

    Tasks: `ahead` counts the tasks ahead in the queue. `before` counts the tasks ahead in the serial line, and the `first_*`
    fields describe the first of these tasks. `alone` counts the suspects that are running or held elsewhere. `question` is read only
    if the task waits for an answer.
    """

    alive: int
    serving: int
    knowing: int
    slots: int | None = None
    running: int | None = None
    last_beat_at: datetime | None = None
    last_able_at: datetime | None = None
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
    all_pause: Pause | None = None
    known_tasks: tuple[str, ...] = ()
    known_queues: tuple[str, ...] = ()
    is_standby: bool = False
    lost: int = 0
    failing_starts: tuple[FailingStart, ...] = ()
    restarting: tuple[RestartingSupervisor, ...] = ()
    quiet: int = 0
    quiet_since: datetime | None = None
    fitting: int = 0
    registered: tuple[Registered, ...] = ()
    needs: Needs | None = None
    unfit_workers: tuple[UnfitWorkers, ...] = ()
    question: OpenQuestion | None = None


class Holding(msgspec.Struct, frozen=True):
    """The facts about the lease of a task, its holder, and the supervisors that could recover the task.

    `neighbours` are the holder's other running tasks. `observers` is the number of supervisors that could recover the task.
    `left_at` is when a recovery hook first returned Skip for this holder. On a standby (`is_standby`), newer heartbeats might
    not have arrived yet. `session_lost` means that the holder's tree has no PostgreSQL session. The holder's event loop was
    `lag_ms` late at `lag_at`. The last three fields are settings that the holder's tree stored.
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
    """How long a lease may be silent before it counts as dead, by the app's configuration. A threshold of None turns automatic recovery off."""

    claimed_ms: int | None
    running_ms: int | None
    beat_interval_ms: int
    check_interval_ms: int
    multiplier: int
    resilient_flags: Collection[str]

    def threshold_ms(self, holding: Holding) -> int | None:
        """Return the longer of these rules' threshold and the threshold of the lease's tree, or None if recovery is off for the lease's state."""
        is_running = holding.started_at is not None
        plain = self.running_ms if is_running else self.claimed_ms
        if plain is None:
            return None
        plain = max(plain, (holding.running_stale_ms if is_running else holding.claimed_stale_ms) or 0)
        return plain * (
            self.multiplier if any(holding.flags.get(name) for name in self.resilient_flags) else 1
        )

    def is_silent(self, holding: Holding) -> bool:
        """Return whether the holder has missed a heartbeat, by the interval of these rules or that of the holder's tree, whichever is longer."""
        return holding.silent_ms > 2 * max(self.beat_interval_ms, holding.beat_ms or 0)


def unknown_liveness(
    question: str, *, last_beat_at: datetime | None, blocked_by: str | None = None
) -> Reason:
    """Return a reason that says that `question` cannot be answered on a standby."""
    return Reason(
        code=ReasonCode.LIVENESS_UNKNOWN,
        text=f"{question} is unknown here: this server is a standby, and replication delays the heartbeats",
        since=last_beat_at,
        blocked_by=blocked_by,
        command="everbeat workers --url URL-OF-THE-PRIMARY",
    )


def fate(recovery: RecoveryInfo, *, held: str = "it") -> str:
    """Return what happened to the holder of a recovered task. `held` names the task or attempt in the text."""
    match recovery.noticed_by, recovery.was:
        case "progress", _:
            return f"its code stalled on worker {recovery.worker_id}: {recovery.cause}"
        case "operator", _:
            return f"an operator released worker {recovery.worker_id}, which held {held}: {recovery.cause}"
        case _, TaskState.RUNNING:
            return f"worker {recovery.worker_id}, which ran {held}, died: {recovery.cause}"
        case _:
            return f"worker {recovery.worker_id}, which had claimed {held}, died before its code started: {recovery.cause}"


def retry_of_step(failed: FailedTry) -> str:
    """Return a phrase that says which retry of a durable step follows the failed try."""
    return f"retry {failed.retry} of {failed.max_retries} of step {failed.step!r}"


def counted(number: int, noun: str, *, plural: str | None = None) -> str:
    """Return a number with its noun. A count that stopped at 1,001 is shown as "more than 1,000"."""
    shown = amount(min(number, 1_001), noun, plural=plural)
    return (
        f"more than 1,000{shown.removeprefix('1,001')}"
        if number > 1_000
        else f"no{shown.removeprefix('0')}"
        if number == 0
        else shown
    )


class Advice(Struct, frozen=True):
    """Advice after an error: a sentence without its final period, or an empty string if there is no advice. `{again}` stands for the retry command.

    `same_again` means that the same code will fail again with the same arguments, so a retry alone does not help.
    """

    text: str
    same_again: bool = False


_PLAIN: Final = Advice("")
ADVICE: Final[Mapping[str, Advice]] = {
    ARGUMENTS_INVALID: Advice(
        "The same code rejects the same arguments again: deploy code that accepts them, then run: {again}. Or send the task again with"
        " arguments that fit",
        same_again=True,
    ),
    RESULT_UNSERIALISABLE: Advice(
        "The same code returns such a value again: deploy code that returns a value of its annotated type, then run: {again}",
        same_again=True,
    ),
    NON_DETERMINISTIC: Advice(
        "Deploy code that calls the recorded steps as before, then run: {again}", same_again=True
    ),
    TASK_TIMEOUT: Advice(
        "A retry has the same timeout. If the code needs more time, send the task again with a longer one"
    ),
    TASK_STALLED: Advice(
        "A retry has the same stall_timeout. If the code is normally silent for longer, deploy code that reports progress, or send the"
        " task again with a longer one"
    ),
    EVENT_TIMEOUT: Advice("A retry waits for the event again, for the same time"),
    RATE_LIMITED: _PLAIN,
    RETRY_LATER: _PLAIN,
    RETRY_LATER_EXHAUSTED: Advice("A retry resets the count of postponed attempts"),
    RESULT_NOT_AVAILABLE: Advice("Find the cause in the log of its worker first"),
    WORKER_CRASHED: _PLAIN,
    WORKER_STOPPED: _PLAIN,
    UNHANDLED_EXCEPTION: _PLAIN,
    UNKNOWN_LIMIT: Advice("Deploy code that names a limit of the task, then run: {again}", same_again=True),
    MIDDLEWARE_FAILED: Advice("The error names the middleware and what it raised: remove the cause first"),
    TASK_CANCELLED: _PLAIN,
    TASK_EXPIRED: _PLAIN,
}
"""Advice by built-in error code. User-defined codes have no advice."""

POISONED: Final = Advice(
    "Find out first why its processes die: a retry resets its counts of crashes and losses"
)


def advice_on(code: str | None, *, is_poison: bool = False) -> Advice:
    """Return the advice for this error code. `is_poison` means that the task has used up its crashes or losses."""
    return POISONED if is_poison else ADVICE.get(code or "", _PLAIN)
