"""What an executor is: slots, and code that runs in them.

What lives here: the protocol of the three executors. What may not: leases, statements, outcomes.
"""

from __future__ import annotations

from typing import Protocol

from everbeat.domain.definition import RunIn
from everbeat.worker.attempt import Attempt


class Executor(Protocol):
    """Runs started attempts of one mode. It calls `on_ended` once for each, in the loop's thread, and `on_free` whenever
    a slot may have become free."""

    mode: RunIn
    slots: int

    @property
    def free(self) -> int:
        """How many attempts could begin right now."""
        ...

    @property
    def occupied(self) -> int:
        """Slots whose code has not ended, whatever became of its attempt."""
        ...

    def prepare(self, wanted: int) -> None:
        """This many attempts wait for a slot."""
        ...

    def begin(self, attempt: Attempt) -> None:
        """Run the code of an attempt whose start was acknowledged; needs a free slot."""
        ...

    def stop(self, attempt: Attempt) -> None:
        """Make the code end, by the means of this mode; `attempt.stopped` says why. Stalled code gets no grace."""
        ...

    def whereabouts(self, attempt: Attempt) -> str:
        """Where its code stands, for the log; a process writes that to its own standard error instead."""
        ...

    async def close(self) -> None:
        """End whatever still runs, within seconds."""
        ...
