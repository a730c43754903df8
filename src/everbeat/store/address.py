"""From what a user gave as a database (a URL, "embedded", nothing) to a target that is open and has its schema.

What lives here: reading the address, opening the embedded server for it, checking or migrating the schema once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar

import psycopg
from msgspec import Struct

from everbeat.domain.upgrades import UnfinishedUpgrade
from everbeat.errors import EmbeddedUnavailable, WrongDatabaseURL
from everbeat.store import migrating, migrations
from everbeat.store.database import Database
from everbeat.store.migrations import SchemaStatus
from everbeat.store.silence import WatchedConnection
from everbeat.store.target import Target
from everbeat.store.unfinished import unfinished
from everbeat.store.upgrade import DEFAULT_LOCK_PATIENCE_S, Tell, tell_nobody
from everbeat.store.url import shown_url

if TYPE_CHECKING:
    from everbeat.store.embedded import EmbeddedServer

URL_VARIABLE: Final = "EVERBEAT_DATABASE_URL"
FOLDER_VARIABLE: Final = "EVERBEAT_EMBEDDED_DIR"
EMBEDDED: Final = "embedded"
AutoMigrate: TypeAlias = bool | Literal["create"]
"""What the first use may do: "create" makes a schema that is absent, True also upgrades an older one, False does neither."""
_MIGRATES: Final = "everbeat migrate"

T = TypeVar("T")


class DatabaseAddress(Struct, frozen=True, kw_only=True):
    """Where a database is: a URL, or the folder of an embedded one; and the schema in it."""

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
        """Reads what was given, else EVERBEAT_DATABASE_URL; opens nothing. Raises WrongDatabaseURL, ConfigurationError."""
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
        """The address without its secrets."""
        return shown_url(self.url) if self.folder is None else f"{EMBEDDED}:{self.folder}"

    def require_there(self) -> None:
        """Raises EmbeddedUnavailable for an embedded server that was never made: for who only looks, and would look at nothing."""
        if self.folder is None or _embedded().EmbeddedServer.status(self.folder).initialised:
            return
        raise EmbeddedUnavailable(
            f"There is no embedded PostgreSQL in {self.folder}, and looking does not make one.",
            fix="did you mean another folder? One is made by 'everbeat migrate', by a worker, and by a program that sends.",
        )

    @property
    def portable(self) -> str:
        """The address as another process of this host understands it, whatever its folder and environment."""
        return self.url if self.folder is None else f"{EMBEDDED}:{self.folder}"

    def upgrades(self, auto_migrate: AutoMigrate) -> bool:
        """Whether the first use upgrades an older schema: on request, and on an embedded server, which belongs to its user alone."""
        return auto_migrate is True or (auto_migrate == "create" and self.folder is not None)

    @property
    def channel(self) -> str:
        """The notification channel of the schema."""
        return Target(url="", schema=self.schema).channel

    def open(self, *, stopping_s: float = 60.0, within_s: float = 120.0) -> OpenDatabase:
        """The target, its embedded server started or joined within these times (`EmbeddedServer.open`). Raises EmbeddedUnavailable."""
        if self.folder is None:
            return OpenDatabase(address=self, target=Target.parse(self.url, schema=self.schema), server=None)
        server: EmbeddedServer = _embedded().EmbeddedServer.open(
            self.folder, stopping_s=stopping_s, within_s=within_s
        )
        target = Target.parse(server.url, schema=self.schema)
        return OpenDatabase(address=self, target=target, server=server)


NOWHERE: Final = DatabaseAddress(url="", folder=None, schema="everbeat")
"""What stands for an address that was refused where mistakes are gathered; nobody opens it."""


class OpenDatabase(Struct, frozen=True, kw_only=True):
    """A target, and this process's use of the embedded server if it is one."""

    address: DatabaseAddress
    target: Target
    server: EmbeddedServer | None

    def close(self) -> None:
        """Ends the use of the embedded server."""
        if self.server is not None:
            self.server.close()

    def prepare(
        self, *, auto_migrate: AutoMigrate, database: Database | None = None, patience_s: float | None = None
    ) -> None:
        """Creates or upgrades the schema if it may, and checks that this code works with it. Raises a DatabaseError that says what to do.

        Through `database` it is repeated and bounded as the calls of a client are; without, there is one try.
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
        tell: Tell = tell_nobody,
        database: Database | None = None,
        patience_s: float | None = None,
    ) -> tuple[int, ...]:
        """Applies what is pending (up to version `to`) and answers the versions applied, as `migrating.migrate` does."""

        def migrate(connection: WatchedConnection) -> tuple[int, ...]:
            return migrating.migrate(connection, self.target, to=to, patience_s=lock_patience_s, tell=tell)

        return self._connected(migrate, database, patience_s)

    def drop(self, *, database: Database | None = None) -> None:
        """Drops the schema with everything in it. Raises a DatabaseError."""
        self._connected(lambda connection: migrating.drop(connection, self.target), database, None)

    def status(self, *, database: Database | None = None, patience_s: float | None = None) -> SchemaStatus:
        """What is applied in the schema. Raises a DatabaseError."""
        return self._connected(
            lambda connection: migrations.status(connection, self.target), database, patience_s
        )

    def unfinished(self, *, database: Database | None = None) -> UnfinishedUpgrade:
        """What an upgrade that is under way, or ended half way, has left in the schema. Raises a DatabaseError."""
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
    """The room of the embedded server: an extra, loaded where it is asked for and not by whoever has a URL."""
    return import_module("everbeat.store.embedded")
