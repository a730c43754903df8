"""Resolve a database setting (a URL, "embedded", or nothing) to an open target whose schema exists."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import psycopg
from msgspec import Struct
from psycopg import conninfo

from everbeat.domain.doctor.server import UnfinishedUpgrade
from everbeat.errors import EmbeddedUnavailable, WrongDatabaseURL
from everbeat.store import migrating, migrations
from everbeat.store.connection import WatchedConnection
from everbeat.store.database import Database
from everbeat.store.migrating import DEFAULT_LOCK_PATIENCE_S, Report, report_nothing, unfinished
from everbeat.store.migrations import SchemaStatus
from everbeat.store.target import Target
from everbeat.store.url import shown_url

if TYPE_CHECKING:
    from everbeat.embedded.server import EmbeddedServer

URL_VARIABLE: Final = "EVERBEAT_DATABASE_URL"
FOLDER_VARIABLE: Final = "EVERBEAT_EMBEDDED_DIR"
EMBEDDED: Final = "embedded"
AutoMigrate: TypeAlias = bool | Literal["create"]
"""Whether the first use of a database creates a missing schema ("create"), creates or upgrades it (True), or does neither (False)."""
_PORT: Final = 5432
_MIGRATES: Final = "everbeat migrate"

T = TypeVar("T")


class DatabaseAddress(Struct, frozen=True, kw_only=True):
    """The address of a database: a URL or the folder of an embedded server, and the name of the schema."""

    url: str
    folder: Path | None
    schema: str

    @classmethod
    def parse(
        cls,
        given: str | None,
        *,
        schema: str,
        environment: Mapping[str, str],
    ) -> DatabaseAddress:
        """Parse the given URL, or EVERBEAT_DATABASE_URL if it is None. Nothing is opened.

        Raises WrongDatabaseURL if the URL is missing or invalid, and ConfigurationError if the schema name is invalid.
        """
        url = environment.get(URL_VARIABLE) if given is None else given
        if url is None:
            raise WrongDatabaseURL(
                f"No database was given: App() takes it from {URL_VARIABLE}, which is not set.",
                fix=f"set {URL_VARIABLE} or write App('postgresql://user@host/database');"
                " App('embedded') keeps a PostgreSQL in ./.everbeat.",
            )
        if isinstance(url, str) and (url == EMBEDDED or url.startswith(f"{EMBEDDED}:")):
            Target.parse("postgresql://", schema=schema)  # only the schema's name can be wrong
            named = url.removeprefix(EMBEDDED).removeprefix(":")
            folder = Path(named or environment.get(FOLDER_VARIABLE) or _embedded().DEFAULT_FOLDER)
            return cls(url=EMBEDDED, folder=folder.absolute(), schema=schema)
        target = Target.parse(url, schema=schema)
        return cls(url=target.portable, folder=None, schema=schema)

    def __repr__(self) -> str:
        return f"DatabaseAddress({self.shown!r}, schema={self.schema!r})"

    @property
    def shown(self) -> str:
        """Return the address without its secrets."""
        return shown_url(self.url) if self.folder is None else f"{EMBEDDED}:{self.folder}"

    @property
    def server(self) -> tuple[str, int] | None:
        """Return the host, or the folder of the socket, and the port. Return None if the URL does not name exactly one server."""
        if self.folder is not None:
            return None
        given = conninfo.conninfo_to_dict(self.url)
        host = str(given.get("host") or given.get("hostaddr") or os.environ.get("PGHOST") or "")
        port = str(given.get("port") or os.environ.get("PGPORT") or _PORT)
        return (host, int(port)) if host and "," not in host and port.isdecimal() else None

    def require_there(self) -> None:
        """Raise EmbeddedUnavailable if the embedded server was never created. A command that only reads must not create one."""
        if self.folder is None or _embedded().EmbeddedServer.status(self.folder).initialised:
            return
        raise EmbeddedUnavailable(
            f"There is no embedded PostgreSQL in {self.folder}, and commands that only read do not create one.",
            fix="did you mean another folder? 'everbeat migrate', a worker, or a program that sends tasks creates the server.",
        )

    @property
    def portable(self) -> str:
        """Return the address in a form that another process on this host can use, from any folder and in any environment."""
        return self.url if self.folder is None else f"{EMBEDDED}:{self.folder}"

    def upgrades(self, auto_migrate: AutoMigrate) -> bool:
        """Return whether the first use of the database upgrades an older schema.

        It does if `auto_migrate` is True. On an embedded server, which has a single user, "create" is sufficient.
        """
        return auto_migrate is True or (auto_migrate == "create" and self.folder is not None)

    @property
    def channel(self) -> str:
        """Return the name of the schema's notification channel."""
        return Target(url="", schema=self.schema).channel

    def open(self, *, stopping_s: float = 60.0, within_s: float = 120.0) -> OpenDatabase:
        """Open the database and return it.

        An embedded server is started or joined within `stopping_s` and `within_s` (see `EmbeddedServer.open`). Raises EmbeddedUnavailable
        if the embedded server cannot be started or joined.
        """
        if self.folder is None:
            return OpenDatabase(address=self, target=Target.parse(self.url, schema=self.schema), server=None)
        server: EmbeddedServer = _embedded().EmbeddedServer.open(
            self.folder, stopping_s=stopping_s, within_s=within_s
        )
        target = Target.parse(server.url, schema=self.schema)
        return OpenDatabase(address=self, target=target, server=server)


NOWHERE: Final = DatabaseAddress(url="", folder=None, schema="everbeat")
"""A placeholder for an invalid address while errors are being collected. It is never opened."""


class OpenDatabase(Struct, frozen=True, kw_only=True):
    """A target and, for an embedded server, this process's handle to the server."""

    address: DatabaseAddress
    target: Target
    server: EmbeddedServer | None

    def close(self) -> None:
        """Close the handle to the embedded server, if any."""
        if self.server is not None:
            self.server.close()

    def prepare(
        self, *, auto_migrate: AutoMigrate, database: Database | None = None, patience_s: float | None = None
    ) -> None:
        """Create or upgrade the schema if `auto_migrate` allows it, and check that this code works with the schema.

        If `database` is set, the work is repeated and limited in time like a client's calls. Otherwise, it is tried once. Raises
        DatabaseError if the schema cannot be used.
        """
        upgrades = self.address.upgrades(auto_migrate)
        lock_patience_s = DEFAULT_LOCK_PATIENCE_S if patience_s is None else patience_s

        def fit(connection: WatchedConnection) -> None:
            found = migrations.status(connection, self.target)
            if found.pending and (upgrades or (auto_migrate and not found.applied)):
                migrating.migrate(
                    connection, self.target, only_absent=not upgrades, patience_s=lock_patience_s
                )
                found = migrations.status(connection, self.target)
            migrations.require_fit(found, self.target)

        self._connected(fit, database, patience_s)

    def migrate(
        self,
        *,
        to: int | None = None,
        lock_patience_s: float = DEFAULT_LOCK_PATIENCE_S,
        report: Report = report_nothing,
        database: Database | None = None,
        patience_s: float | None = None,
    ) -> tuple[int, ...]:
        """Apply the pending migrations up to version `to`. Return the applied versions. See `migrating.migrate`."""

        def migrate(connection: WatchedConnection) -> tuple[int, ...]:
            return migrating.migrate(
                connection, self.target, to=to, patience_s=lock_patience_s, report=report
            )

        return self._connected(migrate, database, patience_s)

    def drop(self, *, database: Database | None = None) -> None:
        """Drop the schema and everything in it. Raises DatabaseError on failure."""
        self._connected(lambda connection: migrating.drop(connection, self.target), database, None)

    def status(self, *, database: Database | None = None, patience_s: float | None = None) -> SchemaStatus:
        """Return the schema's applied versions and the versions that this code knows. Raises DatabaseError on failure."""
        return self._connected(
            lambda connection: migrations.status(connection, self.target), database, patience_s
        )

    def unfinished(self, *, database: Database | None = None) -> UnfinishedUpgrade:
        """Return the state of an upgrade that is running or was interrupted. Raises DatabaseError on failure."""
        return self._connected(lambda connection: unfinished(connection, self.target), database, None)

    def _connected(
        self, work: Callable[[WatchedConnection], T], database: Database | None, patience_s: float | None
    ) -> T:
        if database is not None:
            return database.on_own_connection(_MIGRATES, work, patience_s=patience_s)
        with self.target.connect(_MIGRATES) as connection:
            try:
                return work(connection)
            except psycopg.Error as problem:
                raise self.target.explain(problem) from problem


def _embedded() -> Any:
    """Return the module of the embedded server. The module belongs to an optional extra, so programs that use a URL do not load it."""
    return import_module("everbeat.embedded.server")
