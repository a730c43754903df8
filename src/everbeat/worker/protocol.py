"""What a supervisor and its worker processes say to each other, and a worker to its task processes. Tagged JSON frames; no behaviour."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from uuid import UUID

import msgspec

from everbeat.domain.context import StopReason
from everbeat.domain.hooks import HookScopes, RecoveryContext, SweepSummary
from everbeat.worker.requests import Answer as Answer
from everbeat.worker.requests import Checkpoint as Checkpoint
from everbeat.worker.requests import CommitBegins as CommitBegins
from everbeat.worker.requests import CommitEnds as CommitEnds
from everbeat.worker.requests import CommitTerms as CommitTerms
from everbeat.worker.requests import Committing as Committing
from everbeat.worker.requests import Lease as Lease
from everbeat.worker.requests import Message
from everbeat.worker.requests import Request as Request
from everbeat.worker.requests import StepRequest as StepRequest

REPORT_EVERY_S: Final = 1.0
"""So often a worker ticks, as long as its event loop turns."""


# From a worker process to its supervisor.


class Hello(Message, frozen=True):
    """The first word, after the app was imported: what a supervisor must know, since it imports no user code."""

    url: str
    schema: str
    recovery: dict[str, Any]
    worker: dict[str, Any]
    queues: list[str] | None
    task_names: list[str]
    on_loop: list[str] = msgspec.field(default_factory=list)
    hooks: HookScopes = HookScopes()
    lanes: dict[str, Any] = msgspec.field(default_factory=dict)
    parameters: dict[str, Any] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Hello(schema={self.schema!r}, queues={self.queues!r})"  # the URL may hold a password


class Ready(Message, frozen=True):
    """The worker claims from now on."""


class Held(Message, frozen=True):
    """What changed in the worker's memory since the last word: leases taken, and claim_ids no longer held."""

    added: list[Lease]
    removed: list[UUID]


class Tick(Message, frozen=True):
    """Still going round, and what it looks like; CPU in percent of one core, lag in ms, names of running tasks.

    `cut_off_s`: for how long an outcome has waited while the database answered this worker nothing, in seconds. `astray`: how
    many attempts are over while their code goes on in this very process. `messages`: how it stands with what carries its messages.
    """

    running: int
    claimed: int
    slots: int
    cpu_percent: float
    loop_lag_ms: float
    names: list[str]
    cut_off_s: float = 0.0
    astray: int = 0
    messages: dict[str, Any] | None = None


class Refused(Message, frozen=True):
    """The worker cannot start; its supervisor shows why and does not try again at once."""

    code: str
    message: str
    fix: str | None = None


class Retiring(Message, frozen=True):
    """The process has reached a limit: it claims no more, finishes what it has begun, and then leaves. `reason`: the limit."""

    reason: str
    tasks: int
    rss_bytes: int


class AskBeat(Message, frozen=True):
    """Beat now: an operator may have given an order, which the answer to a beat carries."""


class Leaving(Message, frozen=True):
    """Everything is settled or given back, but for what a recovery hook left; the process exits now.

    `code_runs`: code was told to stop and does not end; its supervisor settles those attempts after the exit.
    """

    code_runs: bool = False


# From a supervisor to a worker process.


class Welcome(Message, frozen=True):
    """The worker is registered. Every session it opens bears an application name that begins with `session_name`.

    `quiet`: an operator made the tree quiet before.
    """

    worker_id: str
    supervisor_id: str
    session_name: str
    quiet: bool = False


class Beaten(Message, frozen=True):
    """A beat that vouched for this worker was acknowledged; `sent_at` by the machine's monotonic clock."""

    seq: int
    sent_at: float


class Quiet(Message, frozen=True):
    """Claim nothing and give back what has not started, until this comes with `on` false. Running code goes on."""

    on: bool


class Lost(Message, frozen=True):
    """These leases are somebody else's now: stop their code, write nothing."""

    leases: list[Lease]


class Cancel(Message, frozen=True):
    """These tasks are asked to stop."""

    leases: list[Lease]


class Phantoms(Message, frozen=True):
    """The database holds these in your name, your memory did not: confirm, and give them back."""

    leases: list[Lease]


class Adopt(Message, frozen=True):
    """This supervisor was declared dead and came back under a new name: all leases are lost, go on as this worker."""

    welcome: Welcome


class Drain(Message, frozen=True):
    """Claim no more, let running tasks finish for this long, hand the rest back, leave."""

    grace_ms: int


class Stop(Message, frozen=True):
    """Hand everything back and leave at once."""


# Recovery hooks: the supervisor imports no user code, so a worker process calls them.


class AskHooks(Message, frozen=True):
    """What is to become of these tasks? Answered with the same `call`."""

    call: int
    contexts: list[RecoveryContext]


class HookWord(Message, frozen=True):
    """One answer: the name of its kind and, of a Reschedule, when (at a moment, or in seconds) and with how many attempts;
    or what kept the hook from answering.
    """

    task_id: UUID
    kind: str
    run_at: datetime | None = None
    in_s: float | None = None
    attempts: int | None = None
    problem: str | None = None


class HookAnswers(Message, frozen=True):
    """The answers to a call; one that is missing is the default."""

    call: int
    words: list[HookWord]


class TellHooks(Message, frozen=True):
    """These tasks were taken from their holders; and the pass in which they were is over, if there is a summary.

    Acknowledged by `HookAnswers` without words, once the hooks have been called.
    """

    interrupted: list[RecoveryContext]
    recovered: SweepSummary | None = None
    call: int = 0


# Between a worker process and a task process (run_in="process").


class Run(Message, frozen=True):
    """Run this attempt. `args` is JSON text."""

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


class LeaveIdle(Message, frozen=True):
    """This process has run enough attempts: end between two of them."""


class CancelRun(Message, frozen=True):
    """This attempt is asked to stop, if it still runs: its code is interrupted, SIGKILL follows."""

    claim_id: UUID
    reason: StopReason


class ProcessReady(Message, frozen=True):
    """The task process has imported the app."""


class Progress(Message, frozen=True):
    """The running attempt reported progress (JSON text)."""

    claim_id: UUID
    progress: str


class Returned(Message, frozen=True):
    """The attempt's code returned; `result` is JSON text."""

    claim_id: UUID
    result: str


class Suspended(Message, frozen=True):
    """The attempt's code gave its slot back until it is time."""

    claim_id: UUID


class Raised(Message, frozen=True):
    """The attempt's code raised; `error` is JSON text, `reasons` all that a policy may list it by."""

    claim_id: UUID
    error: str
    reasons: tuple[str, ...]


class NotUnderstood(Message, frozen=True):
    """No code ran: the function does not know the `unknown` names of arguments, or requires the `missing` ones. The rest is as of `Raised`."""

    claim_id: UUID
    error: str
    reasons: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


FromWorker = Hello | Ready | Held | Tick | Refused | Retiring | AskBeat | Leaving
FromSupervisor = Welcome | Beaten | Lost | Cancel | Phantoms | Adopt | Quiet | Drain | Stop
FromWorkerProcess = FromWorker | HookAnswers
ToWorkerProcess = FromSupervisor | AskHooks | TellHooks
FromTaskProcess = ProcessReady | Progress | Returned | Suspended | Raised | NotUnderstood | Refused | Request
ToTaskProcess = Run | CancelRun | LeaveIdle | Answer
