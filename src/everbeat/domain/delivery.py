"""Decide what a worker does with a message about a task. Only the task's row counts; the message itself is never trusted."""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from typing import Final

from msgspec import Struct

from everbeat.domain.task.states import TASK_TERMINAL_STATES


class Facts(Struct, frozen=True):
    """Facts from a task's row. `due`, `paused` and `kept_back` (by other tasks of the serial line) apply while the task is PENDING.

    `holder` is the worker that holds the task. The holder is `stale` if it has exited, or has been silent for longer than the
    running threshold. `needs` is what a worker's code must support to run the task, as JSON.
    """

    name: str
    state: str
    fence: int
    due: bool
    paused: bool
    kept_back: bool
    holder: str | None
    stale: bool | None
    needs: str | None = None


class DeliveryVerdict(StrEnum):
    """The worker's decision about a message.

    Acknowledging a message never loses a task that still has to run. Another message follows when the task is due, and workers
    also poll.
    """

    OVER = "over"
    """Acknowledge: the task has finished, or was claimed after this message was written, so a later message exists."""
    UNKNOWN = "unknown"
    """Reject: no task has this id."""
    ELSEWHERE = "elsewhere"
    """Acknowledge: another live worker holds the task."""
    OURS = "ours"
    """Keep: this worker holds the lease, and marks the message as in progress after each heartbeat."""
    STALE = "stale"
    """Return: the holder will soon be declared dead, and then a worker must be notified."""
    NOT_NOW = "not now"
    """Acknowledge: the task is paused or not due. Another message follows when the task is due, and a resume notifies all workers."""
    KEPT_BACK = "kept back"
    """Return: another task in the same serial line comes first."""
    FOREIGN = "foreign"
    """Return: this worker does not know the task function or its arguments; another worker might."""
    CLAIMABLE = "claimable"
    """Claim the task, or return the message if this worker has no free slot."""


ACKNOWLEDGED: Final = frozenset({DeliveryVerdict.OVER, DeliveryVerdict.ELSEWHERE, DeliveryVerdict.NOT_NOW})
USELESS: Final = frozenset({DeliveryVerdict.OVER, DeliveryVerdict.UNKNOWN})
"""The verdicts after which the message is of no use to any worker."""
_ENDED: Final = frozenset(str(state) for state in TASK_TERMINAL_STATES)


def judge(
    facts: Facts | None, *, fence: int, worker_id: str, names: Container[str], is_understood: bool = True
) -> DeliveryVerdict:
    """Return what a worker that runs tasks with these `names` does with a message.

    `fence` is the fencing token of the last claim before the message was written. `is_understood` means that the worker's code
    supports what the task needs.
    """
    if facts is None:
        return DeliveryVerdict.UNKNOWN
    if facts.state in _ENDED:
        return DeliveryVerdict.OVER
    if facts.holder is not None:
        if facts.holder == worker_id:
            return DeliveryVerdict.OURS
        return DeliveryVerdict.STALE if facts.stale else DeliveryVerdict.ELSEWHERE
    if facts.fence > fence:
        return DeliveryVerdict.OVER
    if facts.paused or not facts.due:
        return DeliveryVerdict.NOT_NOW
    if facts.name not in names or not is_understood:
        return DeliveryVerdict.FOREIGN
    return DeliveryVerdict.KEPT_BACK if facts.kept_back else DeliveryVerdict.CLAIMABLE
