"""What running code asks of its worker, also where no process lies between them; each is answered, by its ticket. No behaviour."""

from __future__ import annotations

from typing import Literal
from uuid import UUID

import msgspec

from everbeat.domain.backend import StepAnswer, StepQuestion
from everbeat.domain.context import StopReason

Lease = tuple[UUID, UUID]
"""(task id, claim_id)."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages between processes of a tree."""


class Checkpoint(Message, frozen=True):
    """Store what is finished (JSON text). One with a higher number holds everything that one with a lower number does."""

    claim_id: UUID
    ticket: int
    number: int
    checkpoint: str


class CommitBegins(Message, frozen=True):
    """The code opens a transaction that is to complete the task: where must it lead?

    `is_snapshot`: it sees the task's row as it is now until its end, and bears no change of it meanwhile.
    """

    claim_id: UUID
    ticket: int
    is_snapshot: bool = False


class Committing(Message, frozen=True):
    """The outcome is written and committed next, by the code's own connection: from your answer on, let it be."""

    claim_id: UUID
    ticket: int


class CommitEnds(Message, frozen=True):
    """What the code saw of its commit: done, given up, refused by the fence, or not known. Say what became of it."""

    claim_id: UUID
    ticket: int
    seen: Literal["landed", "rolled_back", "lost", "unknown"]


class StepRequest(Message, frozen=True):
    """A question about what is done for good."""

    claim_id: UUID
    ticket: int
    question: StepQuestion


Request = Checkpoint | CommitBegins | Committing | CommitEnds | StepRequest


class CommitTerms(Message, frozen=True):
    """Where a commit of the task must lead, and how its outcome is announced. `shown` is the URL without its password."""

    installation: UUID
    schema: str
    channel: str
    shown: str


class Answer(Message, frozen=True):
    """The answer to the request of this ticket. "stopped": the code should end, for this reason; "suspended": it should end until it
    is time; "over": a commit has completed the task; "refused": `message` says why.

    "landed", "rolled_back" and "open" (some transaction still holds the task) answer the end of a commit.
    """

    claim_id: UUID
    ticket: int
    verdict: Literal["yes", "stopped", "suspended", "over", "refused", "landed", "rolled_back", "open"]
    reason: StopReason | None = None
    message: str = ""
    terms: CommitTerms | None = None
    step: StepAnswer | None = None
