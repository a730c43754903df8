"""Stores the limits of an app before its program sends the first task that has any."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

from everbeat.client.database_access import DatabaseAccess
from everbeat.client.limits import LimitBook
from everbeat.client.task import Call
from everbeat.errors import DatabaseError
from everbeat.runtime.clock import SystemClock
from everbeat.store.limits import declare_limits
from everbeat.store.plan import Plan, ask

T = TypeVar("T")

BESIDE_S: Final = 1.0
"""How long a joined send waits for the app's own connection, in seconds. The user's transaction may hold locks in this time."""
AGAIN_S: Final = 5.0
"""The time between two such tries, in seconds, if the first failed."""


class LimitDeclarations:
    """The limits of an app, and which of them this process has stored."""

    def __init__(self, database: DatabaseAccess, book: LimitBook) -> None:
        self._database = database
        self._book = book
        self._clock = SystemClock()
        self._stored_count = 0
        self._again_at = 0.0

    def before(self, plan: Plan[T], calls: Sequence[Call[Any]] | None) -> Plan[T]:
        """Return the plan, preceded by a statement that stores the app's limits if it must precede these calls (None: calls with any limits).

        The plan must not be part of the user's transaction, because the statement's lock would make other senders wait.
        """
        return self._stored_before(plan) if self._must_store(calls) else plan

    def store_beside(
        self, calls: Sequence[Call[Any]] | None, *, name: str, twin: str, patience_s: float | None
    ) -> None:
        """Store the app's limits with the app's own connection, before a send in the user's transaction.

        The send does not need that connection, so it continues if this fails: workers also declare their limits before their first claim.
        """
        if self._must_store_beside(calls):
            with self._briefly(patience_s):
                self._database.run(self._store(), name=name, twin=twin)

    async def astore_beside(self, calls: Sequence[Call[Any]] | None, *, patience_s: float | None) -> None:
        """Async version of `store_beside` that does not block the running event loop."""
        if self._must_store_beside(calls):
            with self._briefly(patience_s):
                await self._database.arun(self._store())

    def _must_store(self, calls: Sequence[Call[Any]] | None) -> bool:
        if self._stored_count == self._book.count:
            return False
        return calls is None or any(self._book.applies_to(call) for call in calls)

    def _must_store_beside(self, calls: Sequence[Call[Any]] | None) -> bool:
        return self._must_store(calls) and self._clock.monotonic() >= self._again_at

    @contextmanager
    def _briefly(self, patience_s: float | None) -> Iterator[None]:
        self._again_at = self._clock.monotonic() + AGAIN_S
        own_s = self._database.patience_s if patience_s is None else patience_s
        with suppress(DatabaseError), self._database.patience(min(own_s, BESIDE_S)):
            yield

    def _stored_before(self, plan: Plan[T]) -> Plan[T]:
        yield from self._store()
        return (yield from plan)

    def _store(self) -> Plan[None]:
        limits = self._book.definitions()
        yield from ask(declare_limits(limits))
        self._stored_count = len(limits)
        self._again_at = 0.0
