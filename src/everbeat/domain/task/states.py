"""The seven states of a task, and the table of legal transitions that statements, docs and tests must match."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class TaskState(StrEnum):
    """The state of a task. The last four states are terminal."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def is_terminal(self) -> bool:
        """Return whether the state is terminal. Only a retry by an operator can leave a terminal state."""
        return self in TASK_TERMINAL_STATES


TASK_TERMINAL_STATES: Final = frozenset(
    {TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED}
)


class Transition(Struct, frozen=True):
    """One legal transition, and the statement that performs it. `old` is None if the statement creates the task."""

    old: TaskState | None
    new: TaskState
    statement: str
    why: str


TRANSITIONS: Final = tuple(
    Transition(None if old is None else TaskState(old), TaskState(new), statement, why)
    for old, new, statement, why in (
        (None, "PENDING", "task/insert_task", "sent"),
        (None, "PENDING", "task/insert_tasks", "sent in a batch, all or none"),
        (None, "PENDING", "step/send_child", "sent by a running task, as its child"),
        (None, "PENDING", "step/send_children", "sent by a running task that gathers many children"),
        (None, "PENDING", "batch/advance_batches", "sent at the end of a batch, as its callback"),
        (None, "PENDING", "schedule/decide_ticks", "sent for a tick of a schedule"),
        (None, "PENDING", "schedule/run_schedule", "sent because an operator ran a schedule"),
        (None, "PENDING", "schedule/backfill_ticks", "sent later for a tick that was not sent"),
        ("PENDING", "CLAIMED", "task/claim_tasks", "a worker claimed it"),
        (
            "PENDING",
            "RUNNING",
            "task/claim_tasks",
            "a worker with a free slot claimed it, and its code starts",
        ),
        ("PENDING", "CANCELLED", "task/cancel_task", "cancelled before a worker claimed it"),
        ("PENDING", "CANCELLED", "task/cancel_children", "cancelled with its parent"),
        ("PENDING", "CANCELLED", "batch/cancel_tasks", "cancelled with its batch"),
        ("PENDING", "CANCELLED", "schedule/decide_ticks", "replaced by the next run of its schedule"),
        ("PENDING", "EXPIRED", "task/expire_tasks", "good_until passed before a worker claimed it"),
        ("CLAIMED", "RUNNING", "task/start_tasks", "its code starts"),
        ("CLAIMED", "EXPIRED", "task/start_tasks", "good_until passed before its code started"),
        ("CLAIMED", "PENDING", "task/release_leases", "released by its worker before its code started"),
        ("CLAIMED", "PENDING", "task/recover_leases", "its worker died before its code started"),
        ("CLAIMED", "PENDING", "task/decline_tasks", "its worker's code does not accept its arguments"),
        (
            "CLAIMED",
            "CANCELLED",
            "task/decline_tasks",
            "its worker's code does not accept its arguments; cancel requested",
        ),
        ("CLAIMED", "CANCELLED", "task/cancel_task", "cancelled before its code started"),
        ("CLAIMED", "CANCELLED", "task/cancel_children", "cancelled with its parent"),
        ("CLAIMED", "CANCELLED", "batch/cancel_tasks", "cancelled with its batch"),
        ("CLAIMED", "CANCELLED", "schedule/decide_ticks", "replaced by the next run of its schedule"),
        ("CLAIMED", "CANCELLED", "task/recover_leases", "its worker died; cancel requested"),
        ("RUNNING", "COMPLETED", "task/complete_attempts", "its code returned"),
        (
            "RUNNING",
            "COMPLETED",
            "task/settle_attempts",
            "its code returned, or committed its completion itself",
        ),
        ("RUNNING", "FAILED", "task/settle_attempts", "its code raised an exception or took too long"),
        ("RUNNING", "CANCELLED", "task/settle_attempts", "its code was cancelled"),
        ("RUNNING", "PENDING", "task/settle_attempts", "retried or suspended, or released by its worker"),
        (
            "RUNNING",
            "PENDING",
            "task/decline_tasks",
            "its worker's code does not accept its arguments; no code ran",
        ),
        (
            "RUNNING",
            "CANCELLED",
            "task/decline_tasks",
            "its worker's code does not accept its arguments; cancel requested",
        ),
        ("RUNNING", "PENDING", "task/recover_leases", "its worker died, and the policy allows another run"),
        (
            "RUNNING",
            "FAILED",
            "task/recover_leases",
            "its worker died, and the policy does not allow another run",
        ),
        ("RUNNING", "CANCELLED", "task/recover_leases", "its worker died; cancel requested"),
        ("FAILED", "PENDING", "task/retry_task", "an operator's retry"),
        ("CANCELLED", "PENDING", "task/retry_task", "an operator's retry"),
        ("EXPIRED", "PENDING", "task/retry_task", "an operator's retry"),
    )
)


class VirtualState(StrEnum):
    """A condition of live tasks by which lists can be filtered, as if it were a state."""

    RETRYING = "retrying"
    """PENDING after a failed attempt, until the retry is claimed."""
    SCHEDULED = "scheduled"
    """PENDING and not due yet, and neither retrying nor suspended."""
    SUSPENDED = "suspended"
    """PENDING, because the code is sleeping or waiting for an event."""
    SUSPECT = "suspect"
    """PENDING, CLAIMED or RUNNING, and suspected of killing its worker, so the task runs alone in a process."""
    OVERDUE = "overdue"
    """PENDING, and due for more than a minute."""

    @property
    def states(self) -> tuple[TaskState, ...]:
        """Return the states that such tasks can have."""
        if self is VirtualState.SUSPECT:
            return (TaskState.PENDING, TaskState.CLAIMED, TaskState.RUNNING)
        return (TaskState.PENDING,)


OVERDUE_MS: Final = 60_000
"""A task is overdue if it has been due for longer than this."""
