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

from everbeat.client.turns import Turns
from everbeat.client.waiter import Waiter
from everbeat.domain.upgrades import UnfinishedUpgrade
from everbeat.errors import DatabaseUnreachable
from everbeat.runtime.blocking import refuse_in_loop as refuse_in_loop
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store.address import AutoMigrate, DatabaseAddress, OpenDatabase
from everbeat.store.database import Database
from everbeat.store.giving_up import unreachable
from everbeat.store.migrations import SchemaStatus
from everbeat.store.patience import DEFAULT_PATIENCE_S, SignsOfLife
from everbeat.store.plan import Plan, arun_plan, run_plan
from everbeat.store.target import Target
from everbeat.store.tasks import StoredOutcome, outcomes
from everbeat.store.upgrade import DEFAULT_LOCK_PATIENCE_S, Tell, tell_nobody
from everbeat.wake import SyncWake
from everbeat.wake.postgres import SyncPostgresWake

if TYPE_CHECKING:
    from everbeat.store.embedded import EmbeddedServer

T = TypeVar("T")
_OPENED_WITHIN_S: Final = 120.0
"""An embedded server of a new folder needs a second, one with much to recover a minute."""
_SHORTEST_S: Final = 0.1
_STARTING_POLL_S: Final = 0.5
_OF_CALLS: Final[ContextVar[Mapping[int, float]]] = ContextVar("everbeat_patience", default={})  # noqa: B039 - never changed


class Door:
    """Runs plans on the app's database; safe for many threads and loops, and after a fork."""

    def __init__(
        self, address: DatabaseAddress, *, auto_migrate: AutoMigrate, patience_s: float = DEFAULT_PATIENCE_S
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
        self._opened_at = 0.0
        self._signs = SignsOfLife()
        self._turns: Turns[Database] = Turns()

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
        if self._database is not None:
            return self._database
        first = _FirstUse(self, within_s)
        try:
            return self._turns.run(first.attempt, first.left_s)
        except TimeoutError:
            raise self._still_opening(first.waited_s) from None

    async def adatabase(self, *, within_s: float = inf) -> Database:
        """The twin of `database`: only the first call of a process leaves the loop."""
        if self._database is not None:
            return self._database
        first = _FirstUse(self, within_s)
        try:
            return await self._turns.arun(first.attempt, first.left_s)
        except TimeoutError:
            raise self._still_opening(first.waited_s) from None

    def opened(self) -> OpenDatabase:
        """The open database, its schema not looked at: for migrations."""
        with self._turn(inf) as within_s:
            return self._open(stopping_s=self.patience_s, within_s=within_s)

    def migrate(
        self,
        *,
        to: int | None = None,
        lock_patience_s: float = DEFAULT_LOCK_PATIENCE_S,
        tell: Tell = tell_nobody,
    ) -> tuple[int, ...]:
        """Applies pending migrations (up to version `to`) and answers the versions applied. Raises a DatabaseError."""
        opened = self.opened()
        return opened.migrate(
            to=to, lock_patience_s=lock_patience_s, tell=tell, database=self._bounded(opened)
        )

    def status(self) -> SchemaStatus:
        """What is applied in the schema. Raises a DatabaseError."""
        opened = self.opened()
        return opened.status(database=self._bounded(opened))

    def unfinished(self) -> UnfinishedUpgrade:
        """What an upgrade that is under way, or ended half way, has left in the schema. Raises a DatabaseError."""
        opened = self.opened()
        return opened.unfinished(database=self._bounded(opened))

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
            raise self._still_opening(within_s)
        try:
            yield max(0.0, within_s - (monotonic() - began_at))
        finally:
            lock.release()

    def _open(self, *, stopping_s: float, within_s: float) -> OpenDatabase:
        if self._opened is None:
            opened = self.address.open(stopping_s=stopping_s, within_s=min(within_s, _OPENED_WITHIN_S))
            self._opened_at = monotonic()
            self._opened = structs.replace(opened, target=opened.target.for_clients())
            if self._opened.server is not None:
                # Before the server's own farewell, which would cut off whoever still listens.
                atexit.register(_close_at_exit, weakref.ref(self))
        return self._opened

    def _still_opening(self, waited_s: float) -> DatabaseUnreachable:
        text = f"Another thread has been opening the database at {self.address.shown!r} for {waited_s:.3g} s."
        fix = "wait longer, or check that the database runs."
        return unreachable(text, fix=fix, last=self._signs.problem)

    def prepare(self, *, patience_s: float, within_s: float) -> Database:
        """Open the database and create, upgrade or check its schema, in one try. Raises a DatabaseError."""
        with self._turn(within_s) as left_s:
            if self._database is not None:
                return self._database
            opened = self._open(stopping_s=patience_s, within_s=left_s)
        database = Database(opened.target, patience_s=self._patience_s, signs=self._signs)
        patience_s = min(patience_s, max(left_s, _SHORTEST_S))
        opened.prepare(auto_migrate=self.auto_migrate, database=database, patience_s=patience_s)
        with self._lock:
            if self._opened is opened:  # it was not closed meanwhile
                self._database = database
        return database

    @property
    def is_open(self) -> bool:
        """Whether the address is known: an embedded server runs."""
        return self._opened is not None

    def waited_for_until(self, began_at: float, patience_s: float) -> float:
        """When a call of this patience stops waiting for the try of another one: later if that one got a sign of life."""
        if not self.is_open:
            # An embedded server may take longer to start than any patience: only the time limit of a call ends the wait for it.
            return monotonic() + _STARTING_POLL_S
        return max(began_at, self._opened_at, self._signs.last_at) + patience_s

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


class _FirstUse:
    """A call that needs the database opened: how long it tries that, or waits for the try of another call."""

    def __init__(self, door: Door, within_s: float) -> None:
        self._door = door
        # A wait with a time limit goes on until its limit, as it does through a later outage.
        self._patience_s = door.patience_s if within_s == inf else within_s
        self._began_at = monotonic()
        self._ends_at = self._began_at + within_s

    @property
    def waited_s(self) -> float:
        """Seconds since the call began."""
        return monotonic() - self._began_at

    def left_s(self) -> float:
        """Seconds that the call still waits for another's try."""
        until = self._door.waited_for_until(self._began_at, self._patience_s)
        return min(until, self._ends_at) - monotonic()

    def attempt(self) -> Database:
        """Try it. After a wait for another's try, only the rest of the patience is left."""
        within_s = max(self._ends_at - monotonic(), 0.0)
        patience_s = max(self.left_s(), _SHORTEST_S) if self._door.is_open else self._patience_s
        return self._door.prepare(patience_s=patience_s, within_s=within_s)
