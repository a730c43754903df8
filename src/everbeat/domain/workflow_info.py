"""What people see of a workflow and of its nodes.

What lives here: the values, and what they are called. What may not: how they are asked for (`client.workflow_control`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.outcome import TaskError


class WorkflowState(StrEnum):
    """Where a workflow is; the last three are final."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    """Nothing more begins until it is resumed; what ran when it was paused ends as it would have."""
    CANCELLING = "CANCELLING"
    """Nothing more begins, what runs was asked to end; then it is CANCELLED."""
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self in _FINAL


_FINAL: Final = frozenset({WorkflowState.COMPLETED, WorkflowState.FAILED, WorkflowState.CANCELLED})


class NodeState(StrEnum):
    """Where a node is; from COMPLETED on the states are final."""

    PENDING = "PENDING"
    """It waits for other nodes."""
    READY = "READY"
    """It could begin, but its workflow is paused, or it is about to be enqueued."""
    ENQUEUED = "ENQUEUED"
    """Its task waits for a worker; of a map, or a workflow in a workflow: it is under way."""
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"
    SKIPPED = "SKIPPED"
    """It never began: a node it needs did not complete, or its condition does not hold."""

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self not in _OPEN


_OPEN: Final = frozenset({NodeState.PENDING, NodeState.READY, NodeState.ENQUEUED, NodeState.RUNNING})


class NodeInfo(Struct, frozen=True, kw_only=True):
    """A node as it is now. `needs`: the names of the nodes it waits for; of `kind` "workflow" `task_id` is the id of the child.

    `conditions`: in words, what besides the completion of all of them decides whether it runs: `if paid.is_large`, `2 of left, right, up`.
    Of a suspended task `waits_for` is the event it waits for, and `wake_at` when it is due at the latest.
    """

    name: str
    kind: str
    state: NodeState
    task: str | None
    task_id: UUID | None
    needs: Sequence[str]
    member_of: str | None
    quorum: int | None
    conditions: Sequence[str] = ()
    attempt: int | None
    enqueued_at: datetime | None
    started_at: datetime | None
    ended_at: datetime | None
    error: TaskError | None
    waits_for: str | None = None
    wake_at: datetime | None = None

    @property
    def duration_s(self) -> float | None:
        """Seconds from its start to its end; None before that, or if it never began."""
        begun = self.started_at or (None if self.kind == "task" else self.enqueued_at)
        return None if begun is None or self.ended_at is None else (self.ended_at - begun).total_seconds()


class WorkflowInfo(Struct, frozen=True, kw_only=True):
    """A workflow as it is now. `counts`: how many of its nodes are in which state (RUNNING ones count as ENQUEUED here); `result`: the
    value of its output as plain JSON, once it COMPLETED."""

    id: UUID
    name: str
    key: str | None
    state: WorkflowState
    on_error: str
    counts: Mapping[NodeState, int]
    output: str | None
    parent_id: UUID | None
    sent_at: datetime
    paused_at: datetime | None
    cancel_requested_at: datetime | None
    ended_at: datetime | None
    result: Any
    error: TaskError | None

    @property
    def nodes(self) -> int:
        """How many nodes it has."""
        return sum(self.counts.values())


class StuckWorkflow(Struct, frozen=True, kw_only=True):
    """What a reconciliation found, and, unless it was a dry run, put right: something that should have happened and had not.

    `what`: `TASK_ENDED` or `CHILD_ENDED` or `MEMBERS_ENDED` (what the node stands for had ended, the node had not), `NOT_RESOLVED` (all
    it waits for had ended), `NOT_ENQUEUED` (it was ready), `CHILD_HELD` (its workflow was still paused), `NOT_CANCELLED` (the cancel of
    the workflow had not reached it), `NODE_GONE` (the row of a node that others wait for was deleted: the node is FAILED),
    `NOT_FINISHED` (no node was left to wait for; `node` is None), `NOTHING_MOVES` (the open nodes wait for each other; `node` is None).
    `problem`: why this was not put right, as the database or the decoder said; None where it was.
    """

    workflow_id: UUID
    workflow: str
    node: str | None
    task_id: UUID | None
    what: str
    problem: str | None = None


class WorkflowRetry(Struct, frozen=True, kw_only=True):
    """What a retry of a workflow begins again, by the names of nodes; a node of a workflow within it is `child/node`.

    `again`: all nodes that had ended and run again if their turn comes. `completed`: those of them that had COMPLETED. `kept`: nodes that take
    from, or wait for, one of them and stay as they are: they completed (`completed="keep"`), or are under way. `state`: the workflow's now.
    """

    state: WorkflowState
    again: Sequence[str]
    completed: Sequence[str]
    kept: Sequence[str]
    dry_run: bool = False
