"""Asking the database on behalf of running code: for as long as its attempt is to be served, and no longer.

What lives here: the patience, and the end of it. What may not: what is asked (`clerk`, `step_clerk`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NoReturn, Protocol, TypeVar

from everbeat.domain.context import StopReason
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.store.session import Session
from everbeat.store.statement import Statement
from everbeat.worker.attempt import Attempt, Stage

T = TypeVar("T")

PATIENCE_S: Final = 1.0
"""So often a request that waits for the database looks whether its attempt is still to be served."""


class Losses(Protocol):
    """Who is told of a lease that the database says is lost."""

    def lose(self, attempts: Iterable[Attempt], reason: str) -> None:
        """It is somebody else's."""


class Stopped(Exception):
    """The attempt is not to be served any more."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason


class Inquiry:
    """One for each worker, on its loop."""

    def __init__(self, session: Session, *, losses: Losses) -> None:
        self._session = session
        self._losses = losses

    @property
    def channel(self) -> str:
        """The notification channel of the schema."""
        return self._session.target.channel

    async def ask(self, attempt: Attempt, statement: Statement[T]) -> T:
        """The database's answer. Raises Stopped."""
        while True:
            self.require_running(attempt)
            try:
                return await self._session.run(statement, patience_s=PATIENCE_S)
            except (DatabaseUnreachable, DatabaseReadOnly):
                if attempt.stopped is not None:
                    raise Stopped(attempt.stopped) from None

    def require_running(self, attempt: Attempt) -> None:
        """Raises Stopped unless its code runs under a lease that is ours."""
        if attempt.stage is not Stage.RUNNING:
            raise Stopped(attempt.stopped or "lease_lost")

    def lost(self, attempt: Attempt) -> NoReturn:
        """The database says so: nothing more is served."""
        if attempt.stage is Stage.RUNNING:
            self._losses.lose([attempt], "the database says so")
        raise Stopped("lease_lost")
