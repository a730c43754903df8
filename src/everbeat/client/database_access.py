"""Gives threads and event loops access to an app's database. Each process opens the database on first use."""

from __future__ import annotations

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final, Generic, TypeVar
from uuid import UUID

from msgspec import structs

from everbeat.client.auditing import noted
from everbeat.client.waiter import Waiter
from everbeat.domain.bulk_actions import Operator
from everbeat.domain.doctor.server import UnfinishedUpgrade
from everbeat.errors import DatabaseUnreachable
from everbeat.hints import SyncHintSource
from everbeat.hints.postgres import SyncPostgresHintSource
from everbeat.runtime.blocking import refuse_in_loop as refuse_in_loop
from everbeat.runtime.fork import call_in_forked_child
from everbeat.store import history
from everbeat.store.address import AutoMigrate, DatabaseAddress, OpenDatabase
from everbeat.store.database import Database
from everbeat.store.migrating import DEFAULT_LOCK_PATIENCE_S, Report, report_nothing
from everbeat.store.migrations import SchemaStatus
from everbeat.store.patience import DEFAULT_PATIENCE_S, SignsOfLife, unreachable
from everbeat.store.plan import Plan, announced, arun_plan, run_plan
from everbeat.store.target import Target
from everbeat.store.tasks import StoredOutcome, outcomes

if TYPE_CHECKING:
    from everbeat.embedded.server import EmbeddedServer

T = TypeVar("T")


class Turns(Generic[T]):
    """Coordinates concurrent callers of a function that needs to succeed only once.

    The first call runs the function while the other calls wait for this attempt to finish. If the attempt fails, one of the waiting
    calls tries next, unless its time is up. `left_s` returns how many more seconds a call may wait for another call's attempt. The
    function itself must limit how long an attempt takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: Future[T] | None = None

    def run(self, attempt: Callable[[], T], left_s: Callable[[], float]) -> T:
        """Return the result of `attempt`. Raises any exception of `attempt`, and TimeoutError if another call's attempt takes too long."""
        while True:
            current, is_own = self._take()
            if is_own:
                self._try(current, attempt)
                return current.result()
            while not current.done() and (wait_s := left_s()) > 0:
                futures.wait([current], timeout=wait_s)
            if _is_last(current, left_s):
                return _result_of_another(current)

    async def arun(self, attempt: Callable[[], T], left_s: Callable[[], float]) -> T:
        """Async version of `run` that does not block the running event loop.

        Each attempt runs in its own daemon thread, so it neither occupies the executor nor delays the exit of the process.
        """
        while True:
            current, is_own = self._take()
            waited_for = asyncio.wrap_future(current)
            if is_own:
                arguments = (current, attempt)
                trying = threading.Thread(target=self._try, args=arguments, name="everbeat-open", daemon=True)
                try:
                    trying.start()
                except RuntimeError as problem:  # the thread cannot be started
                    self._end(current, problem)
                return await waited_for
            while not current.done() and (wait_s := left_s()) > 0:
                await asyncio.wait([waited_for], timeout=wait_s)
            waited_for.cancel()
            if _is_last(current, left_s):
                return _result_of_another(current)

    def _take(self) -> tuple[Future[T], bool]:
        with self._lock:
            if self._current is not None:
                return self._current, False
            self._current = Future()
            self._current.set_running_or_notify_cancel()  # a call that stops waiting must not cancel the attempt for other calls
            return self._current, True

    def _try(self, current: Future[T], attempt: Callable[[], T]) -> None:
        try:
            result = attempt()
        except BaseException as problem:  # noqa: BLE001 - raised again in the waiting calls
            self._end(current, problem)
        else:
            self._current = None
            current.set_result(result)

    def _end(self, current: Future[T], problem: BaseException) -> None:
        self._current = None
        current.set_exception(problem)


def _result_of_another(current: Future[T]) -> T:
    """Return the result of another call's attempt, or raise its error. Raises TimeoutError if the attempt did not finish."""
    if current.done() and isinstance(current.exception(), Exception | None):
        return current.result()
    raise TimeoutError


def _is_last(current: Future[T], left_s: Callable[[], float]) -> bool:
    """Return whether a call must stop waiting because the attempt succeeded or the call's time is up."""
    return (current.done() and current.exception() is None) or left_s() <= 0


_OPENED_WITHIN_S: Final = 120.0
"""The time limit for starting an embedded server. A new server starts in about a second, but crash recovery can take a minute."""
_SHORTEST_S: Final = 0.1
_STARTING_POLL_S: Final = 0.5
_OPERATORS: Final[ContextVar[Mapping[int, Operator]]] = ContextVar("everbeat_operator", default={})  # noqa: B039 - never mutated
_READ_FROM: Final[ContextVar[Mapping[int, Database]]] = ContextVar("everbeat_read_from", default={})  # noqa: B039 - never mutated
_OF_CALLS: Final[ContextVar[Mapping[int, float]]] = ContextVar("everbeat_patience", default={})  # noqa: B039 - never mutated


class DatabaseAccess:
    """Runs plans on the app's database. Can be shared by threads and event loops, and is safe to use after a fork."""

    def __init__(
        self, address: DatabaseAddress, *, auto_migrate: AutoMigrate, patience_s: float = DEFAULT_PATIENCE_S
    ) -> None:
        self.address = address
        self.auto_migrate = auto_migrate
        self._patience_s = patience_s
        self._forget()
        call_in_forked_child(self._forget)

    def _forget(self) -> None:
        # In a forked child, the lock may be held by a thread of the parent. An embedded server counts its users by process.
        self._lock = threading.Lock()
        self._waiter: Waiter | None = None
        self._opened: OpenDatabase | None = None
        self._database: Database | None = None
        self._opened_at = 0.0
        self._signs = SignsOfLife()
        self._turns: Turns[Database] = Turns()

    @property
    def patience_s(self) -> float:
        """Return how many seconds a call that starts now waits for a database that does not respond."""
        return _OF_CALLS.get().get(id(self), self._patience_s)

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Set the patience, in seconds, for calls inside a `with` block, including calls in asyncio tasks that the block creates."""
        token = _OF_CALLS.set({**_OF_CALLS.get(), id(self): seconds})
        try:
            yield
        finally:
            _OF_CALLS.reset(token)

    @property
    def operator(self) -> Operator | None:
        """Return the operator on whose behalf a call that starts now acts, or None. The actions of an operator are noted in the audit log."""
        return _OPERATORS.get().get(id(self))

    @contextmanager
    def acting_as(self, operator: Operator) -> Iterator[None]:
        """Set the operator for calls inside a `with` block, including calls in asyncio tasks that the block creates."""
        token = _OPERATORS.set({**_OPERATORS.get(), id(self): operator})
        try:
            yield
        finally:
            _OPERATORS.reset(token)

    @contextmanager
    def reading_from(self, database: Database) -> Iterator[None]:
        """Run the async calls inside a `with` block on another set of connections to the same database, with that set's patience."""
        token = _READ_FROM.set({**_READ_FROM.get(), id(self): database})
        try:
            yield
        finally:
            _READ_FROM.reset(token)

    def run(self, plan: Plan[T], *, name: str, twin: str, within_s: float = inf) -> T:
        """Run a plan in this thread and return its result. `within_s` limits how long opening the database may take.

        Raises BlockingCallInLoop on an event loop, and DatabaseError if the database fails.
        """
        try:
            refuse_in_loop(name, twin=twin)
            database = self.database(within_s=within_s)
            return run_plan(database, self._noted(plan), patience_s=self.patience_s)
        finally:
            plan.close()

    async def arun(self, plan: Plan[T], *, within_s: float = inf) -> T:
        """Run a plan on the running event loop and return its result. Raises DatabaseError if the database fails."""
        try:
            if (reading := _READ_FROM.get().get(id(self))) is not None:
                return await arun_plan(reading, plan)
            database = await self.adatabase(within_s=within_s)
            return await arun_plan(database, self._noted(plan), patience_s=self.patience_s)
        finally:
            plan.close()

    def _noted(self, plan: Plan[T]) -> Plan[T]:
        return plan if self.operator is None else noted(plan, self.operator)

    def database(self, *, within_s: float = inf) -> Database:
        """Return the database. The first call in a process opens and checks it, which can take up to `within_s` seconds."""
        if self._database is not None:
            return self._database
        first = _FirstUse(self, within_s)
        try:
            return self._turns.run(first.attempt, first.left_s)
        except TimeoutError:
            raise self._still_opening(first.waited_s) from None

    async def adatabase(self, *, within_s: float = inf) -> Database:
        """Async version of `database` that does not block the running event loop. Only the first call in a process uses a thread."""
        if self._database is not None:
            return self._database
        first = _FirstUse(self, within_s)
        try:
            return await self._turns.arun(first.attempt, first.left_s)
        except TimeoutError:
            raise self._still_opening(first.waited_s) from None

    def opened(self) -> OpenDatabase:
        """Return the open database, for migrations. Unlike `database`, does not check the schema."""
        with self._turn(inf) as within_s:
            return self._open(stopping_s=self.patience_s, within_s=within_s)

    def migrate(
        self,
        *,
        to: int | None = None,
        lock_patience_s: float = DEFAULT_LOCK_PATIENCE_S,
        report: Report = report_nothing,
    ) -> tuple[int, ...]:
        """Apply pending migrations up to version `to`, and return the applied versions. Raises DatabaseError on failure."""
        opened = self.opened()
        return opened.migrate(
            to=to, lock_patience_s=lock_patience_s, report=report, database=self._bounded(opened)
        )

    def status(self) -> SchemaStatus:
        """Return the migration status of the schema. Raises DatabaseError on failure."""
        opened = self.opened()
        return opened.status(database=self._bounded(opened))

    def unfinished(self) -> UnfinishedUpgrade:
        """Return details of an upgrade that is still running or was interrupted. Raises DatabaseError on failure."""
        opened = self.opened()
        return opened.unfinished(database=self._bounded(opened))

    def drop(self) -> None:
        """Drop the schema and all its objects. Raises DatabaseError on failure."""
        opened = self.opened()
        opened.drop(database=self._bounded(opened))

    def _bounded(self, opened: OpenDatabase) -> Database:
        return Database(opened.target, patience_s=self.patience_s)

    @property
    def target(self) -> Target:
        """Return the connection target. If the app uses an embedded server, starts the server first."""
        return self.opened().target

    @property
    def channel(self) -> str:
        """Return the name of the schema's notification channel."""
        return self.address.channel

    @property
    def waiter(self) -> Waiter:
        """Return the waiter that all of the app's waits in this process share. The waiter sends no queries before the first wait."""
        with self._lock:
            if self._waiter is None:
                self._waiter = Waiter(look_up=self._look_up, make_hint_source=self._make_hint_source)
            return self._waiter

    def announced(self) -> Plan[None]:
        """Announce the sends of this process now, if any are not announced yet, because the caller waits for a result."""
        if self._database is not None:
            yield from announced(self._database)

    def _look_up(self, ids: Sequence[UUID]) -> dict[UUID, StoredOutcome]:
        found = self.database().run(outcomes(ids))
        # The tasks that ended long ago are in `history`. Nearly all waits are for other tasks, so it is searched only for the rest.
        missing = [each for each in ids if each not in found]
        return found | self.database().run(history.outcomes(missing)) if missing else found

    def _make_hint_source(self) -> SyncHintSource:
        target = self.target
        return SyncPostgresHintSource(
            lambda: target.connect("everbeat waiter"), self.channel, also=(target.items_channel,)
        )

    @contextmanager
    def _turn(self, within_s: float) -> Iterator[float]:
        """Ensure that only one thread at a time opens the database. Yield how many of the `within_s` seconds remain."""
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
                # At exit, close the app before its server stops, because the shutdown would break the waiter's listening connection.
                atexit.register(_close_at_exit, weakref.ref(self))
        return self._opened

    def _still_opening(self, waited_s: float) -> DatabaseUnreachable:
        text = f"Another thread has been opening the database at {self.address.shown!r} for {waited_s:.3g} s."
        fix = "wait longer, or check that the database is running."
        return unreachable(text, fix=fix, last=self._signs.problem)

    def prepare(self, *, patience_s: float, within_s: float) -> Database:
        """Open the database, and create, upgrade or check its schema, in a single attempt. Raises DatabaseError on failure."""
        with self._turn(within_s) as left_s:
            if self._database is not None:
                return self._database
            opened = self._open(stopping_s=patience_s, within_s=left_s)
        database = Database(opened.target, patience_s=self._patience_s, signs=self._signs)
        patience_s = min(patience_s, max(left_s, _SHORTEST_S))
        opened.prepare(auto_migrate=self.auto_migrate, database=database, patience_s=patience_s)
        with self._lock:
            if self._opened is opened:  # the database has not been closed in the meantime
                self._database = database
        return database

    @property
    def is_open(self) -> bool:
        """Return whether the database address is known. The address of an embedded server is known only after the server starts."""
        return self._opened is not None

    def waited_for_until(self, began_at: float, patience_s: float) -> float:
        """Return the monotonic time at which a call stops waiting for another call's attempt.

        Each response from the database during that attempt extends the wait.
        """
        if not self.is_open:
            # An embedded server can take longer to start than any patience, so only a call's own time limit ends the wait.
            return monotonic() + _STARTING_POLL_S
        return max(began_at, self._opened_at, self._signs.last_at) + patience_s

    def close(self) -> None:
        """Close idle connections and release the embedded server, if any. The next call reopens them."""
        waiter, database, server = self._take()
        if waiter is not None:
            waiter.close()
        if database is not None:
            database.close()
        if server is not None:
            server.close()

    async def aclose(self) -> None:
        """Async version of `close` that does not block the running event loop. Also closes this loop's connections."""
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
                return (
                    waiter,
                    database,
                    None,
                )  # keep the database, because other event loops have connections in it
            self._database = self._opened = None
            return waiter, database, opened.server


def _close_at_exit(access: weakref.ref[DatabaseAccess]) -> None:
    if (opened := access()) is not None:
        opened.close()


class DatabaseMethods:
    """Base class for classes whose methods run plans. Each blocking method and its async counterpart run the same plan."""

    _database: DatabaseAccess

    def _run(self, name: str, plan: Plan[T], *, within_s: float = inf) -> T:
        """Run the plan of the method `name` in this thread and return its result.

        Raises BlockingCallInLoop, which names the async counterpart, on an event loop, and DatabaseError if the database fails.
        """
        owner = type(self).__name__
        return self._database.run(plan, name=f"{owner}.{name}", twin=f"{owner}.a{name}", within_s=within_s)

    async def _arun(self, plan: Plan[T], *, within_s: float = inf) -> T:
        """Run a plan on the running event loop and return its result. Raises DatabaseError if the database fails."""
        return await self._database.arun(plan, within_s=within_s)


class _FirstUse:
    """The time limits of a call that opens the database, or that waits for another call to open it."""

    def __init__(self, access: DatabaseAccess, within_s: float) -> None:
        self._access = access
        # A call with a time limit waits until that limit, just as it would during a later outage.
        self._patience_s = access.patience_s if within_s == inf else within_s
        self._began_at = monotonic()
        self._ends_at = self._began_at + within_s

    @property
    def waited_s(self) -> float:
        """Return the number of seconds since the call began."""
        return monotonic() - self._began_at

    def left_s(self) -> float:
        """Return how many more seconds this call may wait for another call to open the database."""
        until = self._access.waited_for_until(self._began_at, self._patience_s)
        return min(until, self._ends_at) - monotonic()

    def attempt(self) -> Database:
        """Open and return the database. If this call has already waited for another attempt, only the rest of its patience remains."""
        within_s = max(self._ends_at - monotonic(), 0.0)
        patience_s = max(self.left_s(), _SHORTEST_S) if self._access.is_open else self._patience_s
        return self._access.prepare(patience_s=patience_s, within_s=within_s)


def database_of(owner: DatabaseMethods) -> DatabaseAccess:
    """Return an app's database access, for use by other parts of everbeat."""
    return owner._database
