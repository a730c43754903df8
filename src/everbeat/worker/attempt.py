"""A lease and its attempt, from the claim to the settled row, and the state table for the attempt's stages in memory."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from datetime import datetime, timedelta
from enum import StrEnum
from functools import cached_property
from typing import Final, Literal, Protocol, TypeAlias

from msgspec import Struct

from everbeat.domain.labels import decode_labels
from everbeat.domain.task.checkpoint import PartialWork
from everbeat.domain.task.context import Context
from everbeat.domain.task.context_backend import EmittedItem
from everbeat.domain.task.definition import CallCodec, TaskDefinition
from everbeat.domain.task.policy import RunIn, StoredPolicy
from everbeat.domain.tracing.tracing import Tracing
from everbeat.errors import DatabaseError, PayloadError, StopReason, TaskStopped
from everbeat.protocol import Answer, LeaseKey, Request
from everbeat.runtime.clock import Clock
from everbeat.runtime.log_buffer import LogBuffer
from everbeat.runtime.processes import ExitReport
from everbeat.store.claims import Claimed
from everbeat.worker.context_backend import RequestingBackend
from everbeat.worker.progress_text import progress_json


class Stage(StrEnum):
    """The stage of an attempt in this worker's memory."""

    CLAIMED = "CLAIMED"
    STARTING = "STARTING"
    """The start is being sent to the database, or the database has acknowledged it and the code is waiting for a slot."""
    RUNNING = "RUNNING"
    COMMITTING = "COMMITTING"
    """The task's own code is committing the attempt's outcome."""
    SETTLING = "SETTLING"
    """The outcome is being written."""
    RECOVERING = "RECOVERING"
    """The task process exited or the code stalled, and recovery is deciding what happens to the attempt."""
    LEFT = "LEFT"
    """A recovery hook left the attempt unchanged. The worker keeps the lease, and recovery keeps asking the hook."""
    COMMITTED = "COMMITTED"
    """The lease is no longer held, because the attempt's own code completed the task. The code might still be running."""
    GONE = "GONE"
    """The lease is no longer held: settled, released, expired or lost. The worker writes nothing more for the attempt."""


CODE_RUNS: Final = (Stage.RUNNING, Stage.COMMITTING)
"""The stages in which the code is running under a lease that this worker holds."""
UNSETTLED: Final = (Stage.SETTLING, Stage.RECOVERING)
"""The stages in which the outcome has not been written yet."""
OVER: Final = (Stage.COMMITTED, Stage.GONE)
"""The stages in which the lease is over."""


StageEvent: TypeAlias = Literal[
    "START",  # the start is being sent, or was acknowledged while no slot was free
    "START_FAILED",  # the start might not have reached the database, or the lease cannot be released for now
    "NOT_STARTED",  # the database reported that the lease was released, expired or lost before the code started
    "LAUNCH",  # the start was acknowledged, and a slot is free
    "STOP",  # the code should stop
    "LOSE",  # the lease belongs to another worker
    "STALL",  # the code reported nothing for longer than its `stall_timeout`
    "DIE",  # the task process exited while the code was running
    "GRACE_OVER",  # the code was asked to stop and has not finished in time
    "OUTCOME",  # the outcome to write has been decided
    "COMMIT_BEGINS",  # the code is about to commit the attempt's outcome
    "COMMIT_FAILED",  # the code's commit did not settle the attempt
    "COMMIT_LANDED",  # the code's commit settled the attempt
    "SETTLED",  # the database reported the result of writing the outcome
    "HOOK_LEFT",  # a recovery hook left the attempt unchanged
    "RECOVERED",  # recovery settled the attempt
]
"""The events in the life of an attempt. They are strings, because accessing enum members is slow on Python 3.11."""

Effect: TypeAlias = Literal[
    "NOTHING",
    "IGNORE",  # the event does not apply to an attempt in this stage
    "REMEMBER",  # keep the stop request until the code starts
    "DEFER",  # repeat the event if the commit fails; drop it if the commit succeeds
    "BEGIN_CODE",
    "STOP_CODE",
    "LET_GO",  # stop holding the lease
    "LET_GO_AND_STOP",  # stop holding the lease, and stop the code
    "SETTLE_WITHOUT_CODE",  # decide the outcome while the code is still running
    "WRITE",  # write the outcome
    "RECOVER",  # let recovery decide, as after any other death
]
"""The effects of lifecycle events: what the worker does next."""


LIFE: Final[Mapping[tuple[Stage, StageEvent], tuple[Stage, Effect]]] = {
    (Stage.CLAIMED, "START"): (Stage.STARTING, "NOTHING"),
    (Stage.CLAIMED, "START_FAILED"): (Stage.CLAIMED, "NOTHING"),
    (Stage.CLAIMED, "NOT_STARTED"): (Stage.GONE, "LET_GO"),
    (Stage.CLAIMED, "LAUNCH"): (Stage.RUNNING, "BEGIN_CODE"),
    (Stage.CLAIMED, "STOP"): (Stage.CLAIMED, "REMEMBER"),
    (Stage.CLAIMED, "LOSE"): (Stage.GONE, "LET_GO"),
    (Stage.STARTING, "START"): (Stage.STARTING, "NOTHING"),
    (Stage.STARTING, "START_FAILED"): (Stage.CLAIMED, "NOTHING"),
    (Stage.STARTING, "NOT_STARTED"): (Stage.GONE, "LET_GO"),
    (Stage.STARTING, "LAUNCH"): (Stage.RUNNING, "BEGIN_CODE"),
    (Stage.STARTING, "STOP"): (Stage.STARTING, "REMEMBER"),
    (Stage.STARTING, "LOSE"): (Stage.GONE, "LET_GO"),
    (Stage.RUNNING, "STOP"): (Stage.RUNNING, "STOP_CODE"),
    (Stage.RUNNING, "LOSE"): (Stage.GONE, "LET_GO_AND_STOP"),
    (Stage.RUNNING, "STALL"): (Stage.RECOVERING, "RECOVER"),
    (Stage.RUNNING, "DIE"): (Stage.RECOVERING, "RECOVER"),
    (Stage.RUNNING, "GRACE_OVER"): (Stage.RUNNING, "SETTLE_WITHOUT_CODE"),
    (Stage.RUNNING, "OUTCOME"): (Stage.SETTLING, "WRITE"),
    (Stage.RUNNING, "COMMIT_BEGINS"): (Stage.COMMITTING, "NOTHING"),
    (Stage.COMMITTING, "STOP"): (Stage.COMMITTING, "DEFER"),
    (Stage.COMMITTING, "LOSE"): (Stage.COMMITTING, "DEFER"),
    (Stage.COMMITTING, "GRACE_OVER"): (Stage.COMMITTING, "DEFER"),
    # A stall does not wait for the commit, which might hang forever. Recovery reads from the row whether the commit
    # succeeded.
    (Stage.COMMITTING, "STALL"): (Stage.RECOVERING, "RECOVER"),
    (Stage.COMMITTING, "DIE"): (Stage.RECOVERING, "RECOVER"),
    (Stage.COMMITTING, "OUTCOME"): (Stage.SETTLING, "WRITE"),
    (Stage.COMMITTING, "COMMIT_BEGINS"): (Stage.COMMITTING, "NOTHING"),
    (Stage.COMMITTING, "COMMIT_FAILED"): (Stage.RUNNING, "NOTHING"),
    (Stage.COMMITTING, "COMMIT_LANDED"): (Stage.COMMITTED, "LET_GO"),
    (Stage.SETTLING, "SETTLED"): (Stage.GONE, "LET_GO"),
    (Stage.RECOVERING, "HOOK_LEFT"): (Stage.LEFT, "NOTHING"),
    (Stage.RECOVERING, "RECOVERED"): (Stage.GONE, "LET_GO"),
    (Stage.LEFT, "RECOVERED"): (Stage.GONE, "LET_GO"),
    # The code of a stalled attempt might resume, and its commit might succeed before recovery changes the row.
    (Stage.RECOVERING, "COMMIT_LANDED"): (Stage.COMMITTED, "LET_GO"),
    (Stage.LEFT, "COMMIT_LANDED"): (Stage.COMMITTED, "LET_GO"),
    (Stage.GONE, "COMMIT_LANDED"): (Stage.COMMITTED, "LET_GO"),
}

ExecutorName: TypeAlias = RunIn | Literal["solo"]
"""The name of an executor: a `run_in` mode, or "solo" for the executor that runs each suspect alone in a process."""

ALONE: Final[frozenset[ExecutorName]] = frozenset(("process", "solo"))
"""The executors that run each task alone in a process. The process can always be killed, and its death affects no other task."""

_emitting: Final = threading.Lock()
"""Held while an item is numbered and queued, which takes microseconds. A lock for each attempt would cost more."""
_LONGEST_MS: Final = 100 * 365 * 24 * 3_600 * 1_000
"""The longest limit that is used. A limit that was edited by hand might otherwise exceed the range of datetime."""


class Succeeded(Struct, frozen=True):
    """The code returned a value. `result` is that value as JSON text."""

    result: bytes


class CodeFailed(Struct, frozen=True):
    """The code raised an exception or could not be run.

    `error` is JSON text. `reasons` are the names under which a policy can list the failure. `exception` is kept for the log,
    if it was raised in this process.
    """

    error: bytes
    reasons: tuple[str, ...]
    exception: BaseException | None = None


class CodeSuspended(Struct, frozen=True):
    """The code released its slot until the time or event that it is waiting for."""


class CodePostponed(Struct, frozen=True):
    """The code raised RetryLater. `error` is JSON text with the reason.

    The task runs again at `run_at`, or after `after_ms`. `counts`: the attempt costs one retry.
    """

    error: bytes
    after_ms: int
    run_at: datetime | None
    counts: bool


class CodeCancelled(Struct, frozen=True):
    """The code raised Cancel. `error` is JSON text with the reason."""

    error: bytes


class Declined(Struct, frozen=True):
    """The task's arguments do not fit the function: it does not accept the `unknown` names, or requires the `missing` names.

    No code ran. `failed` is how the attempt ends if the task cannot be left to workers with other code.
    """

    failed: CodeFailed
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


class Died(Struct, frozen=True):
    """The task process exited while the code was running."""

    report: ExitReport


AttemptEnd: TypeAlias = (
    Succeeded | CodeFailed | CodeSuspended | CodePostponed | CodeCancelled | Declined | Died
)
SUSPEND_PATIENCE_S: Final = 2.0
"""How long code that was asked to release its slot can take before a worker shutdown stops it, in seconds."""


class RequestHandler(Protocol):
    """Answers requests from running task code. `tracing` are the tracers of the app."""

    tracing: Tracing | None

    def submit(self, attempt: Attempt, request: Request) -> Future[Answer]:
        """Start answering a request and return a future for the answer. Safe to call from any thread.

        Raises RuntimeError if the worker's loop is closed.
        """
        ...

    async def answer(self, attempt: Attempt, request: Request) -> Answer:
        """Return the answer to a request. Called on the worker's loop."""
        ...

    def note_progress(self, attempt: Attempt) -> None:
        """Write the attempt's pending progress soon. Safe to call from any thread."""
        ...

    def note_items(self, attempt: Attempt) -> None:
        """Store the items that the attempt has emitted soon. Safe to call from any thread."""
        ...


class StopRequest(Struct):
    """Why an attempt's code should stop. `is_fence` is true if the reason is that the worker might lose its lease soon."""

    reason: StopReason
    is_fence: bool = False
    is_overdue: bool = False
    """Whether the worker is shutting down and the code did not finish in time. Such an attempt is settled after its process exits."""


class Attempt(RequestingBackend):
    """A lease that this worker holds, and the state of its attempt.

    Except for `progress`, attributes change only in the loop's thread. Class attributes are their initial values, which cost no time.
    """

    stage: Stage = Stage.CLAIMED
    number: int = 0
    started_at: datetime | None = None
    claimed_at: float = 0.0
    """When the worker received the reply to the claim. Like `launched_at`, a time on the worker's monotonic clock."""
    launched_at: float = 0.0
    ended: AttemptEnd | None = None
    """How the code ended. The thread that ran the code sets this value, even after the worker has shut down."""
    stop: StopRequest | None = None
    """Why the code should stop. A cancel request sets this value even before the code starts."""
    progress: bytes | None = None
    progress_noted: bool = False
    items: deque[EmittedItem] | None = None
    """The items that the code has emitted and that are not stored yet, oldest first. The thread that emits appends to it."""
    items_noted: bool = False
    items_refused: str | None = None
    """Why the database has refused an item. The attempt stores no more items, and cannot complete."""
    log: LogBuffer | None = None
    """The captured log of the code, if its log is captured."""
    reported_at: float = 0.0
    """When the code started or last reported anything, on the worker's monotonic clock."""
    settling_since: float = 0.0
    unanswered: int = 0
    """How many of the code's requests this worker has not answered yet. Code that is waiting for an answer is not considered stalled."""
    rests: int = 0
    """The number of durable sleeps and waits that are being recorded or during which the code keeps its slot.

    While it is not zero, a worker shutdown suspends the code.
    """
    timers: Sequence[asyncio.TimerHandle] = ()
    checkpoint_number: int = 0
    holds_progress: bool = False
    """Whether progress reports are held in memory instead of being written."""
    may_commit: bool = False
    """Whether the code has permission to commit its outcome and has not reported the result yet."""
    exception: BaseException | None = None
    """The exception that the code raised, kept for the log until the attempt is settled."""
    suspended_at: float | None = None
    """When the code was first asked to release its slot, on the worker's monotonic clock."""
    after_commit: Sequence[Callable[[], None]] = ()
    """The calls that are deferred until the code's commit has ended."""

    def __init__(
        self,
        *,
        task: Claimed,
        executor_name: ExecutorName,
        definition: TaskDefinition,
        policy: StoredPolicy,
        requests: RequestHandler,
    ) -> None:
        self.task = task
        self.id: Final = task.id
        self.claim_id: Final = task.claim_id
        """The claim id, which is part of every write for this attempt."""
        self.executor_name = executor_name
        self.definition = definition
        self.policy = policy
        self.requests = requests

    def move(self, event: StageEvent) -> Effect:
        """Move to the next stage and return the effect of the event."""
        if (step := LIFE.get((self.stage, event))) is None:
            return "IGNORE"
        self.stage, effect = step
        return effect

    @property
    def stopped(self) -> StopReason | None:
        """Return why the code should stop, or None if it should not."""
        return None if self.stop is None else self.stop.reason

    @property
    def is_unstoppable(self) -> bool:
        """Return whether the code was asked to stop for a worker shutdown but did not finish in time and is still running."""
        return self.stop is not None and self.stop.is_overdue and self.stage in CODE_RUNS

    def is_suspended_by(self, reason: StopReason, clock: Clock) -> bool:
        """Return whether the code is about to release its slot. A worker shutdown must wait for that, or the attempt would fail.

        Code that catches its suspension and continues is stopped after `SUSPEND_PATIENCE_S` seconds.
        """
        if reason != "shutting_down":
            return False
        since = self.suspended_at
        return self.rests > 0 or (since is not None and clock.monotonic() - since < SUSPEND_PATIENCE_S)

    @cached_property
    def checkpoint_turn(self) -> asyncio.Lock:
        """Return the lock that is held while a checkpoint is written."""
        return asyncio.Lock()

    @cached_property
    def wait_turn(self) -> asyncio.Lock:
        """Return the lock that is held while a signal is taken, so that two waits in one attempt never take the same signal."""
        return asyncio.Lock()

    @property
    def lease(self) -> LeaseKey:
        """Return (task id, claim_id)."""
        return self.task.id, self.task.claim_id

    @property
    def timeout_s(self) -> float | None:
        """Return how many seconds the policy lets the code run, or None if there is no limit."""
        limit_ms = self.policy.timeout_ms
        return None if limit_ms is None else min(limit_ms, _LONGEST_MS) / 1_000

    @property
    def stall_timeout_s(self) -> float | None:
        """Return how many seconds the policy lets the code run without reporting anything, or None if there is no limit."""
        limit_ms = self.policy.stall_timeout_ms
        return None if limit_ms is None else min(limit_ms, _LONGEST_MS) / 1_000

    @property
    def retries_left(self) -> int | None:
        """Return how many retries are left if this attempt fails, or None without a retry policy."""
        if not self.policy.intervals:
            return None
        return max(0, self.policy.max_retries - self.task.retry_count)

    @property
    def deadline(self) -> datetime | None:
        """Return when the attempt times out, by the database's clock, or None if it has no timeout or has not started."""
        if self.started_at is None or (limit_s := self.timeout_s) is None:
            return None
        return self.started_at + timedelta(seconds=limit_s)

    def context(self, *, worker_id: str) -> Context:
        """Return the Context for the attempt's code."""
        return Context(
            task_id=self.task.id,
            name=self.task.name,
            queue=self.task.queue,
            attempt=self.number,
            fence=self.task.fence,
            claim_id=self.task.claim_id,
            worker_id=worker_id,
            deadline=self.deadline,
            tick=self.task.tick,
            retries_left=self.retries_left,
            labels=decode_labels(self.task.labels),
            _backend=self,
            _work=PartialWork.from_json(self.task.checkpoint),
        )

    @property
    def tracing(self) -> Tracing | None:
        """Return the tracers of the app, or None if it has none."""
        return self.requests.tracing

    def stop_reason(self) -> StopReason | None:
        """Return why the code should stop, or None if it should not. Called by the code's Context."""
        return self.stopped

    def report_progress(self, *, stage: str, fraction: float | None, message: str) -> None:
        """Store the code's latest progress report. Called by the code's Context, from any thread."""
        self.progress = progress_json(stage=stage, fraction=fraction, message=message)
        self.requests.note_progress(self)

    def emit(self, draw: Callable[[], EmittedItem]) -> EmittedItem:
        """Queue an item that the code emits, and return it. Called by the code's Context, from any thread.

        Raises DatabaseError if the database has refused an earlier item.
        """
        if self.items_refused is not None:
            raise DatabaseError(f"Task {self.id}: {self.items_refused}")
        with _emitting:
            item = draw()
            self.queue_item(item)
        return item

    def queue_item(self, item: EmittedItem) -> None:
        """Queue an emitted item to be stored, unless the attempt is over or stores no more items."""
        if self.stage not in CODE_RUNS or self.items_refused is not None:
            return
        if self.items is None:
            self.items = deque()
        self.items.append(item)
        self.requests.note_items(self)

    def release_progress(self) -> None:
        """Resume writing progress, beginning with the report that was held back."""
        if self.holds_progress:
            self.holds_progress = self.progress_noted = False
            if self.progress is not None:
                self.requests.note_progress(self)

    @property
    def codec(self) -> CallCodec:
        """Return the codec of the task function."""
        return self.definition.codec

    def ask(self, request: Request) -> Answer:
        """Send a request from the code and return the answer. Blocks the calling thread, which must not be the loop's."""
        try:
            return self._submit(request).result()
        except CancelledError:
            raise TaskStopped("shutting_down", task_id=self.id) from None

    async def aask(self, request: Request) -> Answer:
        """Send a request from the code and return the answer. Works on any event loop."""
        # Shielded, so that the request continues if the code is cancelled.
        return await asyncio.shield(asyncio.wrap_future(self._submit(request)))

    def _submit(self, request: Request) -> Future[Answer]:
        try:
            return self.requests.submit(self, request)
        except RuntimeError:  # the loop is closed, because the worker has shut down
            raise TaskStopped("shutting_down", task_id=self.id) from None

    def cancel_timers(self) -> None:
        """Cancel the timers of this attempt."""
        for timer in self.timers:
            timer.cancel()
        self.timers = ()


def attempt_of(
    task: Claimed,
    executor_name: ExecutorName,
    definitions: Mapping[str, TaskDefinition],
    policies: Mapping[str, StoredPolicy],
    requests: RequestHandler,
) -> Attempt:
    """Return the attempt for a claimed task, with the task's own policy.

    If the task has no policy, or a manual edit made it invalid, the attempt uses the policy of the task function.
    """
    try:
        policy = None if task.policy is None else StoredPolicy.from_json(task.policy)
    except PayloadError:
        policy = None
    return Attempt(
        task=task,
        executor_name=executor_name,
        definition=definitions[task.name],
        policy=policies[task.name] if policy is None else policy,
        requests=requests,
    )
