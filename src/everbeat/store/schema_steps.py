"""The steps of an upgrade: each is one .sql file of a migration. Those with `{concurrently}` build or drop an index outside of a transaction."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Struct
from psycopg import sql

from everbeat.store.migrations import Migration
from everbeat.store.statement import compose, source

LOCK_TIMEOUT_MS: Final = 500
"""How long one try waits for a lock. Everything that needs the table meanwhile waits behind it, so this bounds the delay of senders
and workers. It is many times as long as a transaction of everbeat's own, so a table without foreign transactions is got at the first try."""

_INDEX: Final = re.compile(
    r"^(?P<verb>create(?: unique)?|drop) index \{concurrently\} (?:\{schema\}\.)?(?P<name>\w+)", re.MULTILINE
)


class Step(Struct, frozen=True):
    """One step: the version it belongs to, and the name of its statement."""

    version: int
    statement: str

    @property
    def name(self) -> str:
        """The name of the step in its version."""
        return self.statement.rpartition("/")[2]

    @property
    def is_concurrent(self) -> bool:
        """Whether it builds or drops an index, outside of a transaction."""
        return "{concurrently}" in source(self.statement)

    @property
    def index(self) -> str:
        """The index that a concurrent step builds or drops."""
        return self._index["name"]

    @property
    def drops(self) -> bool:
        """Whether a concurrent step drops its index."""
        return self._index["verb"] == "drop"

    @property
    def _index(self) -> re.Match[str]:
        found = _INDEX.search(source(self.statement))
        if found is None:
            raise ValueError(
                f"{self.statement}: {{concurrently}} stands in 'create index {{concurrently}} name' and 'drop index {{concurrently}} {{schema}}.name'"
            )
        return found

    def text(self, schema: str) -> str:
        """The statement alone, for a schema that is in use."""
        return compose(self.statement, schema, concurrently=True).decode().strip()

    def record(self, schema: str) -> str:
        """The statement that records the step."""
        return literal("schema/record_step", schema, {"version": self.version, "name": self.name})

    def in_transaction(self, schema: str, *, lock_timeout_ms: int) -> str:
        """The statements of a step that runs in a transaction of its own: they hold one lock, or wait for it, and nothing before that."""
        return f"set local lock_timeout = {lock_timeout_ms};\n{self.text(schema)};\n{self.record(schema)}"


def steps_of(migration: Migration) -> Iterator[Step]:
    """The steps of a migration in their order."""
    for statement in migration.statements:
        yield Step(migration.version, statement)


def record_of(migration: Migration, schema: str) -> str:
    """The statement that records a version as applied."""
    parameters = {
        "version": migration.version,
        "name": migration.name,
        "oldest_code": migration.oldest_code,
    }
    return literal(migration.recorded_by, schema, parameters)


def literal(name: str, schema: str, parameters: Mapping[str, Any]) -> str:
    """A statement with its parameters written out, for a text that is sent or printed as a whole."""
    texts = {key: sql.Literal(value).as_string(None) for key, value in parameters.items()}
    return (compose(name, schema).decode() % texts).strip()
