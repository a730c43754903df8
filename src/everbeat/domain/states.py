"""The seven states of a task and the one table of legal moves. Statements, documentation and tests are checked against it."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from msgspec import Struct


class TaskState(StrEnum):
    """Where a task stands. The last four are terminal."""

    PENDING = "PENDING"
    CLAIMED = "CLAIMED"
    RUNNING = "RUNNING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    EXPIRED = "EXPIRED"

    @property
    def is_terminal(self) -> bool:
        """Whether nothing but an operator's retry leads out of this state."""
        return self in TASK_TERMINAL_STATES


TASK_TERMINAL_STATES: Final = frozenset(
    {TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED, TaskState.EXPIRED}
)


class Transition(Struct, frozen=True):
    """One legal move: from a state (None: the task did not exist), to a state, and the statement that makes it."""

    old: TaskState | None
    new: TaskState
    statement: str
    why: str


TRANSITIONS: Final[tuple[Transition, ...]] = (
    Transition(None, TaskState.PENDING, "task/insert_task", "sent"),
    Transition(None, TaskState.PENDING, "task/insert_tasks", "sent with others, all or none"),
    Transition(None, TaskState.PENDING, "step/send_child", "sent by a task that runs, as its child"),
    Transition(TaskState.PENDING, TaskState.CLAIMED, "task/claim", "a worker took it"),
    Transition(
        TaskState.PENDING,
        TaskState.RUNNING,
        "task/claim",
        "a worker with a free slot took it, and its code starts",
    ),
    Transition(TaskState.PENDING, TaskState.CANCELLED, "task/cancel", "cancelled before anybody took it"),
    Transition(TaskState.PENDING, TaskState.CANCELLED, "task/cancel_children", "cancelled with its parent"),
    Transition(
        TaskState.PENDING, TaskState.EXPIRED, "task/expire", "good_until passed before anybody took it"
    ),
    Transition(TaskState.CLAIMED, TaskState.RUNNING, "task/start", "its code starts"),
    Transition(
        TaskState.CLAIMED, TaskState.EXPIRED, "task/start", "good_until passed before its code started"
    ),
    Transition(TaskState.CLAIMED, TaskState.PENDING, "task/release", "given back by a worker that leaves"),
    Transition(
        TaskState.CLAIMED, TaskState.PENDING, "task/recover", "its worker died before its code started"
    ),
    Transition(
        TaskState.CLAIMED,
        TaskState.PENDING,
        "task/decline",
        "its worker does not understand its arguments",
    ),
    Transition(
        TaskState.CLAIMED,
        TaskState.CANCELLED,
        "task/decline",
        "its worker does not understand its arguments; a cancel was requested",
    ),
    Transition(TaskState.CLAIMED, TaskState.CANCELLED, "task/cancel", "cancelled before its code started"),
    Transition(TaskState.CLAIMED, TaskState.CANCELLED, "task/cancel_children", "cancelled with its parent"),
    Transition(
        TaskState.CLAIMED, TaskState.CANCELLED, "task/recover", "its worker died; a cancel was requested"
    ),
    Transition(TaskState.RUNNING, TaskState.COMPLETED, "task/complete", "its code returned"),
    Transition(
        TaskState.RUNNING, TaskState.COMPLETED, "task/settle", "its code returned; or its own commit says so"
    ),
    Transition(TaskState.RUNNING, TaskState.FAILED, "task/settle", "its code raised, or took too long"),
    Transition(TaskState.RUNNING, TaskState.CANCELLED, "task/settle", "its code was cancelled"),
    Transition(
        TaskState.RUNNING,
        TaskState.PENDING,
        "task/settle",
        "a retry, suspended until a time or an event, or handed back by a worker that leaves",
    ),
    Transition(
        TaskState.RUNNING,
        TaskState.PENDING,
        "task/decline",
        "its worker does not understand its arguments; no code ran",
    ),
    Transition(
        TaskState.RUNNING,
        TaskState.CANCELLED,
        "task/decline",
        "its worker does not understand its arguments; a cancel was requested",
    ),
    Transition(
        TaskState.RUNNING, TaskState.PENDING, "task/recover", "its worker died; the policy runs it again"
    ),
    Transition(
        TaskState.RUNNING,
        TaskState.FAILED,
        "task/recover",
        "its worker died; the policy does not run it again",
    ),
    Transition(
        TaskState.RUNNING, TaskState.CANCELLED, "task/recover", "its worker died; a cancel was requested"
    ),
    Transition(TaskState.FAILED, TaskState.PENDING, "task/retry", "an operator's retry"),
    Transition(TaskState.CANCELLED, TaskState.PENDING, "task/retry", "an operator's retry"),
    Transition(TaskState.EXPIRED, TaskState.PENDING, "task/retry", "an operator's retry"),
)


def is_legal(old: TaskState | None, new: TaskState) -> bool:
    """Whether the table knows a move from `old` to `new`."""
    return any(move.old is old and move.new is new for move in TRANSITIONS)
