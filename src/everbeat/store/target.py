"""The address of a database, the code that opens and checks connections to it, and transactions on these connections."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any, Final

import psycopg
from msgspec import Struct, structs
from psycopg import AsyncConnection, Connection, conninfo

from everbeat.errors import (
    DatabaseError,
    DatabaseReadOnly,
    DatabaseTooOld,
    DatabaseUnreachable,
    SchemaForbidden,
    SchemaGone,
    SchemaMissing,
)
from everbeat.store.connection import (
    BOUND_TRANSACTION,
    OWN_SETTINGS,
    ConnectLimit,
    EndsAt,
    Host,
    Hosts,
    WatchedAsyncConnection,
    WatchedConnection,
    limited,
)
from everbeat.store.refusals import (
    is_refused_hint,
    is_repeatable,
    quoted,
    read_only,
    remedy_of_connection,
    remedy_of_right,
)
from everbeat.store.statement import read_every_moment
from everbeat.store.url import Pooler, read_url, require_schema_name, shown_url, with_pooler, without_secrets

OLDEST_SERVER: Final = 140_000
CONNECT_TIMEOUT_S: Final = 5
_SHORTEST_GREETING_S: Final = 0.25
_ABOUT_DATA: Final = ("22", "23")
"""Classes of errors whose details contain data: PostgreSQL repeats the whole row that violates a constraint."""

# After 5 s of silence, a connection is probed three times at intervals of 2 s. It fails if sent data is not acknowledged within 10 s.
_KEEPALIVE: Final = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}


class Target(Struct, frozen=True):
    """A database and a schema in it. `url` is a libpq URL or conninfo string; its password is never shown."""

    url: str
    schema: str = "everbeat"
    accepts_read_only: bool = False
    pooler: Pooler | None = None

    def for_clients(self) -> Target:
        """Return the same target for a client.

        A client may read from a standby or as a read-only role; the server then refuses the client's writes.
        """
        return structs.replace(self, accepts_read_only=True)

    @classmethod
    def parse(cls, url: str, *, schema: str = "everbeat") -> Target:
        """Return the target for a URL and a schema name.

        Raises WrongDatabaseURL if the URL is invalid, and ConfigurationError if the schema name is invalid.
        """
        require_schema_name(schema)
        read, pooler = read_url(url)
        return cls(url=read, schema=schema, pooler=pooler)

    @property
    def portable(self) -> str:
        """Return the URL in the form that `parse` reads, including the options that libpq does not know."""
        return self.url if self.pooler is None else with_pooler(self.url, self.pooler)

    @property
    def shown(self) -> str:
        """Return the URL without its secrets."""
        return shown_url(self.url)

    def __repr__(self) -> str:
        return f"Target({self.shown!r}, schema={self.schema!r})"

    @property
    def channel(self) -> str:
        """Return the name of the schema's notification channel."""
        return self._channel("everbeat_")

    @property
    def items_channel(self) -> str:
        """Return the name of the channel that announces the items of streams. Only readers of streams and results listen to it."""
        return self._channel("everbeat items ")

    def _channel(self, prefix: str) -> str:
        plain = f"{prefix}{self.schema}"
        if len(plain.encode()) <= 63:
            return plain
        return f"{prefix}{hashlib.blake2b(self.schema.encode(), digest_size=16).hexdigest()}"

    def lock_key(self, subject: str) -> int:
        """Return the 64-bit advisory lock key for a subject in this schema."""
        digest = hashlib.blake2b(f"everbeat\0{self.schema}\0{subject}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    @property
    def hosts(self) -> Hosts:
        """Return the hosts of the URL, in the order in which the URL lists them."""
        return Hosts(conninfo.conninfo_to_dict(self.url))

    def twin_of(self, connection: Connection[Any] | AsyncConnection[Any]) -> str:
        """Return the conninfo string for another connection to the same server, even if that server has become a standby."""
        info = connection.info
        there = Host(host=info.host or None, hostaddr=info.hostaddr or None, port=str(info.port))
        name = info.parameter_status("application_name") or "everbeat"
        return conninfo.make_conninfo(self.conninfo(name, hosts=there.settings()), target_session_attrs="any")

    def conninfo(self, application_name: str, *, hosts: Mapping[str, str] | None = None) -> str:
        """Return the conninfo string for one connection. If given, `hosts` replaces the settings that list the hosts."""
        given: dict[str, Any] = dict(conninfo.conninfo_to_dict(self.url))
        settings: dict[str, Any] = {"connect_timeout": str(CONNECT_TIMEOUT_S), **_KEEPALIVE}
        if sys.platform == "linux":
            settings["tcp_user_timeout"] = "10000"
        if "," in str(given.get("host") or given.get("hostaddr") or ""):
            settings["target_session_attrs"] = "primary" if self.accepts_read_only else "read-write"
        settings.update(given)
        settings.update(hosts or {})
        settings["application_name"] = application_name[:63]
        settings["client_encoding"] = "UTF8"  # the encoding of the database does not matter
        return conninfo.make_conninfo("", **settings)

    def connect(
        self, application_name: str, *, hosts: Hosts | None = None, ends_at: float | None = None
    ) -> WatchedConnection:
        """Return a new connection in autocommit mode to the first of `hosts` that accepts writes, after checking its server.

        `ends_at` is the deadline on the monotonic clock. Raises DatabaseError with a fix if no suitable host can be reached.
        """
        try:
            with limited(_limit(hosts, ends_at)):
                connection = WatchedConnection.connect(
                    self._made_for(application_name, hosts), autocommit=True
                )
        except psycopg.Error as problem:
            raise self.explain(problem) from None
        try:
            with self._greeting(connection, hosts, ends_at):
                read_every_moment(connection)
                cursor = connection.execute(OWN_SETTINGS, self._greeting_of(connection))
                _mark(connection, cursor.fetchone())
        except BaseException:
            connection.close()
            raise
        return connection

    async def aconnect(
        self, application_name: str, *, hosts: Hosts | None = None, ends_at: float | None = None
    ) -> WatchedAsyncConnection:
        """The asynchronous counterpart of `connect`."""
        with limited(_limit(hosts, ends_at)):
            connection = await self._aopen(self._made_for(application_name, hosts))
        try:
            with self._greeting(connection, hosts, ends_at):
                await self.agreet(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    @contextmanager
    def _greeting(
        self,
        connection: WatchedConnection | WatchedAsyncConnection,
        hosts: Hosts | None,
        ends_at: float | None,
    ) -> Iterator[None]:
        """Check a new connection, and limit the time for its first statement, which the caller runs inside the block.

        After a failure, the host moves to the end of the order.
        """
        host = None if hosts is None else hosts.answered(connection)
        try:
            if ends_at is not None:
                # Use half of the remaining time, because a pooler accepts connections even if its server is frozen.
                now = monotonic()
                connection.watch = EndsAt(connection, now + max((ends_at - now) / 2, _SHORTEST_GREETING_S))
            self.check(connection)
            yield
        except BaseException as problem:
            if hosts is not None and host is not None:
                hosts.failed(host)
            if isinstance(problem, psycopg.Error):
                raise self.explain(problem) from problem
            raise
        connection.watch, connection.host = None, host

    async def aopen(self, application_name: str) -> WatchedAsyncConnection:
        """Return a checked connection that has not run any statement yet. This is the first half of `aconnect`."""
        connection = await self._aopen(self.conninfo(application_name))
        try:
            self.check(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _aopen(self, conninfo: str) -> WatchedAsyncConnection:
        try:
            connection = await WatchedAsyncConnection.connect(conninfo, autocommit=True)
        except psycopg.Error as problem:
            raise self.explain(problem) from None
        read_every_moment(connection)
        return connection

    def _made_for(self, application_name: str, hosts: Hosts | None) -> str:
        return self.conninfo(application_name, hosts=None if hosts is None else hosts.settings())

    async def agreet(self, connection: WatchedAsyncConnection) -> None:
        """Run the first statement on the connection. This is the second half of `aconnect`. Raises psycopg.Error if the statement fails."""
        cursor = await connection.execute(OWN_SETTINGS, self._greeting_of(connection))
        _mark(connection, await cursor.fetchone())

    def _greeting_of(self, connection: Connection[Any] | AsyncConnection[Any]) -> list[Any]:
        return [connection.info.backend_pid, self.pooler == "session"]

    def check(self, connection: Connection[Any] | AsyncConnection[Any]) -> None:
        """Raise DatabaseTooOld if the server is too old. Raise DatabaseReadOnly if it is read-only and the target does not accept that.

        The server reports both facts when a connection is opened, so the check needs no statement.
        """
        version = connection.info.server_version
        if version < OLDEST_SERVER:
            raise DatabaseTooOld(
                f"The database at {self.shown!r} is PostgreSQL {version // 10_000}; everbeat needs 14 or newer.",
                fix="upgrade the server.",
            )
        if is_read_only(connection) and not self.accepts_read_only:
            found, fix = read_only(connection)
            raise DatabaseReadOnly(f"The database at {self.shown!r} {found}; everbeat writes.", fix=fix)

    def gone(self, problem: psycopg.Error) -> SchemaGone:
        """Return the error for a schema that has disappeared. The error counts as an outage until the schema is back."""
        text = self._told(problem)
        return SchemaGone(
            f"The schema {self.schema!r} in {self.shown!r} is gone, renamed or dropped: {text}.",
            fix=f"if it was renamed, {self._rename_back}.",
        )

    def _told(self, problem: BaseException) -> str:
        """Return a message of the server or libpq without secrets, and without the values of a row that the server refused."""
        text = str(problem)
        if isinstance(problem, psycopg.Error) and (problem.sqlstate or "")[:2] in _ABOUT_DATA:
            text = problem.diag.message_primary or text
        return _one_line(without_secrets(text, self.url))

    @property
    def _rename_back(self) -> str:
        return f"rename it back: alter schema <new name> rename to {quoted(self.schema)}; 'everbeat doctor' finds the new name"

    def refused_write(
        self, problem: BaseException, connection: Connection[Any] | AsyncConnection[Any] | None
    ) -> DatabaseReadOnly | None:
        """Return the error for a statement that a read-only server refused, or None for any other problem.

        If `connection` is open, its server provides the reason.
        """
        if not isinstance(problem, psycopg.errors.ReadOnlySqlTransaction):
            return None
        text = self._told(problem)
        found, fix = read_only(connection)
        return DatabaseReadOnly(f"The database at {self.shown!r} {found}, and this writes: {text}.", fix=fix)

    def explain(self, problem: psycopg.Error) -> DatabaseError:
        """Return the everbeat error for a failed connection attempt or statement."""
        if (refused := self.refused_write(problem, None)) is not None:
            return refused
        text = self._told(problem)
        match problem.sqlstate:
            case "42P01" | "3F000" | "42703":
                return SchemaMissing(
                    f"The schema {self.schema!r} in {self.shown!r} lacks what everbeat needs: {text}.",
                    fix=f"run 'everbeat migrate'; if the schema was renamed, {self._rename_back}.",
                )
            case "42501":
                return SchemaForbidden(
                    f"The role cannot do this in schema {self.schema!r} of {self.shown!r}: {text}.",
                    fix=remedy_of_right(text, schema=self.schema),
                )
            case _ if is_refused_hint(problem):
                return DatabaseUnreachable(
                    f"The database at {self.shown!r} did not commit, because its queue of notifications is full: {text}.",
                    fix="try again, which sends no notification; 'everbeat doctor' reports what keeps the queue full.",
                )
            case "57014":
                return DatabaseUnreachable(
                    f"The database at {self.shown!r} did not finish a statement: {text}.",
                    fix="see what it waits for: 'everbeat doctor'.",
                )
            case _ if is_repeatable(problem):
                return DatabaseUnreachable(
                    f"The database at {self.shown!r} cannot be reached: {text}.",
                    fix=remedy_of_connection(text),
                )
            case _:
                return DatabaseError(f"The database at {self.shown!r} refused: {text}.")


def _one_line(text: str) -> str:
    """Return libpq's message on one line, without the question of whether the server is running. The error's fix covers that question."""
    lines = (line.strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith("Is the server running")]
    return "; ".join(kept).rstrip(".")


def is_read_only(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Return whether the server last reported that it is a standby, or that transactions are read-only by default."""
    status = connection.info.parameter_status
    return status("in_hot_standby") == "on" or status("default_transaction_read_only") == "on"


def is_pooled(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Return whether this connection, which everbeat itself opened, goes through a transaction pooler."""
    return connection.prepare_threshold is None


def _mark(connection: WatchedConnection | WatchedAsyncConnection, row: tuple[Any, ...] | None) -> None:
    assert row is not None
    connection.server_pid, is_ours = row
    if not is_ours:
        connection.prepare_threshold = None  # a prepared statement may be on another server


def _limit(hosts: Hosts | None, ends_at: float | None) -> ConnectLimit | None:
    return (
        None if ends_at is None else ConnectLimit(ends_at=ends_at, hosts=1 if hosts is None else len(hosts))
    )


@contextmanager
def transaction(connection: Connection[Any]) -> Iterator[None]:
    """Run the block in one transaction.

    The server rolls the transaction back if this process pauses for too long between two statements.
    """
    with connection.transaction():
        if is_pooled(connection):
            connection.execute(BOUND_TRANSACTION)
        yield


@asynccontextmanager
async def atransaction(connection: AsyncConnection[Any]) -> AsyncIterator[None]:
    """The asynchronous counterpart of `transaction`."""
    async with connection.transaction():
        if is_pooled(connection):
            await connection.execute(BOUND_TRANSACTION)
        yield
