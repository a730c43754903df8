"""The door to hints: something may be waiting, and where. Hints may be lost, repeated or late; rows are the truth.

What lives here: transports of hints, all of one shape. What may not: anything that must not be lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everbeat.wake.topics import Hint

OnHint = Callable[[Hint], None]
OnState = Callable[[bool], None]


class Wake(Protocol):
    """A transport of hints for programs with an event loop."""

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        """Deliver hints until cancelled; never raises otherwise.

        `on_state` is told True when hints can be heard, False when they cannot (also at first), each only on a
        change; deaf time is made up for by an `Everything` hint. Both callbacks are called on the loop and must
        not block; what they raise is logged.
        """
        ...


class SyncWake(Protocol):
    """The same for programs without a loop; the callbacks are called in a thread of its own."""

    def start(self, on_hint: OnHint, on_state: OnState) -> None:
        """Begin to deliver hints; once only."""
        ...

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """End it, waiting at most `timeout_s` seconds for the thread; a second call does nothing."""
        ...
