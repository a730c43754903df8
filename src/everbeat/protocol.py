"""Messages between a supervisor and its worker processes, and between a worker and its task processes."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from everbeat.domain.recovery.hooks import (
    DEFAULT,
    FailWithBackoff,
    HookReply,
    HookScopes,
    NoAnswer,
    RecoveryContext,
    Reschedule,
    Skip,
    SweepSummary,
)
from everbeat.domain.schedule.model import Declared
from everbeat.domain.series import EventCounts, RateCounts
from everbeat.domain.task.captured_log import LogLine
from everbeat.domain.task.context_backend import EmittedItem, StepAnswer, StepQuestion
from everbeat.domain.tracing.model import TracedAttempt, TraceIds
from everbeat.errors import StopReason

LeaseKey = tuple[UUID, UUID]
"""A pair (task id, claim_id) that identifies one lease."""


class ProcessMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base class for all messages between the processes of a tree."""


class StoreCheckpoint(ProcessMessage, frozen=True):
    """Store this checkpoint (JSON text). A checkpoint supersedes all checkpoints with a lower `number`."""

    claim_id: UUID
    ticket: int
    number: int
    checkpoint: str


class CommitBegins(ProcessMessage, frozen=True):
    """The code is opening a transaction that will complete the task, and asks which database the transaction must use.

    If `is_snapshot` is true, the isolation level is stricter than READ COMMITTED. The transaction then fails if the task's row
    changes before it commits.
    """

    claim_id: UUID
    ticket: int
    is_snapshot: bool = False


class Committing(ProcessMessage, frozen=True):
    """The code is about to write and commit the outcome on its own connection.

    Once the worker has allowed the commit, it must not settle the attempt itself.
    """

    claim_id: UUID
    ticket: int


class CommitEnds(ProcessMessage, frozen=True):
    """The result of a commit as the code saw it: committed, rolled back, rejected by the fence, or unknown.

    The worker's answer contains the actual result.
    """

    claim_id: UUID
    ticket: int
    seen: Literal["landed", "rolled_back", "lost", "unknown"]


class StepRequest(ProcessMessage, frozen=True):
    """A question from the code about a durable step."""

    claim_id: UUID
    ticket: int
    question: StepQuestion


Request = StoreCheckpoint | CommitBegins | Committing | CommitEnds | StepRequest


class CommitTerms(ProcessMessage, frozen=True):
    """The database in which the task must be completed, and the channel on which the outcome is announced.

    `shown` is the database URL without its password. If `ignores_result` is true, the result is not stored.
    """

    installation: UUID
    schema: str
    channel: str
    shown: str
    ignores_result: bool = False


class Answer(ProcessMessage, frozen=True):
    """The worker's answer to the request with this `ticket`.

    After "stopped", the code should stop for the given `reason`. After "suspended", it should stop until the time or event that it
    is waiting for. After "over", a commit has already completed the task. After "refused", `message` gives the reason.

    "landed", "rolled_back" and "open" answer a `CommitEnds`. "open" means that an open transaction still has the task's row locked.
    """

    claim_id: UUID
    ticket: int
    verdict: Literal["yes", "stopped", "suspended", "over", "refused", "landed", "rolled_back", "open"]
    reason: StopReason | None = None
    message: str = ""
    terms: CommitTerms | None = None
    step: StepAnswer | None = None


REPORT_EVERY_S: Final = 1.0
"""The interval, in seconds, at which a worker sends a `Tick` while its event loop is running."""


# From a worker process to its supervisor.


class Hello(ProcessMessage, frozen=True):
    """The first message from a worker process, sent after it has imported the app.

    The message contains the app's settings that the supervisor needs, because the supervisor imports no user code. `schedules` are those
    that the app's code declares.
    """

    url: str
    schema: str
    recovery: dict[str, Any]
    worker: dict[str, Any]
    queues: list[str] | None
    task_names: list[str]
    on_loop: list[str] = msgspec.field(default_factory=list)
    hooks: HookScopes = HookScopes()
    executors: dict[str, Any] = msgspec.field(default_factory=dict)
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    schedules: Declared | None = None
    dashboard_url: str | None = None

    def __repr__(self) -> str:
        return f"Hello(schema={self.schema!r}, queues={self.queues!r})"  # the URL can contain a password


class Ready(ProcessMessage, frozen=True):
    """The worker process is starting to claim tasks."""


class Held(ProcessMessage, frozen=True):
    """Changes to the worker's leases since its previous `Held` message.

    `added` are the new leases, and `removed` are the claim ids of leases that the worker no longer holds.
    """

    added: list[LeaseKey]
    removed: list[UUID]


class Tick(ProcessMessage, frozen=True):
    """A periodic report, which proves that the worker's event loop is running. CPU usage is a percentage of one core.

    `names`: the names of the running tasks.
    `cut_off_s`: for how many seconds an outcome has been waiting without any reply from the database.
    `leftover`: the number of attempts that are over although their code is still running in this process.
    `messages`: the state of the message transport.
    `rates`: the events of attempts since the previous `Tick`. `events`: other events since then, or None if there were none.
    """

    running: int
    claimed: int
    slots: int
    cpu_percent: float
    loop_lag_ms: float
    names: list[str]
    cut_off_s: float = 0.0
    leftover: int = 0
    messages: dict[str, Any] | None = None
    rates: list[RateCounts] = []
    events: EventCounts | None = None


class Refused(ProcessMessage, frozen=True):
    """The process cannot start. Its parent process reports the reason."""

    code: str
    message: str
    fix: str | None = None


class Retiring(ProcessMessage, frozen=True):
    """The process has reached a limit, which `reason` names. It claims no more tasks, finishes its running tasks and then exits."""

    reason: str
    tasks: int
    rss_bytes: int


class AskBeat(ProcessMessage, frozen=True):
    """Send a heartbeat now. The reply contains an operator's command, such as a cancel, if there is a new one."""


class Leaving(ProcessMessage, frozen=True):
    """The process is exiting. It has settled or released all attempts except those for which a recovery hook returned `Skip()`.

    If `code_runs` is true, some code was asked to stop but is still running. The supervisor settles its attempts after the exit.
    """

    code_runs: bool = False


# From a supervisor to a worker process.


class Welcome(ProcessMessage, frozen=True):
    """The worker is registered. The application names of all its database sessions begin with `session_name`.

    If `quiet` is true, an operator has made the tree quiet, so the worker must not claim tasks. If `relays_hints` is true, the
    supervisor passes hints on, so the worker must not listen itself.
    """

    worker_id: str
    supervisor_id: str
    session_name: str
    quiet: bool = False
    relays_hints: bool = False


class Beaten(ProcessMessage, frozen=True):
    """The database acknowledged a heartbeat for this worker. `sent_at` is when it was sent, on the machine's monotonic clock."""

    seq: int
    sent_at: float


class Quiet(ProcessMessage, frozen=True):
    """If `on` is true, stop claiming, and release all tasks that have not started. If `on` is false, resume claiming.

    Running code is not affected.
    """

    on: bool


class Hints(ProcessMessage, frozen=True):
    """Hints that arrived at the supervisor's LISTEN session, as payloads of `hints/topics.py`."""

    payloads: list[str]


class HintsArrive(ProcessMessage, frozen=True):
    """Whether hints arrive at the supervisor's LISTEN session. Until the first message, they do not."""

    arrive: bool


class DropLeases(ProcessMessage, frozen=True):
    """The worker has lost these leases. Stop the code of their attempts, and write nothing for them."""

    leases: list[LeaseKey]


class CancelAttempts(ProcessMessage, frozen=True):
    """Stop the code of these attempts, because a cancel was requested for their tasks."""

    leases: list[LeaseKey]


class Phantoms(ProcessMessage, frozen=True):
    """According to the database, the worker holds these leases, but its last report did not contain them.

    Release the leases that the worker does not hold.
    """

    leases: list[LeaseKey]


class Adopt(ProcessMessage, frozen=True):
    """The worker was declared dead, alone or together with its supervisor, and has been registered again.

    The worker has lost all of its leases, and continues with the ids in `welcome`.
    """

    welcome: Welcome


class Drain(ProcessMessage, frozen=True):
    """Stop claiming, give running tasks `grace_ms` milliseconds to finish, release all unfinished tasks, and exit."""

    grace_ms: int


class Stop(ProcessMessage, frozen=True):
    """Stop all running code, settle or release all attempts, and exit within seconds."""


# Recovery hooks. The supervisor imports no user code, so it asks a worker process to call the hooks.


class AskHooks(ProcessMessage, frozen=True):
    """Ask the recovery hooks to decide on these tasks. The reply has the same `call` number."""

    call: int
    contexts: list[RecoveryContext]


class HookWord(ProcessMessage, frozen=True):
    """A hook's answer for one task. `kind` is the name of the answer's type.

    For a Reschedule, `run_at` or `in_s` is when to run the task, and `attempts`, unless it is None, replaces the task's retry count.
    For a NoAnswer, `problem` is the reason.
    """

    task_id: UUID
    kind: str
    run_at: datetime | None = None
    in_s: float | None = None
    attempts: int | None = None
    problem: str | None = None


class HookAnswers(ProcessMessage, frozen=True):
    """The hooks' answers to the message with the same `call` number. A missing answer counts as `Default()`."""

    call: int
    words: list[HookWord]


class TellHooks(ProcessMessage, frozen=True):
    """Call the `on_interrupted` hooks for these tasks and, if `recovered` is set, the `on_recovered` hooks.

    The worker process acknowledges the calls with a `HookAnswers` message without words.
    """

    interrupted: list[RecoveryContext]
    recovered: SweepSummary | None = None
    call: int = 0


# Between a worker process and a task process (run_in="process").


class RunAttempt(ProcessMessage, frozen=True):
    """Run this attempt. `args` and `labels` are JSON text. `traced` is set if the app has a tracer. `log_level` is the lowest to capture."""

    task_id: UUID
    claim_id: UUID
    name: str
    queue: str
    args: str
    attempt: int
    fence: int
    worker_id: str
    deadline: datetime | None
    checkpoint: str | None = None
    tick: datetime | None = None
    retries_left: int | None = None
    labels: str | None = None
    traced: TracedAttempt | None = None
    log_level: int | None = None


class LeaveIdle(ProcessMessage, frozen=True):
    """Exit when no attempt is running. The task process has become unnecessary, for example because it has reached its limit of attempts."""


class CancelRun(ProcessMessage, frozen=True):
    """Interrupt the code of this attempt if it is still running. If the code does not stop, the worker kills the process."""

    claim_id: UUID
    reason: StopReason


class ProcessReady(ProcessMessage, frozen=True):
    """The task process has imported the app and is ready to run attempts."""


class ProgressReport(ProcessMessage, frozen=True):
    """The running attempt has reported `progress` (JSON text)."""

    claim_id: UUID
    progress: str


class Emitted(ProcessMessage, frozen=True):
    """The running attempt has emitted an item of a stream."""

    claim_id: UUID
    item: EmittedItem


class Logged(ProcessMessage, frozen=True):
    """The running attempt has written these log records, which are captured."""

    claim_id: UUID
    lines: list[LogLine]


class Returned(ProcessMessage, frozen=True):
    """The attempt's code has returned `result` (JSON text). Here and below, `trace_ids` are those of the attempt's span."""

    claim_id: UUID
    result: str
    trace_ids: TraceIds | None = None


class AttemptSuspended(ProcessMessage, frozen=True):
    """The attempt's code has released its slot until the time or event that it is waiting for."""

    claim_id: UUID
    trace_ids: TraceIds | None = None


class AttemptPostponed(ProcessMessage, frozen=True):
    """The attempt's code has raised RetryLater. `error` is JSON text. The task runs again at `run_at`, or after `after_ms`."""

    claim_id: UUID
    error: str
    after_ms: int
    run_at: datetime | None
    counts: bool
    trace_ids: TraceIds | None = None


class AttemptCancelled(ProcessMessage, frozen=True):
    """The attempt's code has raised Cancel. `error` is JSON text with the reason."""

    claim_id: UUID
    error: str


class Raised(ProcessMessage, frozen=True):
    """The attempt's code has raised an exception: `error` is JSON text, and `reasons` are the names under which a policy can list it."""

    claim_id: UUID
    error: str
    reasons: tuple[str, ...]
    trace_ids: TraceIds | None = None


class NotUnderstood(ProcessMessage, frozen=True):
    """The function does not accept the task's arguments, so its code has not run.

    `unknown` are arguments that the function has no parameters for, and `missing` are required parameters without an argument. The
    other fields are the same as in `Raised`.
    """

    claim_id: UUID
    error: str
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


AttemptReport = Returned | AttemptSuspended | AttemptPostponed | AttemptCancelled | Raised | NotUnderstood
FromWorker = Hello | Ready | Held | Tick | Refused | Retiring | AskBeat | Leaving
AboutLeases = DropLeases | CancelAttempts | Phantoms
FromSupervisor = Welcome | Beaten | Hints | HintsArrive | AboutLeases | Adopt | Quiet | Drain | Stop
FromWorkerProcess = FromWorker | HookAnswers
ToWorkerProcess = FromSupervisor | AskHooks | TellHooks
FromTaskProcess = ProcessReady | ProgressReport | Emitted | Logged | AttemptReport | Refused | Request
ToTaskProcess = RunAttempt | CancelRun | LeaveIdle | Answer


def word_of(task_id: UUID, answer: HookReply) -> HookWord:
    """Return the message that contains a hook's answer."""
    kind = type(answer).__name__
    match answer:
        case Reschedule(run_at=timedelta() as delay, attempts=attempts):
            return HookWord(task_id, kind, in_s=delay.total_seconds(), attempts=attempts)
        case Reschedule(run_at=datetime() as moment, attempts=attempts):
            return HookWord(task_id, kind, run_at=moment, attempts=attempts)
        case NoAnswer(problem=problem):
            return HookWord(task_id, kind, problem=problem)
        case _:
            return HookWord(task_id, kind)


def answer_of(word: HookWord) -> HookReply:
    """Return the hook's answer that `word` contains."""
    match word:
        case HookWord(kind="Reschedule", in_s=float(seconds), attempts=attempts):
            return Reschedule(timedelta(seconds=seconds), attempts)
        case HookWord(kind="Reschedule", run_at=moment, attempts=attempts) if moment is not None:
            return Reschedule(moment, attempts)
        case HookWord(kind="FailWithBackoff"):
            return FailWithBackoff()
        case HookWord(kind="Skip"):
            return Skip()
        case HookWord(kind="NoAnswer", problem=str(problem)):
            return NoAnswer(problem)
        case _:
            return DEFAULT
