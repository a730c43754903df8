"""The brake: where many fall silent together, it is the network or the database, and haste would hurt the living.

What lives here: when it is on, and how fast it lets go. What may not: statements.
"""

from __future__ import annotations

from everbeat.domain.silence import is_mass


class Brake:
    """On from the moment in which many are silent, until they are few again. Times by the observer's monotonic clock."""

    def __init__(self, *, window_s: float) -> None:
        self.window_s = window_s
        self._since: float | None = None

    @property
    def pace_s(self) -> float:
        """Seconds between two that are given up while it is on, whoever observes."""
        return 2 * self.window_s

    @property
    def is_on(self) -> bool:
        """Whether the last look found a mass silence."""
        return self._since is not None

    def look(self, *, silent: int, known: int, at: float) -> bool:
        """Takes notice of a look; answers whether the brake was put on by it."""
        if not is_mass(silent=silent, known=known):
            self._since = None
            return False
        if self._since is not None:
            return False
        self._since = at
        return True

    def is_waiting(self, at: float) -> bool:
        """Whether the further window that everybody gets is still running."""
        return self._since is not None and at < self._since + self.window_s

    def wait_again(self, at: float) -> None:
        """Everybody gets a further window from now."""
        if self._since is not None:
            self._since = at
