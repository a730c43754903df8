"""Where the database is, and how a connection to it is made, checked and judged when it breaks."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
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
from everbeat.store.hosts import Host, Hosts
from everbeat.store.moments import read_every_moment
from everbeat.store.own_settings import OWN_SETTINGS
from everbeat.store.refusals import is_refused_hint, is_repeatable
from everbeat.store.remedies import quoted, read_only, remedy_of_connection, remedy_of_right
from everbeat.store.silence import EndsAt, Limit, WatchedAsyncConnection, WatchedConnection, limited
from everbeat.store.url import Pooler, read_url, require_schema_name, shown_url, with_pooler, without_secrets

OLDEST_SERVER: Final = 140_000
CONNECT_TIMEOUT_S: Final = 5
_SHORTEST_GREETING_S: Final = 0.25

# A connection that is silent is asked after 5 s, three times 2 s apart; unsent data is given up after 10 s.
_KEEPALIVE: Final = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}


class Target(Struct, frozen=True):
    """One database and one schema in it. `url` is a libpq URL or conninfo string; it is never shown with its password."""

    url: str
    schema: str = "everbeat"
    accepts_read_only: bool = False
    pooler: Pooler | None = None

    def for_clients(self) -> Target:
        """Return the same target for a client, which can read from a standby or as a read-only role: the server refuses its writes."""
        return structs.replace(self, accepts_read_only=True)

    @classmethod
    def parse(cls, url: str, *, schema: str = "everbeat") -> Target:
        """Checks the URL and the schema's name, and adds what every connection needs.

        Raises WrongDatabaseURL, and ConfigurationError for the schema's name.
        """
        require_schema_name(schema)
        read, pooler = read_url(url)
        return cls(url=read, schema=schema, pooler=pooler)

    @property
    def portable(self) -> str:
        """The URL as `parse` reads it, with what libpq does not know."""
        return self.url if self.pooler is None else with_pooler(self.url, self.pooler)

    @property
    def shown(self) -> str:
        """The URL without its secrets."""
        return shown_url(self.url)

    def __repr__(self) -> str:
        return f"Target({self.shown!r}, schema={self.schema!r})"

    @property
    def channel(self) -> str:
        """The notification channel of the schema."""
        plain = f"everbeat_{self.schema}"
        return (
            plain
            if len(plain.encode()) <= 63
            else f"everbeat_{hashlib.blake2b(self.schema.encode(), digest_size=16).hexdigest()}"
        )

    def lock_key(self, subject: str) -> int:
        """A 64-bit advisory lock key for a subject; the schema is part of it."""
        digest = hashlib.blake2b(f"everbeat\0{self.schema}\0{subject}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    @property
    def hosts(self) -> Hosts:
        """The hosts of the URL, in its order."""
        return Hosts(conninfo.conninfo_to_dict(self.url))

    def twin_of(self, connection: Connection[Any] | AsyncConnection[Any]) -> str:
        """The libpq string of another connection to the server of this one, even if that server has become a standby."""
        info = connection.info
        there = Host(host=info.host or None, hostaddr=info.hostaddr or None, port=str(info.port))
        name = info.parameter_status("application_name") or "everbeat"
        return conninfo.make_conninfo(self.conninfo(name, hosts=there.settings()), target_session_attrs="any")

    def conninfo(self, application_name: str, *, hosts: Mapping[str, str] | None = None) -> str:
        """The libpq string of one connection; `hosts` replaces the settings that name the hosts."""
        given: dict[str, Any] = dict(conninfo.conninfo_to_dict(self.url))
        settings: dict[str, Any] = {"connect_timeout": str(CONNECT_TIMEOUT_S), **_KEEPALIVE}
        if sys.platform == "linux":
            settings["tcp_user_timeout"] = "10000"
        if "," in str(given.get("host") or given.get("hostaddr") or ""):
            settings["target_session_attrs"] = "primary" if self.accepts_read_only else "read-write"
        settings.update(given)
        settings.update(hosts or {})
        settings["application_name"] = application_name[:63]
        settings["client_encoding"] = "UTF8"  # whatever the database's is: text is text to us
        return conninfo.make_conninfo("", **settings)

    def connect(
        self, application_name: str, *, hosts: Hosts | None = None, ends_at: float | None = None
    ) -> WatchedConnection:
        """A new checked connection in autocommit, made until `ends_at` on the monotonic clock, to the first of `hosts` that writes.

        Raises a DatabaseError that says what to do.
        """
        limit = None if ends_at is None else Limit(ends_at=ends_at, hosts=1 if hosts is None else len(hosts))
        try:
            with limited(limit):
                connection = WatchedConnection.connect(
                    self._made_for(application_name, hosts), autocommit=True
                )
        except psycopg.Error as problem:
            raise self.explain(problem) from None
        host = None if hosts is None else hosts.answered(connection)
        try:
            connection.watch = _greeting(connection, ends_at)
            self.check(connection)
            read_every_moment(connection)
            cursor = connection.execute(OWN_SETTINGS, self._greeting_of(connection))
            _mark(connection, cursor.fetchone())
            connection.watch = None
        except BaseException as problem:
            connection.close()
            if hosts is not None and host is not None:
                hosts.failed(host)
            if isinstance(problem, psycopg.Error):
                raise self.explain(problem) from problem
            raise
        connection.host = host
        return connection

    async def aconnect(
        self, application_name: str, *, hosts: Hosts | None = None, ends_at: float | None = None
    ) -> WatchedAsyncConnection:
        """The twin of `connect` for event loops."""
        limit = None if ends_at is None else Limit(ends_at=ends_at, hosts=1 if hosts is None else len(hosts))
        with limited(limit):
            connection = await self._aopen(self._made_for(application_name, hosts))
        host = None if hosts is None else hosts.answered(connection)
        try:
            connection.watch = _greeting(connection, ends_at)
            self.check(connection)
            await self.agreet(connection)
            connection.watch = None
        except BaseException as problem:
            await connection.close()
            if hosts is not None and host is not None:
                hosts.failed(host)
            if isinstance(problem, psycopg.Error):
                raise self.explain(problem) from problem
            raise
        connection.host = host
        return connection

    async def aopen(self, application_name: str) -> WatchedAsyncConnection:
        """The first half of `aconnect`: a checked connection that was asked nothing yet."""
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
        """The second half of `aconnect`. Raises psycopg.Error."""
        cursor = await connection.execute(OWN_SETTINGS, self._greeting_of(connection))
        _mark(connection, await cursor.fetchone())

    def _greeting_of(self, connection: Connection[Any] | AsyncConnection[Any]) -> list[Any]:
        return [connection.info.backend_pid, self.pooler == "session"]

    def check(self, connection: Connection[Any] | AsyncConnection[Any]) -> None:
        """Refuses servers that are too old or, unless that is accepted, cannot write.

        They said so when greeting: no statement is spent.
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
        """The error of a schema that was there and is not: an outage until it is back."""
        text = _one_line(without_secrets(str(problem), self.url))
        return SchemaGone(
            f"The schema {self.schema!r} in {self.shown!r} is gone, renamed or dropped: {text}.",
            fix=f"if it was renamed, {self._rename_back}.",
        )

    @property
    def _rename_back(self) -> str:
        return f"rename it back: alter schema <new name> rename to {quoted(self.schema)}; 'everbeat doctor' finds the new name"

    def refused_write(
        self, problem: BaseException, connection: Connection[Any] | AsyncConnection[Any] | None
    ) -> DatabaseReadOnly | None:
        """The error of a statement that was refused because it writes; None for other problems. An open connection tells why."""
        if not isinstance(problem, psycopg.errors.ReadOnlySqlTransaction):
            return None
        text = _one_line(without_secrets(str(problem), self.url))
        found, fix = read_only(connection)
        return DatabaseReadOnly(f"The database at {self.shown!r} {found}, and this writes: {text}.", fix=fix)

    def explain(self, problem: psycopg.Error) -> DatabaseError:
        """What a failed connection or statement means, in everbeat's own errors."""
        if (refused := self.refused_write(problem, None)) is not None:
            return refused
        text = _one_line(without_secrets(str(problem), self.url))
        match problem.sqlstate:
            case "42P01" | "3F000" | "42703":
                return SchemaMissing(
                    f"The schema {self.schema!r} in {self.shown!r} lacks what everbeat needs: {text}.",
                    fix=f"run 'everbeat migrate'; if the schema was renamed, {self._rename_back}.",
                )
            case "42501":
                return SchemaForbidden(
                    f"The role may not do this in schema {self.schema!r} of {self.shown!r}: {text}.",
                    fix=remedy_of_right(text, schema=self.schema),
                )
            case _ if is_refused_hint(problem):
                return DatabaseUnreachable(
                    f"The database at {self.shown!r} did not commit, because its queue of notifications is full: {text}.",
                    fix="try again, which sends no notification; 'everbeat doctor' reports what keeps the queue full.",
                )
            case _ if is_repeatable(problem):
                return DatabaseUnreachable(
                    f"The database at {self.shown!r} cannot be reached: {text}.",
                    fix=remedy_of_connection(text),
                )
            case _:
                return DatabaseError(f"The database at {self.shown!r} refused: {text}.")


def _one_line(text: str) -> str:
    """What libpq says in several lines, without its question whether the server runs: our own fix asks that."""
    lines = (line.strip() for line in text.splitlines())
    kept = [line for line in lines if line and not line.startswith("Is the server running")]
    return "; ".join(kept).rstrip(".")


def is_read_only(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether the server of this connection is a standby, or read-only by default, as it said last."""
    status = connection.info.parameter_status
    return status("in_hot_standby") == "on" or status("default_transaction_read_only") == "on"


def is_pooled(connection: Connection[Any] | AsyncConnection[Any]) -> bool:
    """Whether a transaction pooler stands between a connection of ours and the server."""
    return connection.prepare_threshold is None


def _mark(connection: WatchedConnection | WatchedAsyncConnection, row: tuple[Any, ...] | None) -> None:
    assert row is not None
    connection.server_pid, is_ours = row
    if not is_ours:
        connection.prepare_threshold = None  # a prepared statement may be on another server


def _greeting(connection: WatchedConnection | WatchedAsyncConnection, ends_at: float | None) -> EndsAt | None:
    # Half of the time that is left: a pooler accepts connections for a server that is frozen.
    now = monotonic()
    return (
        None if ends_at is None else EndsAt(connection, now + max((ends_at - now) / 2, _SHORTEST_GREETING_S))
    )
