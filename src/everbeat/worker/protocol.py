"""What a supervisor and its worker processes say to each other, and a worker to its task processes. Tagged JSON frames; no behaviour."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from everbeat.domain.context import StopReason

Lease = tuple[UUID, UUID]
"""(task id, claim_id)."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


# From a worker process to its supervisor.


class Hello(Message, frozen=True):
    """The first word, after the app was imported: what a supervisor must know, since it imports no user code."""

    url: str
    schema: str
    recovery: dict[str, Any]
    worker: dict[str, Any]
    queues: list[str] | None
    task_names: list[str]


class Ready(Message, frozen=True):
    """The worker claims from now on."""


class Held(Message, frozen=True):
    """What changed in the worker's memory since the last word: leases taken, and claim_ids no longer held."""

    added: list[Lease]
    removed: list[UUID]


class Tick(Message, frozen=True):
    """Still going round, and what it looks like; CPU in percent of one core, lag in ms, names of running tasks."""

    running: int
    claimed: int
    slots: int
    cpu_percent: float
    loop_lag_ms: float
    names: list[str]


class Refused(Message, frozen=True):
    """The worker cannot start; its supervisor shows why and does not try again at once."""

    code: str
    message: str
    fix: str | None = None


class Leaving(Message, frozen=True):
    """Everything is settled or given back; the process exits now with code 0."""


# From a supervisor to a worker process.


class Welcome(Message, frozen=True):
    """The worker is registered. Every session it opens bears an application name that begins with `session_name`."""

    worker_id: str
    supervisor_id: str
    session_name: str


class Beaten(Message, frozen=True):
    """A beat that vouched for this worker was acknowledged; `sent_at` by the machine's monotonic clock."""

    seq: int
    sent_at: float


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


class Raised(Message, frozen=True):
    """The attempt's code raised; `error` is JSON text, `reasons` all that a policy may list it by."""

    claim_id: UUID
    error: str
    reasons: tuple[str, ...]


FromWorker = Hello | Ready | Held | Tick | Refused | Leaving
FromSupervisor = Welcome | Beaten | Lost | Cancel | Phantoms | Adopt | Drain | Stop
FromTaskProcess = ProcessReady | Progress | Returned | Raised | Refused
ToTaskProcess = Run | CancelRun
