"""The one way from an app to its database: opened at first use, once per process, by threads and event loops alike.

What lives here: when the database is opened and its schema checked. What may not: any question that is asked through it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar
from uuid import UUID

from msgspec import structs

from everbeat.client.waiter import Waiter
from everbeat.runtime.blocking import refuse_in_loop as refuse_in_loop
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store.address import DatabaseAddress, OpenDatabase
from everbeat.store.database import Database
from everbeat.store.plan import Plan, arun_plan, run_plan
from everbeat.store.target import Target
from everbeat.store.tasks import StoredOutcome, outcomes
from everbeat.wake import SyncWake
from everbeat.wake.postgres import SyncPostgresWake

if TYPE_CHECKING:
    from everbeat.store.embedded import EmbeddedServer

T = TypeVar("T")


class Door:
    """Runs plans on the app's database; safe for many threads and loops, and after a fork."""

    def __init__(self, address: DatabaseAddress, *, auto_migrate: bool) -> None:
        self.address = address
        self.auto_migrate = auto_migrate
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        # In a forked child: another thread may have held the lock, and an embedded server counts users by process.
        self._lock = threading.Lock()
        self._waiter: Waiter | None = None
        self._opened: OpenDatabase | None = None
        self._database: Database | None = None

    def run(self, plan: Plan[T], *, name: str, twin: str) -> T:
        """Runs a plan in this thread. Raises BlockingCallInLoop where a loop runs, and a DatabaseError."""
        try:
            refuse_in_loop(name, twin=twin)
            return run_plan(self.database(), plan)
        finally:
            plan.close()

    async def arun(self, plan: Plan[T]) -> T:
        """Runs a plan on the running loop. Raises a DatabaseError."""
        try:
            return await arun_plan(await self.adatabase(), plan)
        finally:
            plan.close()

    def database(self) -> Database:
        """The database, opened and checked at the first call of this process."""
        return self._database or self._prepared()

    async def adatabase(self) -> Database:
        """The twin of `database`: only the first call of a process leaves the loop."""
        if self._database is not None:
            return self._database
        return await asyncio.to_thread(self._prepared)

    def opened(self) -> OpenDatabase:
        """The open database, its schema not looked at: for migrations."""
        with self._lock:
            return self._open()

    @property
    def target(self) -> Target:
        """The target; opens an embedded server."""
        return self.opened().target

    @property
    def channel(self) -> str:
        """The notification channel of the schema."""
        return self.address.channel

    @property
    def waiter(self) -> Waiter:
        """The one waiter of this app in this process; asks nothing before somebody waits."""
        with self._lock:
            if self._waiter is None:
                self._waiter = Waiter(look_up=self._look_up, make_wake=self._make_wake)
            return self._waiter

    def _look_up(self, ids: Sequence[UUID]) -> dict[UUID, StoredOutcome]:
        return self.database().run(outcomes(ids))

    def _make_wake(self) -> SyncWake:
        target = self.target
        return SyncPostgresWake(lambda: target.connect("everbeat waiter"), self.channel)

    def _open(self) -> OpenDatabase:
        if self._opened is None:
            opened = self.address.open()
            self._opened = structs.replace(opened, target=opened.target.for_clients())
            if self._opened.server is not None:
                # Before the server's own farewell, which would cut off whoever still listens.
                atexit.register(_close_at_exit, weakref.ref(self))
        return self._opened

    def _prepared(self) -> Database:
        with self._lock:
            if self._database is not None:
                return self._database  # another thread was first
            opened = self._open()
            opened.prepare(auto_migrate=self.auto_migrate)
            self._database = database = Database(opened.target)
            return database

    def close(self) -> None:
        """Closes idle connections and ends the use of an embedded server; the next call opens anew."""
        waiter, database, server = self._take()
        if waiter is not None:
            waiter.close()
        if database is not None:
            database.close()
        if server is not None:
            server.close()

    async def aclose(self) -> None:
        """The twin of `close`; closes the running loop's connections as well."""
        waiter, database, server = self._take()
        if waiter is not None:
            await asyncio.to_thread(waiter.close)
        if database is not None:
            await database.aclose()
        if server is not None:
            await asyncio.to_thread(server.close)

    def _take(self) -> tuple[Waiter | None, Database | None, EmbeddedServer | None]:
        with self._lock:
            waiter, database, opened = self._waiter, self._database, self._opened
            self._waiter = None
            if opened is None or opened.server is None:
                return waiter, database, None  # other loops have their own connections in there
            self._database = self._opened = None
            return waiter, database, opened.server


def _close_at_exit(door: weakref.ref[Door]) -> None:
    if (opened := door()) is not None:
        opened.close()
