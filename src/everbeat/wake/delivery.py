"""What every listener does with what it hears, and how long it pauses before it connects again.

What lives here: decoding, telling, logging, pausing; the same for loops and threads. What may not: connections.
"""

from __future__ import annotations

import logging
from random import Random
from typing import Final

from everbeat.runtime.events import Event, log_event
from everbeat.wake import OnHint, OnState
from everbeat.wake.topics import Everything, Hint, decode

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0

_logger = logging.getLogger("everbeat.wake")


class HintsNotHeard(Event, frozen=True, kw_only=True):
    """The listener on this channel hears nothing for now; polling goes on."""

    room = "wake"
    level = logging.WARNING
    channel: str
    problem: str


class HintsHeardAgain(Event, frozen=True, kw_only=True):
    """The listener on this channel hears again."""

    room = "wake"
    channel: str


class Delivery:
    """Tells hints and changes of state to their callbacks, which cannot break the listener.

    `tells_ends`: workers end hundreds of tasks with one payload, and none of them waits for that.
    """

    __slots__ = ("_channel", "_hearing", "_on_hint", "_on_state", "_tells_ends")

    def __init__(self, channel: str, *, on_hint: OnHint, on_state: OnState, tells_ends: bool = True) -> None:
        self._channel = channel
        self._tells_ends = tells_ends
        self._on_hint = on_hint
        self._on_state = on_state
        self._hearing: bool | None = None  # None: nothing was told yet

    @property
    def hears(self) -> bool:
        """Whether hints can be heard now, as was told last."""
        return self._hearing is True

    def connected(self) -> None:
        """Hints can be heard from now on; some may have been missed before."""
        if self._hearing is False:
            log_event(HintsHeardAgain(channel=self._channel))
        self._tell_state(True)
        self.hint(Everything())

    def lost(self, reason: object) -> None:
        """Hints cannot be heard any more."""
        if self._hearing is not False:
            told = " ".join(str(reason).split())  # libpq says it in several lines
            log_event(HintsNotHeard(channel=self._channel, problem=told))
        self._tell_state(False)

    def ended(self) -> None:
        """Nobody listens any more, by intention."""
        if self._hearing:
            self._tell_state(False)

    def payload(self, text: str) -> None:
        """Tell what a payload says, if anything."""
        if not self._tells_ends and text.startswith("d:"):
            return
        hint = decode(text)
        if hint is None:
            _logger.debug("hint_ignored channel=%s payload=%.100r", self._channel, text)
        else:
            self.hint(hint)

    def hint(self, hint: Hint) -> None:
        """Tell a hint."""
        try:
            self._on_hint(hint)
        except Exception:  # a listener outlives what its users do
            _logger.exception("hint_handler_failed channel=%s hint=%r", self._channel, hint)

    def _tell_state(self, hearing: bool) -> None:
        if self._hearing is hearing:
            return
        self._hearing = hearing
        try:
            self._on_state(hearing)
        except Exception:  # a listener outlives what its users do
            _logger.exception("state_handler_failed channel=%s hears=%s", self._channel, hearing)


class Pauses:
    """How long to wait before the next attempt: doubling, capped, and different for everybody."""

    __slots__ = ("_next_s", "_random")

    def __init__(self, random: Random) -> None:
        self._random = random
        self._next_s = FIRST_PAUSE_S

    def next(self) -> float:
        """Seconds to wait now: between half and all of the step, which then doubles."""
        pause = self._next_s * self._random.uniform(0.5, 1.0)
        self._next_s = min(LONGEST_PAUSE_S, 2 * self._next_s)
        return pause

    def reset(self) -> None:
        """The connection proved good: the next loss is a new story."""
        self._next_s = FIRST_PAUSE_S
