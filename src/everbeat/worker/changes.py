"""What changed in a turn of the loop, told once: a batch ends hundreds of attempts at a time.

What lives here: the gathering. What may not: what follows from a change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everbeat.worker.attempt import Attempt, LaneName


class Changes:
    """`tell(lanes)` is called once for all leases that are over, and all code that has ended, in a turn of the loop."""

    def __init__(self, tell: Callable[[set[LaneName]], None]) -> None:
        self._tell = tell
        self._lanes: set[LaneName] = set()

    def note(self, attempt: Attempt) -> None:
        """Its lease is over, or its code has ended."""
        if not self._lanes:
            asyncio.get_running_loop().call_soon(self._pass_on)
        self._lanes.add(attempt.lane)

    def _pass_on(self) -> None:
        lanes, self._lanes = self._lanes, set()
        self._tell(lanes)
