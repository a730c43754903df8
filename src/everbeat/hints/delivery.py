"""Decode hints and pass them to callbacks, with pauses between connection attempts and a limit on useless hints."""

from __future__ import annotations

import logging
from random import Random
from typing import Final

from everbeat.hints import OnHint, OnState
from everbeat.hints.topics import Everything, Hint, decode
from everbeat.runtime.clock import Backoff
from everbeat.runtime.events import Event, log_event

_logger = logging.getLogger("everbeat.hints")


class HintsNotHeard(Event, frozen=True, kw_only=True):
    """The listener on this channel currently receives no notifications. Polling continues."""

    component = "hints"
    level = logging.WARNING
    channel: str
    problem: str


class HintsHeardAgain(Event, frozen=True, kw_only=True):
    """The listener on this channel is receiving notifications again."""

    component = "hints"
    channel: str


class HintDispatcher:
    """Passes hints and state changes to callbacks. Errors in the callbacks cannot break the listener.

    With `ignores_ends`, `TaskEnded` hints are not delivered. One payload can name hundreds of finished tasks, and no worker waits for these
    hints.
    """

    __slots__ = ("_channel", "_ignores_ends", "_listening", "_on_hint", "_on_state")

    def __init__(
        self, channel: str, *, on_hint: OnHint, on_state: OnState, ignores_ends: bool = False
    ) -> None:
        self._channel = channel
        self._ignores_ends = ignores_ends
        self._on_hint = on_hint
        self._on_state = on_state
        self._listening: bool | None = None  # None: not reported yet

    @property
    def is_listening(self) -> bool:
        """Return whether notifications are arriving, as last reported."""
        return self._listening is True

    def connected(self) -> None:
        """Report that notifications are now arriving. Earlier notifications might have been missed."""
        if self._listening is False:
            log_event(HintsHeardAgain(channel=self._channel))
        self._report(True)
        self.hint(Everything())

    def lost(self, reason: object) -> None:
        """Report that notifications are no longer arriving."""
        if self._listening is not False:
            problem = " ".join(str(reason).split())  # libpq reports several lines
            log_event(HintsNotHeard(channel=self._channel, problem=problem))
        self._report(False)

    def ended(self) -> None:
        """Report that the listener was stopped on purpose."""
        if self._listening:
            self._report(False)

    def payload(self, text: str) -> None:
        """Decode a payload and deliver its hint, if any."""
        if self._ignores_ends and text.startswith("d:"):
            return
        hint = decode(text)
        if hint is None:
            _logger.debug("hint_ignored channel=%s payload=%.100r", self._channel, text)
        else:
            self.hint(hint)

    def hint(self, hint: Hint) -> None:
        """Deliver a hint."""
        try:
            self._on_hint(hint)
        except Exception:  # an error in a callback must not stop the listener
            _logger.exception("hint_handler_failed channel=%s hint=%r", self._channel, hint)

    def _report(self, listening: bool) -> None:
        if self._listening is listening:
            return
        self._listening = listening
        try:
            self._on_state(listening)
        except Exception:  # an error in a callback must not stop the listener
            _logger.exception("state_handler_failed channel=%s listening=%s", self._channel, listening)


def reconnect_backoff(random: Random) -> Backoff:
    """Return the backoff between a listener's connection attempts. Reset it once the connection has proved to work."""
    return Backoff(first_s=0.1, longest_s=5.0, spread=(0.5, 1.0), random=random)


BURST: Final = 100
"""The number of hints that may each cause an immediate query, even if none of the queries finds anything."""
PER_S: Final = 50.0
"""The number of queries per second that further hints may cause, until one of the queries finds something."""


class HintRate:
    """Limits the rate of queries caused by hints in one receiver. Times are seconds on a monotonic clock."""

    def __init__(self) -> None:
        self._left = float(BURST)
        self._asked_at = 0.0

    def pause_s(self, now: float) -> float:
        """Return how many seconds to wait before the next query caused by a hint, and count that query."""
        self._left = min(BURST, self._left + (now - self._asked_at) * PER_S) - 1.0
        self._asked_at = now
        return max(0.0, -self._left / PER_S)

    def paid_off(self) -> None:
        """Record that a query found something to do, so that the next hints cause immediate queries."""
        self._left = float(BURST)
