"""Report tasks that a worker leaves to other code because its own does not understand their arguments."""

from __future__ import annotations

import logging
from typing import Final
from uuid import UUID

from everbeat.domain.stored_text import storable
from everbeat.runtime.events import Event, EventBus
from everbeat.worker.attempt import Attempt, Declined

MOST_KINDS: Final = 1_000
_LONGEST_NAMES: Final = 500


class ArgumentsNotUnderstood(Event, frozen=True, kw_only=True):
    """A task was left to other code: its function does not know the `unknown` names, or requires the `missing` ones.

    A worker emits it for the first task of this kind, since a deploy can meet many thousands of them.
    """

    room = "worker"
    level = logging.WARNING
    task_id: UUID
    name: str
    unknown: str
    missing: str


class Declines:
    """What was reported already, by the task function and the names."""

    def __init__(self, events: EventBus) -> None:
        self._events = events
        self._reported: set[tuple[str, tuple[str, ...], tuple[str, ...]]] = set()

    def note(self, attempt: Attempt, ended: Declined) -> None:
        """Report it, unless the same was reported before."""
        kind = attempt.task.name, ended.unknown, ended.missing
        if kind in self._reported or len(self._reported) >= MOST_KINDS:
            return
        self._reported.add(kind)
        unknown, missing = (
            storable(", ".join(names), limit=_LONGEST_NAMES) for names in (ended.unknown, ended.missing)
        )
        self._events.emit(
            ArgumentsNotUnderstood(
                task_id=attempt.id, name=attempt.task.name, unknown=unknown, missing=missing
            )
        )
