"""The messages between the parts of one worker. `Worker` dispatches each message at once, in the loop's thread.

A part directly calls only the parts that its constructor received, and sends messages to all others. This avoids circular
dependencies.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from msgspec import Struct

from everbeat.store.leases import Settlement
from everbeat.worker.attempt import Attempt, AttemptEnd, ExecutorName


class AttemptEnded(Struct, frozen=True, eq=False):
    """The code of an attempt has finished and released its slot."""

    attempt: Attempt
    end: AttemptEnd


class Settled(Struct, frozen=True, eq=False):
    """The database has reported the results of settlements. Each verdict is the new state of the task, "already" or "lost"."""

    verdicts: Sequence[tuple[Attempt, Settlement, str]]


class SlotFreed(Struct, frozen=True, eq=False):
    """A slot of this executor might be free now."""

    executor_name: ExecutorName


class ExecutorsChanged(Struct, frozen=True, eq=False):
    """Leases of attempts in these executors are over, or their code has finished. Sent at most once per event loop iteration."""

    executor_names: Collection[ExecutorName]


class ExecutorBroken(Struct, frozen=True, eq=False):
    """This executor currently cannot run code."""

    executor_name: ExecutorName
    reason: str


class AttemptLost(Struct, frozen=True, eq=False):
    """The database has reported that an attempt lost its lease. `in_write`: it refused to store something for the attempt."""

    attempt: Attempt
    in_write: bool = False


class CancelRequested(Struct, frozen=True, eq=False):
    """A cancel was requested for the attempt's task."""

    attempt: Attempt


class AttemptStalled(Struct, frozen=True, eq=False):
    """Running code has reported nothing for longer than its `stall_timeout`."""

    attempt: Attempt
    silent_s: float


class FenceDue(Struct, frozen=True, eq=False):
    """All running code must stop now, because the database has not acknowledged a heartbeat for too long."""


class DeclaredDead(Struct, frozen=True, eq=False):
    """The database has reported that this worker was declared dead."""


class TasksEnqueued(Struct, frozen=True, eq=False):
    """Tasks might be due in this queue, or in any queue if `queue` is None."""

    queue: str | None = None


class LimitReached(Struct, frozen=True, eq=False):
    """This process has reached a limit and must be replaced. `tasks` is the number of tasks that have started in it."""

    reason: str
    tasks: int
    rss_bytes: int


class DrainStarted(Struct, frozen=True, eq=False):
    """The worker is shutting down. It must stop claiming and release tasks that have not started."""


WorkerMessage: TypeAlias = (
    AttemptEnded
    | Settled
    | SlotFreed
    | ExecutorsChanged
    | ExecutorBroken
    | AttemptLost
    | CancelRequested
    | AttemptStalled
    | FenceDue
    | DeclaredDead
    | TasksEnqueued
    | LimitReached
    | DrainStarted
)
