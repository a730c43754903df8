"""The latest actions of operators, in the order in which one process has seen them. A page asks what happened since it was read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from everbeat.domain.pulse.sample import SampledAction

_MOST: Final = 2_000


class ActionMemory:
    """Numbers the actions in the order in which they were seen. An entry of the audit log can become visible after one with a higher id.

    `number` is that of the last action, and `last_id` the highest id, or None before the first.
    """

    def __init__(self) -> None:
        self.number = 0
        self.last_id: int | None = None
        self._seen: deque[tuple[int, SampledAction]] = deque(maxlen=_MOST)
        self._ids: deque[int] = deque(maxlen=_MOST)

    def record(self, actions: Iterable[SampledAction]) -> None:
        """Add the actions that were not seen before, in the order of their ids."""
        for action in sorted(actions, key=lambda each: each.id):
            if action.id in self._ids:
                continue
            self.number += 1
            self._seen.append((self.number, action))
            self._ids.append(action.id)
            self.last_id = action.id if self.last_id is None else max(self.last_id, action.id)

    def since(self, number: int) -> list[SampledAction]:
        """Return the actions that were seen after the one with this number, the latest first."""
        return [action for seen, action in reversed(self._seen) if seen > number]

    def number_of(self, last_id: int) -> int:
        """Return the number of the last action up to this id. A page of another process knows only the id."""
        return max((seen for seen, action in self._seen if action.id <= last_id), default=0)
