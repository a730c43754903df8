"""Code of a stopped guest that goes on in its program: the guest keeps its leases and beats until the code has ended.

A thread cannot be ended from outside. Were its task handed back before, a second run would overlap the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from everbeat.store import leases
from everbeat.worker.attempt import Attempt
from everbeat.worker.settlement import settlement_of
from everbeat.worker.supervision import Supervision

_LOOK_EVERY_S: Final = 0.25


class RemainingCode:
    """The attempts whose code goes on, on the program's `loop` or in its threads."""

    def __init__(self, attempts: Collection[Attempt], *, loop: asyncio.AbstractEventLoop) -> None:
        self._attempts = attempts
        self._loop = loop

    async def settle(self, supervision: Supervision) -> None:
        """Wait for the end of all code, and write how it ended. Raises a DatabaseError."""
        while any(self._runs(attempt) for attempt in self._attempts):
            await supervision.clock.sleep(_LOOK_EVERY_S)
        found = [
            settlement_of(attempt, attempt.ended, random=supervision.random)
            for attempt in self._attempts
            if attempt.ended is not None
        ]
        if settlements := [each for each in found if each is not None]:
            await supervision.session.run(leases.settle(settlements, channel=supervision.target.channel))

    def _runs(self, attempt: Attempt) -> bool:
        # No code runs on a loop that is closed.
        return attempt.ended is None and (attempt.lane == "thread" or not self._loop.is_closed())
