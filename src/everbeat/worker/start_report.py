"""Stores why a supervisor cannot start worker processes, where `everbeat workers`, `doctor` and `explain` find it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from everbeat.domain.starts import StartProblem
from everbeat.errors import DatabaseReadOnly, DatabaseUnreachable
from everbeat.runtime.clock import Clock
from everbeat.store import workers
from everbeat.store.session import Session

_EVERY_S: Final = 1.0


class StartReport:
    """A service of the supervisor; `problems` has an item for each worker process that it keeps: None if there is none.

    It writes only what has changed since its last write, so the beats carry nothing of it. A supervisor that goes on
    under a new id has a new row, so a new id is a change too.
    """

    name = "start_report"

    def __init__(
        self,
        session: Session,
        *,
        supervisor_id: Callable[[], str],
        problems: Callable[[], Sequence[StartProblem | None]],
        clock: Clock,
    ) -> None:
        self.interval_s = _EVERY_S
        self._session = session
        self._supervisor_id = supervisor_id
        self._problems = problems
        self._clock = clock
        self._stored: tuple[str, int, StartProblem | None] | None = None

    async def tick(self) -> float | None:
        """Store the present state if it is not the stored one; without a database, the next tick tries again."""
        problems = self._problems()
        longest = min(
            (each for each in problems if each is not None), key=lambda each: each.since, default=None
        )
        now = (self._supervisor_id(), len(problems), longest)
        if now == self._stored:
            return None
        statement = workers.record_starts(
            now[0],
            processes=len(problems),
            problem=None if longest is None else longest.text,
            age_ms=0 if longest is None else round((self._clock.monotonic() - longest.since) * 1_000),
        )
        try:
            await self._session.run(statement, patience_s=0)
        except (DatabaseUnreachable, DatabaseReadOnly):
            return None
        self._stored = now
        return None
