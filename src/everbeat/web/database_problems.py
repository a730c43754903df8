"""Problems of the database in words for users. Only operators, and the log, get the address of the database."""

from __future__ import annotations

import logging
import re
from typing import Final

from msgspec import Struct

from everbeat.domain.hiding import HIDDEN
from everbeat.errors import DatabaseError, DatabaseReadOnly, DatabaseTooOld, DatabaseUnreachable
from everbeat.runtime.clock import Clock, SystemClock
from everbeat.web.rights import Role, User

_log = logging.getLogger("everbeat.web")
_AGAIN_AFTER_S: Final = 60.0
_MOST_KEPT: Final = 100
_SAID: Final[tuple[tuple[type[DatabaseError], str], ...]] = (
    (DatabaseUnreachable, "The database cannot be reached."),
    (DatabaseReadOnly, "The database accepts no changes."),
    (DatabaseTooOld, "The database is a version of PostgreSQL that everbeat does not support."),
    (DatabaseError, "The database did not answer as expected."),
)
_FIX: Final = "ask an operator of this installation; the log of the dashboard names the cause."
_URL: Final = re.compile(r"(postgres(ql)?|embedded):[^\s'\"]+")


class Told(Struct, frozen=True):
    """A problem as a user reads it."""

    message: str
    fix: str | None


class DatabaseProblems:
    """Says what is wrong with the database: to each user what the role allows, and to the log everything, each problem once a minute."""

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._clock = SystemClock() if clock is None else clock
        self._logged: dict[str, float] = {}

    def told(self, problem: DatabaseError, user: User) -> Told:
        """Return what this user reads about a problem. The message of PostgreSQL can name the host, the user and the database."""
        self._note(problem)
        if may_see_address(user):
            return Told(problem.message, problem.fix)
        return Told(next(said for kind, said in _SAID if isinstance(problem, kind)), _FIX)

    def _note(self, problem: DatabaseError) -> None:
        now = self._clock.monotonic()
        if now < self._logged.get(problem.message, now):
            return
        if len(self._logged) >= _MOST_KEPT:
            self._logged.clear()
        self._logged[problem.message] = now + _AGAIN_AFTER_S
        _log.warning("database_problem code=%s: %s", problem.code, problem.message)


def may_see_address(user: User) -> bool:
    """Return whether the user may see where the database is."""
    return user.role.includes(Role.OPERATE)


def without_address(text: str) -> str:
    """Return a text of a check without the URL of the database."""
    return _URL.sub(HIDDEN, text)
