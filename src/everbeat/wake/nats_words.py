"""Words that should arrive even if the link they were said over does not last: acknowledgements.

What lives here: remembering which of them are known to have arrived. What may not: sending them.
"""

from __future__ import annotations

from collections import deque


class KeptWords:
    """Subject and bytes of each. An echo that comes back proves what was said before it."""

    __slots__ = ("_before_echoes", "_fresh")

    def __init__(self) -> None:
        self._fresh: list[tuple[str, bytes]] = []
        self._before_echoes: deque[list[tuple[str, bytes]]] = deque()

    def add(self, subject: str, data: bytes) -> None:
        """This is said."""
        self._fresh.append((subject, data))

    def echo_sent(self) -> None:
        """An echo follows what was said."""
        self._before_echoes.append(self._fresh)
        self._fresh = []

    def echo_heard(self) -> None:
        """The oldest echo came back."""
        if self._before_echoes:
            self._before_echoes.popleft()

    def unproved(self) -> list[tuple[str, bytes]]:
        """What may not have arrived, in order."""
        return [*(word for words in self._before_echoes for word in words), *self._fresh]
