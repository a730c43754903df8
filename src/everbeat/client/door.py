"""The one way from an app to its database: opened at first use, once per process, by threads and event loops alike.

What lives here: when the database is opened and its schema checked. What may not: any question that is asked through it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import UUID

from msgspec import structs

from everbeat.client.waiter import Waiter
from everbeat.errors import DatabaseError, DatabaseUnreachable
from everbeat.runtime.blocking import refuse_in_loop as refuse_in_loop
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store.address import DatabaseAddress, OpenDatabase
from everbeat.store.database import Database
from everbeat.store.migrations import SchemaStatus
from everbeat.store.patience import DEFAULT_PATIENCE_S
from everbeat.store.plan import Plan, arun_plan, run_plan
from everbeat.store.target import Target
from everbeat.store.tasks import StoredOutcome, outcomes
from everbeat.wake import SyncWake
from everbeat.wake.postgres import SyncPostgresWake

if TYPE_CHECKING:
    from everbeat.store.embedded import EmbeddedServer

T = TypeVar("T")
_OPENED_WITHIN_S: Final = 120.0
"""An embedded server of a new folder needs a second, one with much to recover a minute."""
_SHORTEST_S: Final = 0.1
_OF_CALLS: Final[ContextVar[Mapping[int, float]]] = ContextVar("everbeat_patience", default={})  # noqa: B039 - never changed


class Door:
    """Runs plans on the app's database; safe for many threads and loops, and after a fork."""

    def __init__(
        self, address: DatabaseAddress, *, auto_migrate: bool, patience_s: float = DEFAULT_PATIENCE_S
    ) -> None:
        self.address = address
        self.auto_migrate = auto_migrate
        self._patience_s = patience_s
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        # In a forked child: another thread may have held the lock, and an embedded server counts users by process.
        self._lock = threading.Lock()
        self._waiter: Waiter | None = None
        self._opened: OpenDatabase | None = None
        self._database: Database | None = None
        self._failure: tuple[float, DatabaseError] | None = None

    @property
    def patience_s(self) -> float:
        """How long a call that begins here and now goes on without a sign of life from the database."""
        return _OF_CALLS.get().get(id(self), self._patience_s)

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Calls in this block, of this thread or of tasks that it begins, have this patience."""
        token = _OF_CALLS.set({**_OF_CALLS.get(), id(self): seconds})
        try:
            yield
        finally:
            _OF_CALLS.reset(token)

    def run(self, plan: Plan[T], *, name: str, twin: str) -> T:
        """Runs a plan in this thread. Raises BlockingCallInLoop where a loop runs, and a DatabaseError."""
        try:
            refuse_in_loop(name, twin=twin)
            return run_plan(self.database(), plan, patience_s=self.patience_s)
        finally:
            plan.close()

    async def arun(self, plan: Plan[T]) -> T:
        """Runs a plan on the running loop. Raises a DatabaseError."""
        try:
            return await arun_plan(await self.adatabase(), plan, patience_s=self.patience_s)
        finally:
            plan.close()

    def database(self, *, within_s: float = inf) -> Database:
        """The database, opened and checked at the first call of this process, in `within_s` seconds."""
        return self._database or self._prepared(within_s)

    async def adatabase(self, *, within_s: float = inf) -> Database:
        """The twin of `database`: only the first call of a process leaves the loop."""
        if self._database is not None:
            return self._database
        return await asyncio.to_thread(self._prepared, within_s)

    def opened(self) -> OpenDatabase:
        """The open database, its schema not looked at: for migrations."""
        with self._turn(inf) as within_s:
            return self._open(stopping_s=self.patience_s, within_s=within_s)

    def migrate(self, *, to: int | None = None) -> tuple[int, ...]:
        """Applies pending migrations (up to version `to`) and answers the versions applied. Raises a DatabaseError."""
        opened = self.opened()
        return opened.migrate(to=to, database=self._bounded(opened))

    def status(self) -> SchemaStatus:
        """What is applied in the schema. Raises a DatabaseError."""
        opened = self.opened()
        return opened.status(database=self._bounded(opened))

    def drop(self) -> None:
        """Drops the schema with everything in it. Raises a DatabaseError."""
        opened = self.opened()
        opened.drop(database=self._bounded(opened))

    def _bounded(self, opened: OpenDatabase) -> Database:
        return Database(opened.target, patience_s=self.patience_s)

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

    @contextmanager
    def _turn(self, within_s: float) -> Iterator[float]:
        """Opens the database alone among the threads; answers how many of the seconds are left."""
        lock, began_at = self._lock, monotonic()
        if not lock.acquire(timeout=min(within_s, threading.TIMEOUT_MAX)):
            raise DatabaseUnreachable(
                f"Another thread has been opening the database at {self.address.shown!r} for {within_s:g} s.",
                fix="wait longer, or check that the database runs.",
            )
        try:
            yield max(0.0, within_s - (monotonic() - began_at))
        finally:
            lock.release()

    def _open(self, *, stopping_s: float, within_s: float) -> OpenDatabase:
        if self._opened is None:
            opened = self.address.open(stopping_s=stopping_s, within_s=min(within_s, _OPENED_WITHIN_S))
            self._opened = structs.replace(opened, target=opened.target.for_clients())
            if self._opened.server is not None:
                # Before the server's own farewell, which would cut off whoever still listens.
                atexit.register(_close_at_exit, weakref.ref(self))
        return self._opened

    def _prepared(self, within_s: float) -> Database:
        patience_s, began_at = min(self.patience_s, within_s), monotonic()
        with self._turn(within_s) as within_s:
            if self._database is not None:
                return self._database  # another thread was first
            if self._failure is not None and self._failure[0] >= began_at:
                patience_s -= monotonic() - began_at  # this call has waited while another thread tried
                if patience_s <= 0:
                    raise self._failure[1]
            patience_s = min(patience_s, max(within_s, _SHORTEST_S))
            opened = self._open(stopping_s=patience_s, within_s=within_s)
            database = Database(opened.target, patience_s=self._patience_s)
            try:
                opened.prepare(auto_migrate=self.auto_migrate, database=database, patience_s=patience_s)
            except DatabaseError as failure:
                self._failure = monotonic(), failure
                raise
            self._database, self._failure = database, None
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
