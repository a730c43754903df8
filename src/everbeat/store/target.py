"""Where the database is, and how a connection to it is made, checked and judged when it breaks."""

from __future__ import annotations

import hashlib
import re
import sys
from typing import Any, Final

import psycopg
from msgspec import Struct, structs
from psycopg import AsyncConnection, Connection, conninfo

from everbeat.domain.settings import refused, shown
from everbeat.errors import (
    DatabaseError,
    DatabaseReadOnly,
    DatabaseTooOld,
    DatabaseUnreachable,
    SchemaForbidden,
    SchemaMissing,
    WrongDatabaseURL,
    nearest,
    redact_url,
)
from everbeat.store.connection import OwnAsyncConnection, OwnConnection
from everbeat.store.moments import read_every_moment
from everbeat.store.own_settings import OWN_SETTINGS

OLDEST_SERVER: Final = 140_000
CONNECT_TIMEOUT_S: Final = 5
SCHEMA_SUBJECT: Final = "App.schema"

# A connection that is silent is asked after 5 s, three times 2 s apart; unsent data is given up after 10 s.
_KEEPALIVE: Final = {
    "keepalives": "1",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
}

# The server's states in which the same statement may be sent again: lost connections, shutdown, too many connections, no
# resources (a full disk, memory), serialisation, deadlock, lock, statement and transaction timeouts. A server that accepts no
# write (25006) is an outage too: a managed server with a full disk, or a former primary.
_REPEATABLE: Final = re.compile(r"08...|57P0[1-5]|57014|53...|58...|40001|40P01|55P03|25006|25P0[234]")

# Two sessions can race for a slot that at most one live row has: the head of a serial line, or a key that an operator's retry brings
# back. The statement looks for a rival first, so the loser's repetition sees the winner.
_RACED: Final = frozenset({"tasks_serial_held", "tasks_key", "workflows_key"})


class Target(Struct, frozen=True):
    """One database and one schema in it. `url` is a libpq URL or conninfo string; it is never shown with its password."""

    url: str
    schema: str = "everbeat"
    accepts_read_only: bool = False

    def for_clients(self) -> Target:
        """Return the same target for a client, which can read from a standby or as a read-only role: the server refuses its writes."""
        return structs.replace(self, accepts_read_only=True)

    @classmethod
    def parse(cls, url: str, *, schema: str = "everbeat") -> Target:
        """Checks the URL and the schema's name, and adds what every connection needs.

        Raises WrongDatabaseURL, and ConfigurationError for the schema's name.
        """
        if (
            not isinstance(schema, str)
            or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", schema)
            or schema.lower().startswith("pg_")
        ):
            raise refused(
                schema,
                subject=SCHEMA_SUBJECT,
                code="WRONG_NAME",
                rule="a schema name is a letter or underscore, then up to 62 letters, digits or underscores, and does not begin with pg_",
                fix="choose a plain name such as 'everbeat'",
            )
        if not isinstance(url, str):
            raise WrongDatabaseURL(
                f"The database URL {shown(url)} is of type {type(url).__name__}; a URL is a text.",
                fix="give one like 'postgresql://user@host:5432/database', or 'embedded'.",
            )
        if not url.strip():
            raise WrongDatabaseURL(
                f"The database URL {url!r} is empty.",
                fix="give one like 'postgresql://user@host:5432/database', or 'embedded'.",
            )
        if nearest(url.partition(":")[0], ["embedded"]) is not None:
            raise WrongDatabaseURL(
                f"The database URL {url!r} is not known.", fix="write 'embedded' or 'embedded:FOLDER'."
            )
        scheme = url.partition("://")[0] if "://" in url else ""
        if scheme and scheme not in ("postgresql", "postgres"):
            raise WrongDatabaseURL(
                f"The database URL {redact_url(url)!r} begins with {scheme!r}; everbeat speaks to PostgreSQL only.",
                fix="begin it with 'postgresql://'"
                + (" (without a driver's name)." if scheme.startswith("postgres") else "."),
            )
        try:
            given = conninfo.conninfo_to_dict(url)
        except psycopg.ProgrammingError as problem:
            raise WrongDatabaseURL(
                f"The database URL {redact_url(url)!r} cannot be read: {str(problem).strip()}.",
                fix="write it as 'postgresql://user:password@host:5432/database'; special characters in a password are percent-encoded.",
            ) from None
        for port in str(given.get("port") or "").split(","):
            if port and not (port.isdecimal() and 1 <= int(port) <= 65_535):
                raise WrongDatabaseURL(
                    f"The database URL {redact_url(url)!r} names the port {port!r}; a port is a number from 1 to 65535.",
                    fix="write it as 'postgresql://user:password@host:5432/database'.",
                )
        return cls(url=url if given else "", schema=schema)

    @property
    def shown(self) -> str:
        """The URL without its password."""
        return redact_url(self.url)

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

    def conninfo(self, application_name: str) -> str:
        """The libpq string of one connection."""
        given: dict[str, Any] = dict(conninfo.conninfo_to_dict(self.url))
        settings: dict[str, Any] = {"connect_timeout": str(CONNECT_TIMEOUT_S), **_KEEPALIVE}
        if sys.platform == "linux":
            settings["tcp_user_timeout"] = "10000"
        hosts = str(given.get("host") or given.get("hostaddr") or "")
        if "," in hosts:
            settings["target_session_attrs"] = "read-write"
        settings.update(given)
        settings["application_name"] = application_name[:63]
        settings["client_encoding"] = "UTF8"  # whatever the database's is: text is text to us
        return conninfo.make_conninfo("", **settings)

    def connect(self, application_name: str) -> Connection[Any]:
        """A new checked connection in autocommit. Raises a DatabaseError that says what to do."""
        try:
            connection = OwnConnection.connect(self.conninfo(application_name), autocommit=True)
        except psycopg.Error as problem:
            raise self.explain(problem) from None
        try:
            self.check(connection)
            read_every_moment(connection)
            cursor = connection.execute(OWN_SETTINGS, [connection.info.backend_pid])
            _mark(connection, is_pooled=cursor.fetchone() is None)
        except psycopg.Error as problem:
            connection.close()
            raise self.explain(problem) from problem
        except BaseException:
            connection.close()
            raise
        return connection

    async def aconnect(self, application_name: str) -> AsyncConnection[Any]:
        """The twin of `connect` for event loops."""
        connection = await self.aopen(application_name)
        try:
            await self.agreet(connection)
        except psycopg.Error as problem:
            await connection.close()
            raise self.explain(problem) from problem
        except BaseException:
            await connection.close()
            raise
        return connection

    async def aopen(self, application_name: str) -> AsyncConnection[Any]:
        """The first half of `aconnect`: a checked connection that was asked nothing yet."""
        try:
            connection = await OwnAsyncConnection.connect(self.conninfo(application_name), autocommit=True)
        except psycopg.Error as problem:
            raise self.explain(problem) from None
        try:
            self.check(connection)
            read_every_moment(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def agreet(self, connection: AsyncConnection[Any]) -> None:
        """The second half of `aconnect`. Raises psycopg.Error."""
        cursor = await connection.execute(OWN_SETTINGS, [connection.info.backend_pid])
        _mark(connection, is_pooled=await cursor.fetchone() is None)

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
            raise DatabaseReadOnly(
                f"The database at {self.shown!r} is a standby or read-only; everbeat writes.",
                fix="point the URL to the primary, or list all hosts: 'postgresql://a,b/database' finds the one that writes.",
            )

    def explain(self, problem: psycopg.Error) -> DatabaseError:
        """What a failed connection or statement means, in everbeat's own errors."""
        text = _one_line(redact_url(str(problem)))
        match problem.sqlstate:
            case "42P01" | "3F000" | "42703":
                return SchemaMissing(
                    f"The schema {self.schema!r} in {self.shown!r} lacks what everbeat needs: {text}.",
                    fix="run 'everbeat migrate'.",
                )
            case "42501":
                return SchemaForbidden(
                    f"The role may not do this in schema {self.schema!r} of {self.shown!r}: {text}.",
                    fix=f"let it own its schema: 'create schema {self.schema} authorization <role>'.",
                )
            case "25006":
                return DatabaseReadOnly(
                    f"The database at {self.shown!r} is a standby or read-only, and this writes: {text}.",
                    fix="point the URL to the primary.",
                )
            case _ if is_repeatable(problem):
                return DatabaseUnreachable(
                    f"The database at {self.shown!r} cannot be reached: {text}.",
                    fix="check the URL and that the server runs and accepts this user.",
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


def _mark(connection: Connection[Any] | AsyncConnection[Any], *, is_pooled: bool) -> None:
    if is_pooled:
        connection.prepare_threshold = None  # a prepared statement may be on another server


def is_repeatable(problem: psycopg.Error) -> bool:
    """Whether the same statement may be sent again: the connection was lost, or the server could not just now."""
    if problem.sqlstate is None:
        return isinstance(problem, psycopg.OperationalError | psycopg.InterfaceError)
    return _REPEATABLE.fullmatch(problem.sqlstate) is not None or problem.diag.constraint_name in _RACED
