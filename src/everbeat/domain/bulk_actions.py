"""Bulk actions, which act on all tasks that match filters, and the audit log of operators' actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any, Final
from uuid import UUID

from msgspec import Struct

from everbeat.domain.task.states import TASK_TERMINAL_STATES, TaskState


class BulkVerb(StrEnum):
    """The change that a bulk action makes to each of its tasks."""

    RETRY = "retry"
    CANCEL = "cancel"
    RUN_NOW = "run_now"
    MOVE = "move"
    REPRIORITISE = "reprioritise"
    DELETE = "delete"

    @property
    def applicable(self) -> frozenset[TaskState]:
        """Return the states of the tasks that the action can change."""
        match self:
            case BulkVerb.RETRY:
                return TASK_TERMINAL_STATES - {TaskState.COMPLETED}
            case BulkVerb.DELETE:
                return TASK_TERMINAL_STATES
            case BulkVerb.CANCEL:
                return frozenset(TaskState) - TASK_TERMINAL_STATES
            case _:
                return frozenset({TaskState.PENDING})

    @property
    def is_of_ended(self) -> bool:
        """Return whether the action changes tasks that have ended, which can be in `history`."""
        return self in (BulkVerb.RETRY, BulkVerb.DELETE)


class BulkState(StrEnum):
    """The state of a bulk action. DRY_RUN is that of a dry run, which is not stored and changes nothing."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"
    DRY_RUN = "DRY_RUN"

    @property
    def has_ended(self) -> bool:
        """Return whether the action acts on no more tasks."""
        return self not in (BulkState.PENDING, BulkState.RUNNING)


SKIPPED: Final[Mapping[str, str]] = {
    "WORKFLOW": "it belongs to a workflow",
    "PARENT": "its parent task has not ended",
    "RECENT": "it was sent less than an hour ago, and a send that is repeated must find it",
    "KEY_TAKEN": "another task has its key",
    "CHANGED": "it changed in the meantime",
    "UNCHANGED": "it is already as requested",
    "DUE": "it is already due",
    "SLEEPS": "its code sleeps until a fixed time",
    "WAITS": "its code waits for an event",
    "SERIAL_QUEUE": "it belongs to the line of a serial queue",
    "LOCKED": "another transaction kept it locked",
    "REFUSED": "the database refused the change",
}
"""Why an action skips a task that matches, by the code of the reason."""


class SkippedTask(Struct, frozen=True):
    """A task that a bulk action did not change. `reason` is a key of `SKIPPED`, and `detail` is the database's message, if any."""

    id: UUID
    reason: str
    detail: str | None = None


class BulkActionInfo(Struct, frozen=True, kw_only=True):
    """A bulk action, and how far it has come.

    `matched` counts the tasks that it has found so far, which is the sum of `done` and `skipped` once it has ended. `examined` counts the tasks
    that it has read. `reasons` counts the skipped tasks by reason, and `examples` names the first ten. A dry run counts as `done` what the
    action would do. `is_exact` is False if a dry run stopped after a million tasks. `joined` is True if an identical action had not ended.
    """

    id: UUID | None
    action: BulkVerb
    filters: Mapping[str, Any]
    parameters: Mapping[str, Any]
    state: BulkState
    requested_by: str
    origin: str
    requested_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    cancel_requested_at: datetime | None = None
    cancelled_by: str | None = None
    changed_at: datetime | None = None
    carried_out_by: str | None = None
    examined: int = 0
    matched: int = 0
    done: int = 0
    skipped: int = 0
    reasons: Mapping[str, int] = {}
    examples: Sequence[SkippedTask] = ()
    problem: str | None = None
    joined: bool = False
    is_exact: bool = True


class BulkProblem(Struct, frozen=True):
    """A bulk action that failed, or that has not changed for `still_s` seconds although it is due."""

    id: UUID
    action: str
    state: str
    problem: str | None
    still_s: float


class AuditEntry(Struct, frozen=True, kw_only=True):
    """An action of an operator. `origin` is the way it was requested, such as "cli". `affected` is the number of changed tasks, if known."""

    id: int
    at: datetime
    actor: str
    origin: str
    action: str
    target: str | None
    filters: Mapping[str, Any] | None
    affected: int | None
    outcome: str
    note: str | None


AUDITED: Final = (
    *BulkVerb, *(f"{verb}_all" for verb in BulkVerb), "cancel_bulk_action", "signal", "answer", "pause", "resume",
    "pause_workflow", "resume_workflow", "cancel_workflow", "retry_workflow", "seal_batch", "cancel_batch", "set_limit", "clear_limit",
    "put_schedule", "pause_schedule", "resume_schedule", "run_schedule", "backfill_schedule", "delete_schedule", "quiet_workers",
    "resume_workers", "bury_workers", "recover", "prune",
)  # fmt: skip
"""The actions that the audit log contains."""


class Operator(Struct, frozen=True):
    """The name under which actions are noted in the audit log, and the way they are requested."""

    actor: str
    origin: str
