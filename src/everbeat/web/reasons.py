"""The reasons of explanations, without the texts of user code where these are hidden."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from msgspec import structs

from everbeat.domain.explain.reasons import Reason, ReasonCode
from everbeat.domain.hiding import HIDDEN

_WITHOUT_TEXTS: Final = frozenset(
    {
        ReasonCode.NO_WORKER, ReasonCode.WORKER_NOT_STARTED, ReasonCode.LIVENESS_UNKNOWN, ReasonCode.WORKERS_QUIET,
        ReasonCode.QUEUE_NOT_SERVED, ReasonCode.NAME_UNKNOWN, ReasonCode.SCHEDULED, ReasonCode.SLEEPING,
        ReasonCode.WAITING_FOR_CHILDREN, ReasonCode.ALL_PAUSED, ReasonCode.TASK_PAUSED, ReasonCode.QUEUE_PAUSED,
        ReasonCode.SERIAL_LINE, ReasonCode.LIMIT_PAUSED, ReasonCode.LIMIT_REACHED, ReasonCode.RATE_REACHED,
        ReasonCode.FAIRNESS_TURN, ReasonCode.SLOTS_BUSY, ReasonCode.IN_LINE, ReasonCode.DEADLINE_PASSED,
        ReasonCode.DEADLINE_TOO_EARLY, ReasonCode.DEADLINE_NEAR, ReasonCode.CLAIMED, ReasonCode.CANCEL_REQUESTED,
        ReasonCode.LOCKED, ReasonCode.DATABASE_READ_ONLY, ReasonCode.RECOVERY_OFF, ReasonCode.NOBODY_SWEEPS,
        ReasonCode.WORKFLOW_PAUSED, ReasonCode.WORKFLOW_CANCELLING, ReasonCode.WAITS_FOR_NODES, ReasonCode.SCHEDULE_RETIRED,
        ReasonCode.SCHEDULE_ENDED, ReasonCode.TICKS_LATE, ReasonCode.TICK_MISSED,
    }
)  # fmt: skip
"""The reasons whose text never contains a text of user code."""


def shown_reasons(reasons: Iterable[Reason], *, hides: bool) -> tuple[Reason, ...]:
    """Return the reasons. If `hides` is set, those that can contain a text of user code keep only their code and times."""
    if not hides:
        return tuple(reasons)
    return tuple(
        each if each.code in _WITHOUT_TEXTS else structs.replace(each, text=HIDDEN) for each in reasons
    )


def lead_of(reasons: Iterable[Reason], *, otherwise: str) -> str:
    """Return the first reason as a sentence, or another one if there is none that can be shown."""
    text = next((each.text for each in reasons), HIDDEN)
    return otherwise if text == HIDDEN else f"{text[:1].upper()}{text[1:]}"
