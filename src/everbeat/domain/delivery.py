"""What becomes of a message, given what the rows say of the task that it speaks of. The rows are the arbiter: no message is believed.

What lives here: the decision table. What may not: the rows, and the acknowledgements themselves.
"""

from __future__ import annotations

from collections.abc import Container
from enum import StrEnum
from typing import Final

from msgspec import Struct

from everbeat.domain.states import TASK_TERMINAL_STATES


class Facts(Struct, frozen=True):
    """A task as its row says. `due`, `paused` and `kept_back` (by others of its serial line) matter while it is PENDING.

    `holder`: the worker that holds it. `stale`: that has ended, or was silent for longer than the running threshold. `needs`: what the code of
    a worker must understand, as JSON.
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


class Verdict(StrEnum):
    """What is done with a message. Whatever is acknowledged and still has to run is found by its row: it has a message of its own
    when it becomes due, and workers look without one."""

    OVER = "over"
    """Acknowledged: the task has ended, or has been claimed since, so that a later message speaks of it."""
    UNKNOWN = "unknown"
    """Rejected: no row of this id."""
    ELSEWHERE = "elsewhere"
    """Acknowledged: another worker is at work on it, and lives."""
    OURS = "ours"
    """Kept: this worker holds the lease, and goes on acknowledging progress after each beat."""
    STALE = "stale"
    """Given back: its holder is about to be taken for dead, and then somebody must hear of it."""
    NOT_NOW = "not now"
    """Acknowledged: not due, or paused. It is told of again when it is due, and all workers are when it is resumed."""
    KEPT_BACK = "kept back"
    """Given back: another task of its serial line comes first."""
    FOREIGN = "foreign"
    """Given back: this worker does not know the task function, or does not understand its arguments; another one may."""
    CLAIMABLE = "claimable"
    """To be claimed; given back where there is no room for it here."""


ACKNOWLEDGED: Final = frozenset({Verdict.OVER, Verdict.ELSEWHERE, Verdict.NOT_NOW})
USELESS: Final = frozenset({Verdict.OVER, Verdict.UNKNOWN})
"""A message of such a task is of no use to any worker."""
_ENDED: Final = frozenset(str(state) for state in TASK_TERMINAL_STATES)


def judge(
    facts: Facts | None, *, fence: int, worker_id: str, names: Container[str], is_understood: bool = True
) -> Verdict:
    """What a message means to this worker, which runs tasks of these names; `fence` is the message's own: that of the last claim before it
    was written. `is_understood`: the code of this worker understands what the task needs."""
    if facts is None:
        return Verdict.UNKNOWN
    if facts.state in _ENDED:
        return Verdict.OVER
    if facts.holder is not None:
        if facts.holder == worker_id:
            return Verdict.OURS
        return Verdict.STALE if facts.stale else Verdict.ELSEWHERE
    if facts.fence > fence:
        return Verdict.OVER
    if facts.paused or not facts.due:
        return Verdict.NOT_NOW
    if facts.name not in names or not is_understood:
        return Verdict.FOREIGN
    return Verdict.KEPT_BACK if facts.kept_back else Verdict.CLAIMABLE
