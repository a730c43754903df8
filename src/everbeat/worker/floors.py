"""How far the claims of a lane have come: while there is more than fits into one, the next need not begin from the start.

What lives here: these places, and for how long they are believed. What may not: the statement.

Tasks may still appear before such a place: given back, recovered, or sent by a transaction that took its time. They are found
by the next claim without floors: at once when there is little to do, otherwise within a second, within four at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from everbeat.runtime.clock import Clock
from everbeat.store.leases import NO_FLOORS, Claimed, Place

TRUSTED_S: Final = 1.0
_SHARE: Final = 0.05
"""So much of the time goes into claims from the start: with many dead entries they take long."""
LONGEST_S: Final = 4.0
"""What appears before a place waits no longer, even if that share grows."""
_MOST: Final = 100


class Floors:
    """Of one lane of the worker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: Mapping[tuple[str, int], Place] = NO_FLOORS
        self._until = 0.0
        self._looked_s = 0.0

    def now(self) -> Mapping[tuple[str, int], Place]:
        """The last place taken of each (queue, priority); none when it is time for a look from the start."""
        if self._clock.monotonic() >= self._until:
            self._places = NO_FLOORS
        return self._places

    def learn(self, claimed: Sequence[Claimed], *, is_full: bool, used: bool, looked_s: float) -> None:
        """What a claim brought, in order; `used`: it had floors. `looked_s`: how long the server looked for it."""
        if not is_full:
            self._places = NO_FLOORS
            return
        if not used:
            # A look may have waited for a lock: only what the last one took as well is what it costs.
            costs_s, self._looked_s = min(looked_s, self._looked_s), looked_s
            self._until = self._clock.monotonic() + min(LONGEST_S, max(TRUSTED_S, costs_s / _SHARE))
        # A serial line is served by its own order, and marked tasks wait in lanes of their own.
        reached = {
            (task.queue, task.priority): (task.enqueued_at, task.id)
            for task in claimed
            if not (task.in_line or task.is_marked)
        }
        places = {**self._places, **reached}
        self._places = places if len(places) <= _MOST else NO_FLOORS
