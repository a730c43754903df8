"""Stores the limits of an app before its program sends the first task that has any."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

from everbeat.client.database_access import DatabaseAccess
from everbeat.client.limits import LimitBook
from everbeat.client.task import Call
from everbeat.errors import DatabaseError
from everbeat.store.limits import declare_limits
from everbeat.store.plan import ask


class LimitDeclarations:
    """The limits of an app, and whether this process has stored them."""

    def __init__(self, database: DatabaseAccess, book: LimitBook) -> None:
        self._database = database
        self._book = book
        self._are_stored = False

    def store(self, calls: Sequence[Call[Any]] | None, connection: object) -> None:
        """Store the app's limits, unless they exist, before the first send of a task that has any (None: any task can have some).

        The statement is not part of the user's transaction, because its lock would make other senders wait. A joined send does not need
        the app's own connection, so it continues without it: workers also declare their limits before their first claim.
        """
        if self._must_store(calls):
            with nullcontext() if connection is None else suppress(DatabaseError):
                self._database.run(ask(declare_limits(self._book.definitions())), name="send", twin="asend")
            self._are_stored = True

    async def astore(self, calls: Sequence[Call[Any]] | None, connection: object) -> None:
        """Async version of `store` that does not block the running event loop."""
        if self._must_store(calls):
            with nullcontext() if connection is None else suppress(DatabaseError):
                await self._database.arun(ask(declare_limits(self._book.definitions())))
            self._are_stored = True

    def _must_store(self, calls: Sequence[Call[Any]] | None) -> bool:
        if self._are_stored or not self._book:
            return False
        return calls is None or any(self._book.applies_to(call) for call in calls)
