"""Hints over LISTEN/NOTIFY that tasks may be claimable or finished. Hints may be lost, repeated or late: only the rows decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everbeat.hints.topics import Hint

OnHint = Callable[[Hint], None]
OnState = Callable[[bool], None]


class HintSource(Protocol):
    """A source of hints for programs with an event loop."""

    async def run(self, on_hint: OnHint, on_state: OnState) -> None:
        """Deliver hints until cancelled. No other exception is raised.

        `on_state(True)` is called when hints can arrive, and `on_state(False)` when they cannot, which includes the start. Calls are made
        only when the state changes. After a gap, an `Everything` hint is delivered. Both callbacks run on the loop and must not block.
        Their errors are logged.
        """
        ...


class SyncHintSource(Protocol):
    """A source of hints for programs without an event loop. The callbacks run in a separate thread."""

    def start(self, on_hint: OnHint, on_state: OnState) -> None:
        """Start delivering hints. Call this only once."""
        ...

    def stop(self, *, timeout_s: float = 5.0) -> None:
        """Stop, and wait up to `timeout_s` seconds for the thread. A second call does nothing."""
        ...
