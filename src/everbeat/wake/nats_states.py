"""What a link to NATS tells of itself: up or down, to whoever listens and to the log.

What lives here: telling each change once. What may not: connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from everbeat.errors import NatsRefused
from everbeat.runtime.events import Event, log_event

_logger = logging.getLogger("everbeat.wake")


class NatsNotHeard(Event, frozen=True, kw_only=True):
    """Messages are carried neither to nor from this stream for now; polling goes on."""

    room = "wake"
    level = logging.WARNING
    stream: str
    problem: str


class NatsHeardAgain(Event, frozen=True, kw_only=True):
    """Messages are carried again."""

    room = "wake"
    stream: str


class NatsStates:
    """Tells changes, each once, and logs them."""

    def __init__(self, stream: str, on_state: Callable[[bool], None]) -> None:
        self._stream = stream
        self._on_state = on_state
        self._told: bool | None = None
        self._problem = ""

    def found(self) -> None:
        if self._told is False:
            log_event(NatsHeardAgain(stream=self._stream))
        self._tell(True)

    def lost(self, reason: object) -> None:
        """A refusal is told also where it comes while the link is down: nobody waits for it to pass."""
        problem = " ".join(str(reason).split())
        if self._told is not False or (isinstance(reason, NatsRefused) and problem != self._problem):
            log_event(NatsNotHeard(stream=self._stream, problem=problem))
            self._problem = problem
        self._tell(False)

    def ended(self) -> None:
        if self._told:
            self._tell(False)

    def _tell(self, up: bool) -> None:
        if self._told is up:
            return
        self._told = up
        try:
            self._on_state(up)
        except Exception:  # a link outlives what its users do
            _logger.exception("state_handler_failed stream=%s up=%s", self._stream, up)
