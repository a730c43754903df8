"""How long one call of a client goes on without a sign of life from the database, and how a silent statement is judged.

A statement that is silent for a quarter of the patience is looked at over another connection. While the server works on it, it is
waited for, and the patience begins anew. Otherwise the client hangs up, and the statement is sent again, to another host if there is one.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic
from typing import Final

from msgspec import Struct

_SHARE: Final = 4
_SHORTEST_LOOK_S: Final = 0.25
_SECOND_LOOK_S: Final = 0.5
DEFAULT_PATIENCE_S: Final = 5.0


class Sight(Enum):
    """What a look at the session of a silent statement found."""

    WORKS = "works"
    """The server works on the statement, or waits for a lock."""
    STALLED = "stalled"
    """The statement waits for a synchronous standby."""
    IDLE = "idle"
    """The session has no statement any more, so its answer was lost."""
    SILENT = "silent"
    """The server did not answer the look either."""
    UNSURE = "unsure"
    """The look failed before its time was over: the server refused it, or this process could not make it."""


_REASONS: Final = {
    Sight.WORKS: "the server still works on a statement, or the statement waits for a lock",
    Sight.STALLED: "a statement waits for a synchronous standby that does not confirm it",
    Sight.IDLE: "the answer to a statement was lost",
    Sight.SILENT: "the server answers neither a statement nor a new connection",
    Sight.UNSURE: "the server does not answer a statement, and another connection to it cannot be made",
}


class LastProblem(Struct, frozen=True):
    """Why a try of a call failed, and what a user can do about it."""

    message: str
    fix: str | None


class SignsOfLife(Struct):
    """When a database last gave one to any call of a client, and the problem of a call since then."""

    last_at: float = 0.0
    problem: LastProblem | None = None


class Patience:
    """The clock of one call: `ends_at` is `seconds` after the last sign of life that the call itself was given."""

    def __init__(self, seconds: float, signs: SignsOfLife | None = None, *, is_final: bool = False) -> None:
        self.seconds = seconds
        self.is_final = is_final
        self.step_s = seconds / _SHARE
        self.ends_at = monotonic() + seconds
        self.reason: str | None = None
        self.has_left_a_stall = False
        self._signs = signs or SignsOfLife()
        self._has_failed = False

    @property
    def remaining_s(self) -> float:
        """Seconds until it ends, at least 0."""
        return max(self.ends_at - monotonic(), 0.0)

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return monotonic() >= self.ends_at

    def renew(self) -> None:
        """Begin anew: the database gave this call a sign of life."""
        self._signs.last_at = monotonic()
        if not self.is_final:
            self.ends_at = self._signs.last_at + self.seconds

    def failed(self, problem: LastProblem) -> None:
        """Note that a try of this call has failed."""
        self._has_failed = True
        self._signs.problem = problem

    @property
    def last_problem(self) -> LastProblem | None:
        """The last problem of any call, unless the database has answered one since."""
        return self._signs.problem

    def follow_others(self) -> None:
        """Begin anew at the last sign of life that any call was given: this one waits for their connections.

        Not after a try of its own that failed: a server that refuses writes answers what others read.
        """
        if not self.is_final and not self._has_failed:
            self.ends_at = max(self.ends_at, self._signs.last_at + self.seconds)

    def answered(self) -> None:
        """Note that the database has answered."""
        self._signs.last_at = monotonic()
        self._signs.problem = None


class Judgement:
    """When a silent statement is looked at, and what follows from what was seen."""

    def __init__(self, patience: Patience, *, other_hosts: bool) -> None:
        self._patience = patience
        self._other_hosts = other_hosts
        self.begin()

    def begin(self) -> None:
        """A statement was sent."""
        self._last: Sight | None = None
        self._arriving_until = 0.0
        self.look_at = self._next(self._patience.step_s)

    def arrived(self) -> None:
        """Look later: a piece of the answer has arrived. This try goes on, but a repetition does not get more time."""
        if self._patience.is_final and self._patience.is_over:
            return
        self._patience.answered()
        self._arriving_until = monotonic() + self._patience.seconds
        self._last, self.look_at = None, self._next(self._patience.step_s)

    @property
    def is_stalled(self) -> bool:
        """Whether the last look saw the statement wait for a synchronous standby."""
        return self._last is Sight.STALLED

    @property
    def look_s(self) -> float:
        """How long the next look can take. Where no other host is left to try, nothing else needs the time."""
        remaining = max(self._ends_at - monotonic(), 0.0)
        return max(
            min(self._patience.step_s, remaining) if self._other_hosts else remaining, _SHORTEST_LOOK_S
        )

    @property
    def is_hopeless(self) -> bool:
        """Whether the patience is over and another look would not change that."""
        return self._is_over and self._last in (Sight.STALLED, Sight.UNSURE)

    def hangs_up(self, sight: Sight) -> bool:
        """Whether the statement is given up after this look; if not, the next look is due at `look_at`."""
        is_second, self._last = sight is self._last, sight
        pause_s = self._patience.step_s
        gives_up = sight is Sight.SILENT
        match sight:
            case Sight.WORKS:
                self._patience.renew()
                if not self._is_over:
                    self.look_at = self._next(pause_s)
                    return False
            case Sight.IDLE:
                # Its answer may be on its way.
                gives_up, pause_s = is_second, min(pause_s, _SECOND_LOOK_S)
            case Sight.STALLED:
                # Each session that is left in this state stays until the standby returns: leave one at most, for another host.
                gives_up = is_second and self._other_hosts and not self._patience.has_left_a_stall
                self._patience.has_left_a_stall |= gives_up
            case Sight.SILENT | Sight.UNSURE:
                pass
        self._patience.reason = _REASONS[sight]
        self.look_at = self._next(pause_s)
        return gives_up or self._is_over

    @property
    def _ends_at(self) -> float:
        return max(self._patience.ends_at, 0.0 if self._patience.is_final else self._arriving_until)

    @property
    def _is_over(self) -> bool:
        return monotonic() >= self._ends_at

    def _next(self, pause_s: float) -> float:
        now = monotonic()
        return max(min(now + pause_s, self._ends_at), now + min(pause_s, _SHORTEST_LOOK_S))
