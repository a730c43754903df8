"""Runs the statements for the requests of running code, as long as its attempt should be served."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NoReturn, TypeVar

from everbeat.domain.plan import aperform
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable, StopReason
from everbeat.store.plan import Plan
from everbeat.store.statement import Statement
from everbeat.worker.attempt import CODE_RUNS, Attempt
from everbeat.worker.environment import WorkerEnvironment
from everbeat.worker.messages import AttemptLost

T = TypeVar("T")

PATIENCE_S: Final = 1.0
"""How often a request that is waiting for the database checks whether its attempt should still be served, in seconds."""


class Stopped(Exception):
    """Raised when an attempt should no longer be served."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason)
        self.reason: StopReason = reason


class RequestQuery:
    """Runs the statements for requests while the requesting attempts should still be served."""

    def __init__(self, environment: WorkerEnvironment) -> None:
        self._session = environment.session
        self._send = environment.send

    @property
    def channel(self) -> str:
        """Return the notification channel of the schema."""
        return self._session.target.channel

    async def ask(self, attempt: Attempt, statement: Statement[T]) -> T:
        """Run the statement and return its result. Raises Stopped if the attempt should no longer be served."""
        return await self.repeat(attempt, lambda: self._session.run(statement, patience_s=PATIENCE_S))

    async def transact(self, attempt: Attempt, make: Callable[[], Plan[T]]) -> T:
        """Run a plan in one transaction and return its result. Raises Stopped if the attempt should no longer be served."""
        return await self.repeat(
            attempt,
            lambda: self._session.transact(lambda run: aperform(make(), run), patience_s=PATIENCE_S),
        )

    async def repeat(self, attempt: Attempt, once: Callable[[], Awaitable[T]]) -> T:
        """Call `once` until the database answers, and return its result. Raises Stopped if the attempt should no longer be served."""
        while True:
            self.require_running(attempt)
            try:
                return await once()
            except (DatabaseUnreachable, DatabaseReadOnly):
                if attempt.stopped is not None:
                    raise Stopped(attempt.stopped) from None

    def require_running(self, attempt: Attempt) -> None:
        """Raise Stopped unless the attempt's code is running under a lease of this worker."""
        if attempt.stage not in CODE_RUNS:
            raise Stopped(attempt.stopped or "lease_lost")

    def lost(self, attempt: Attempt) -> NoReturn:
        """Handle the database's report that an attempt lost its lease. Always raises Stopped."""
        if attempt.stage in CODE_RUNS:
            self._send(AttemptLost(attempt, in_write=True))
        raise Stopped("lease_lost")
