"""Reports of tasks that this worker declined, folded so that many of them make few log lines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, TypeAlias
from uuid import UUID

from msgspec import Struct

from everbeat.runtime.events import Event, EventBus

EVERY_S: Final = 60.0
"""The minimum time between two log lines about declined tasks with the same mismatched argument names, in seconds."""
MOST_KINDS: Final = 100
"""The maximum number of kinds (task name and argument names) to report separately. Beyond it, tasks are combined by name alone.

Senders choose the argument names, so the number of kinds is otherwise unlimited.
"""
_MOST_NAMES: Final = 20
_LONGEST_NAME: Final = 100

_Kind: TypeAlias = tuple[str, tuple[str, ...], tuple[str, ...]]


class TaskDeclined(Event, frozen=True, kw_only=True):
    """This worker declined and released tasks because their argument names do not fit the function.

    No code ran, no attempt was used, and no counter was increased. `unknown`: argument names in the tasks that the function does not
    take. `missing`: required names that are not in the tasks. Both are empty if the event combines tasks with different argument
    names. `task_id` is the last of the `count` tasks since the previous event.
    """

    component = "worker"
    level = logging.WARNING
    task_id: UUID
    name: str
    unknown: tuple[str, ...]
    missing: tuple[str, ...]
    count: int = 1


class _Folded(Struct):
    """The declined tasks of one kind since the last event about that kind."""

    timer: asyncio.TimerHandle
    count: int = 0
    last: UUID | None = None


class Declines:
    """Emits `TaskDeclined` for declined tasks. An instance belongs to one event loop.

    The first task of a kind is reported at once. Later tasks are counted, and reported at most once per `every_s` seconds.
    """

    def __init__(self, events: EventBus, *, every_s: float = EVERY_S) -> None:
        self._events = events
        self._every_s = every_s
        self._folded: dict[_Kind, _Folded] = {}

    def note(self, task_id: UUID, name: str, *, unknown: Sequence[str], missing: Sequence[str]) -> None:
        """Report one declined task, or count it for the next report."""
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
        """Report all tasks that have not been reported yet."""
        for kind, folded in self._folded.items():
            folded.timer.cancel()
            if folded.last is not None:
                self._emit(kind, folded.last, folded.count)
        self._folded.clear()

    def _wait(self, kind: _Kind) -> None:
        timer = asyncio.get_running_loop().call_later(self._every_s, self._report, kind)
        self._folded[kind] = _Folded(timer)

    def _report(self, kind: _Kind) -> None:
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
