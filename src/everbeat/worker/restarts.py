"""When a worker process that ended is replaced, and when there is no sense in trying."""

from __future__ import annotations

import logging
from collections import deque
from random import Random
from typing import Final

from everbeat.errors import EverbeatError, WorkerError, WorkerRefused
from everbeat.runtime.events import Event, EventBus
from everbeat.worker.protocol import Refused

_FIRST_S: Final = 0.5
_LONGEST_S: Final = 30.0
_SOUND_S: Final = 60.0
"""A process that lived so long was sound: its end starts the count anew."""
_MOST_EARLY_DEATHS: Final = 5
_EARLY_WINDOW_S: Final = 60.0
_LONG_ENOUGH_S: Final = 10.0
"""Two early deaths that are this far apart are enough where no process was ever ready: five slow starts may take minutes."""


class Pace:
    """The pause before each replacement in one place: none, then 0.5 s doubling to 30 s, up to a quarter added by chance."""

    def __init__(self, *, random: Random) -> None:
        self._random = random
        self._in_a_row = 0

    def pause_after(self, lived_s: float) -> float:
        """Seconds to wait after a process that lived for `lived_s`."""
        self._in_a_row = 1 if lived_s >= _SOUND_S else self._in_a_row + 1
        if self._in_a_row == 1:
            return 0.0
        doubled = _FIRST_S * 2.0 ** min(self._in_a_row - 2, 16)
        return min(_LONGEST_S, doubled * (1.0 + 0.25 * self._random.random()))


class WorkersKeepFailing(Event, frozen=True, kw_only=True):
    """A worker process refused to start, or several ended before they were ready; the supervisor tries again."""

    room = "worker"
    level = logging.ERROR
    reason: str


class WorkerNotStarted(Event, frozen=True, kw_only=True):
    """The system gives no process, or no descriptors for one; the others go on, and it is asked again."""

    room = "worker"
    level = logging.ERROR
    reason: str
    again_in_s: float


class EarlyDeaths:
    """Counts the processes that ended before they were ready."""

    def __init__(self) -> None:
        self._at: deque[float] = deque(maxlen=_MOST_EARLY_DEATHS)

    def count(self, at: float) -> bool:
        """One more; whether these are too many in too short a time to be chance."""
        self._at.append(at)
        return len(self._at) == _MOST_EARLY_DEATHS and at - self._at[0] <= _EARLY_WINDOW_S

    def last_for_s(self, at: float) -> float:
        """Seconds since the oldest of those that are remembered."""
        return at - self._at[0] if self._at else 0.0


class Prospects:
    """Whether there is any sense in starting another process, after one that ended before it was ready."""

    def __init__(self, *, events: EventBus) -> None:
        self.was_ever_ready = False
        self._events = events
        self._early_deaths = EarlyDeaths()

    def cannot_start(self, problem: OSError, *, again_in_s: float) -> None:
        """Takes notice of a process that the system refused. Raises WorkerError when none was ever ready."""
        if not self.was_ever_ready:
            raise WorkerError(f"A worker process cannot be started: {problem}.") from problem
        self._events.emit(WorkerNotStarted(reason=str(problem), again_in_s=again_in_s))

    def are_bleak(self, *, cause: str, refusal: Refused | None, at: float) -> bool:
        """Takes notice of one more; whether a long pause is due. Raises WorkerRefused or WorkerError when none was ever ready.

        A refusal alone is no reason for a long pause: in the middle of a deploy, an import may be broken for a second.
        """
        too_often = self._early_deaths.count(at)
        reason = cause if refusal is None else refusal.message
        if not self.was_ever_ready:
            if too_often or refusal is not None or self._early_deaths.last_for_s(at) >= _LONG_ENOUGH_S:
                raise _hopeless(reason, refusal)
            return False
        if too_often or refusal is not None:
            self._events.emit(WorkersKeepFailing(reason=reason))
        return too_often


def _hopeless(reason: str, refusal: Refused | None) -> EverbeatError:
    if refusal is not None:
        return WorkerRefused(refusal.message, reason=refusal.code, fix=refusal.fix)
    return WorkerError(
        f"Worker processes end before they are ready, again and again; the last one: {reason}.",
        fix="see above what they wrote to standard error before they ended.",
    )
