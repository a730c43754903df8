"""Log lines about tasks that this worker handed back because of their argument names, folded so that a deploy does not flood the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.runtime.events import Event, EventBus

EVERY_S: Final = 60.0
"""At most one line in this time for tasks that are alike."""
MOST_KINDS: Final = 100
"""Senders choose argument names, so they could make any number of kinds. More than this are folded by the task's name alone."""
_MOST_NAMES: Final = 20
_LONGEST_NAME: Final = 100

_Kind: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...]]


class TaskDeclined(Event, frozen=True, kw_only=True):
    """This worker handed tasks back because of their argument names: no code ran, no attempt was used, and no counter grew.

    `unknown`: names that the tasks give and the function does not take; `missing`: names that the function requires and the tasks do not
    give. Both are empty if tasks with different names are folded. `task_id` is the last of `count` tasks since the line before.
    """

    room = "worker"
    level = logging.WARNING
    task_id: UUID
    name: str
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    count: int = 1


class _Folded(Struct):
    """Tasks of one kind since the last line about them."""

    timer: asyncio.TimerHandle
    count: int = 0
    last: UUID | None = None


class Declines:
    """Emit `TaskDeclined` for the first task of a kind at once, and for later ones at most once in `every_s` seconds with their number.

    Belongs to one event loop.
    """

    def __init__(self, events: EventBus, *, every_s: float = EVERY_S) -> None:
        self._events = events
        self._every_s = every_s
        self._folded: dict[_Kind, _Folded] = {}

    def note(self, task_id: UUID, name: str, *, unknown: Sequence[str], missing: Sequence[str]) -> None:
        """Report one task that was handed back."""
        kind = (name, _shortened(unknown), _shortened(missing))
        if kind not in self._folded and len(self._folded) >= MOST_KINDS:
            kind = (name, (), ())
        folded = self._folded.get(kind)
        if folded is None:
            self._emit(kind, task_id, 1)
            self._wait(kind)
        else:
            folded.count, folded.last = folded.count + 1, task_id

    def close(self) -> None:
        """Report what is not reported yet."""
        for kind, folded in self._folded.items():
            folded.timer.cancel()
            if folded.last is not None:
                self._emit(kind, folded.last, folded.count)
        self._folded.clear()

    def _wait(self, kind: _Kind) -> None:
        timer = asyncio.get_running_loop().call_later(self._every_s, self._tell, kind)
        self._folded[kind] = _Folded(timer)

    def _tell(self, kind: _Kind) -> None:
        folded = self._folded.pop(kind)
        if folded.last is not None:
            self._emit(kind, folded.last, folded.count)
            self._wait(kind)

    def _emit(self, kind: _Kind, task_id: UUID, count: int) -> None:
        name, unknown, missing = kind
        self._events.emit(
            TaskDeclined(task_id=task_id, name=name, unknown=unknown, missing=missing, count=count)
        )


def _shortened(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name[:_LONGEST_NAME] for name in names[:_MOST_NAMES])
